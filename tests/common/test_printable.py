"""Control characters of files are shown, never sent."""

from __future__ import annotations

import json

import pytest

from palm_ds.common.printable import json_line, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ümläut, 中文", "plain, ümläut, 中文"),
        ("w\x1b[2Jx\x07", r"w\x1b[2Jx\x07"),
        ("\x9b2J", r"\x9b2J"),
        ("a\u202eb\u200b", r"a\u202eb\u200b"),
        ("a\nb\tc", r"a\nb\tc"),
        ("\ud800", r"\ud800"),
    ],
)
def test_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown
    line = json_line({"x": text})
    assert line.isprintable() and json.loads(line) == {"x": text}


def test_line_breaks_may_be_kept() -> None:
    assert printable("a\nb\x1b", keep="\n") == "a\nb\\x1b"
