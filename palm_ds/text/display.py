"""Tokens as people read them, whatever kind of vocabulary they come from.

wordpiece       "paris"   "##ened"   "[MASK]"
sentencepiece   "▁paris"  "ened"     "<mask>"
byte-level BPE  "Ġparis"  "ened"     "<mask>"
readable         paris    ##ened     as it is
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from palm_ds.text.tokenizer import CHINESE, Tokenizer

LETTER = re.compile(rf"[^\W_{CHINESE}]")
"""A character that words of several are made of."""


def surface(tokenizer: Tokenizer, ids: Sequence[int] | np.ndarray) -> list[tuple[str, bool]]:
    """For each id its text, and whether it goes on with the word before."""
    specials = set(tokenizer.roles.values())
    return [
        (token, False) if token in specials else _surface(tokenizer, token)
        for token in tokenizer.tokens(ids)
    ]


def readable(tokenizer: Tokenizer, ids: Sequence[int] | np.ndarray) -> list[str]:
    """For each id its text, with ## before it where it goes on with a word."""
    return ["##" * goes_on + text for text, goes_on in surface(tokenizer, ids)]


def _surface(tokenizer: Tokenizer, token: str) -> tuple[str, bool]:
    if tokenizer.kind == "wordpiece":
        goes_on = token.startswith("##") and len(token) > 2
        return (token[2:] if goes_on else token), goes_on
    decoder = tokenizer.backend.decoder
    if "▁" not in token and decoder is not None:
        token = decoder.decode([token]).replace(" ", "▁")  # letters of bytes to those of text
    if token.startswith("▁"):
        return token[1:] or "▁", False
    # What carries no sign of a word's beginning may still be one: punctuation, a character.
    return token, bool(LETTER.match(token))
