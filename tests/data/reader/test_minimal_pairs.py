"""Files of minimal pairs: which sentence is good, and errors that name the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from palm_ds.common.errors import UserError
from palm_ds.data.reader.minimal_pairs import read_paradigms


def test_both_forms(tmp_path: Path) -> None:
    text = tmp_path / "subject.verb.txt"
    text.write_text("she run .\nshe runs .\nhe run .\nhe runs .\n\n")
    rows = tmp_path / "npi.jsonl"
    rows.write_text('{"sentence_good": "a", "sentence_bad": "b", "UID": "npi"}\n\n')
    first, second = read_paradigms([str(text), str(rows)])
    assert (first.name, second.name) == ("subject.verb", "npi")
    assert first.pairs == [
        ("she runs .", "she run .", f"{text}:1"),
        ("he runs .", "he run .", f"{text}:3"),
    ]
    assert second.pairs == [("a", "b", f"{rows}:1")]


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text("bad\ngood")
    (tmp_path / "y.txt").write_text("bad\ngood")
    names = [each.name for each in read_paradigms([f"{tmp_path}/*/x.txt", f"{tmp_path}/y.txt"])]
    assert names == [f"{tmp_path}/a/x.txt", f"{tmp_path}/b/x.txt", "y"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", "a\nb\nc\n", "x.txt: 3 lines; a pair is two lines, the bad sentence first"),
        ("x.txt", "a\n\nb\nc\n", "x.txt:2: line: expected a sentence, got ''"),
        ("x.txt", "\n", "x.txt: has no minimal pairs"),
        ("x.txt", b"a\n\xff\n", "x.txt:2: invalid UTF-8 at byte 1"),
        ("x.jsonl", '{"sentence_good": "a"}\n', "x.jsonl:1: no 'sentence_bad'; expected"),
        (
            "x.jsonl",
            '{"sentence_good": "a", "sentence_bad": 3}\n',
            "x.jsonl:1: sentence_bad: expected a sentence, got 3",
        ),
        (
            "x.jsonl",
            '{"sentence_good": "a", "sentence_bad": "\\ud800"}\n',
            "x.jsonl:1: sentence_bad: not Unicode",
        ),
        ("x.jsonl", "\n{\n", "x.jsonl:2: not JSON"),
        ("x.tsv", "a\tb\n", "x.tsv: minimal pairs are JSON lines with sentence_good"),
        ("x.pairs", "a\nb\n", "x.pairs: its suffix is none of"),
    ],
)
def test_errors(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as error:
        read_paradigms(str(tmp_path / name))
    assert message in str(error.value)
