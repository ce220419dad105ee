"""What `palm-ds fill-mask` reads when no text is given; the rest is in tests/launch."""

from __future__ import annotations

import io
import sys

import pytest

from palm_ds.cli.fill_mask import _lines
from palm_ds.common.errors import UserError


def lines_of(text: bytes, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    return list(_lines())


def test_lines_of_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = lines_of(b"one [MASK]\n\n two\n", monkeypatch)
    assert lines == [("<stdin>:1: ", "one [MASK]"), ("<stdin>:3: ", "two")]


@pytest.mark.parametrize("text", [b"", b"\n \n"])
def test_no_text_is_an_error(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no text: give one, or lines on standard input"):
        lines_of(text, monkeypatch)


def test_a_closed_input_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match="no text: give one, as standard input is closed"):
        list(_lines())
