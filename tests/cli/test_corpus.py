"""`palm-ds corpus`: inspect, annotate, export-ernie."""

from __future__ import annotations

from pathlib import Path

import pytest

from palm_ds.cli.main import main
from palm_ds.corpus.store import open_corpus

TEXT = "\n\n".join(f"Document {i} has a sentence. And another one in New York!" for i in range(90))


def test_a_corpus_is_prepared_annotated_shown_and_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, folder, lines = (str(tmp_path / name) for name in ("a.txt", "corpus", "out.gz"))
    Path(text).write_text(TEXT)
    train = ("--train", "wordpiece", "--vocab_size", "100")
    assert main(["prepare", folder, text, *train, "--lower"]) == 0
    assert main(["corpus", "annotate", folder, text, "--annotation", "heading"]) == 0
    assert "heading" in open_corpus(folder).annotations
    capsys.readouterr()
    assert main(["corpus", "inspect", folder, "--documents", "1", "--first", "89"]) == 0
    assert "a.txt@" in capsys.readouterr().out
    assert main(["corpus", "export-ernie", folder, lines, "--length", "64", "--seed", "1"]) == 0
    assert capsys.readouterr().out.endswith("lines\n") and Path(lines).is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("inspect nowhere", "corpus nowhere: no such folder; create it with palm-ds prepare"),
        ("inspect", "the following arguments are required: CORPUS"),
        ("annotate x y", "the following arguments are required: --annotation"),
        ("export-ernie x", "the following arguments are required: FILE.gz"),
        ("export-ernie nowhere x.gz", "corpus nowhere: no such folder"),
    ],
)
def test_mistakes_are_one_line(words: str, message: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["corpus", *words.split()])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1
    assert error.startswith(f"error: {message}")


def test_a_mistyped_corpus_gets_a_guess(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(SystemExit):
        main(["corpus", "inspect", f"{tmp_path}/mien"])
    assert f'; did you mean "{tmp_path}/mine"?\n' in capsys.readouterr().err
