"""Converts traditional to simplified Chinese with OpenCC (t2s)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from palm_ds.common.errors import UserError


@cache
def find_simplifier() -> Callable[[str], str]:
    """OpenCC's converter. It converts word by word and may change the length of a text."""
    try:
        from opencc import OpenCC
    except ImportError:
        raise UserError("simplify: needs the package opencc: pip install opencc") from None
    return OpenCC("t2s").convert


def simplify_in_place(text: str) -> str:
    """Simplifies without changing the length, so that character offsets stay valid.

    >>> simplify_in_place("漢字 and 頭髮")
    '汉字 and 头发'
    """
    simplify = find_simplifier()
    found = simplify(text)
    if len(found) == len(text):
        return found
    return "".join(each if len(each := simplify(old)) == 1 else old for old in text)
