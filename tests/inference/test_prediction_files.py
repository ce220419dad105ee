"""Where predictions may be written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from palm_ds.common.errors import UserError
from palm_ds.inference.prediction_files import check_output, read_predictions


@pytest.mark.parametrize("output", ["file", "file/inside"])
def test_predictions_are_not_written_into_a_file(output: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check_output(tmp_path / "new" / "folder")
    with pytest.raises(UserError, match="file.* is a file; name a folder for the predictions"):
        check_output(tmp_path / output)


@pytest.mark.parametrize("output", [".", "..", "../here"])
def test_the_current_folder_is_not_replaced(output: str, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UserError, match="is or contains the current folder"):
        check_output(Path(output))
    check_output(Path("../other"))


@pytest.mark.parametrize("sign", ["\u2028", "\u2029", "\x85", "\x0b", "\x1c"])
def test_a_prediction_may_have_any_line_break(sign: str, tmp_path: Path) -> None:
    """JSON leaves those other than a line feed and a carriage return as they are."""
    texts = [f"one{sign}two", "three"]
    lines = [json.dumps({"index": n, "text": x}, ensure_ascii=False) for n, x in enumerate(texts)]
    file = tmp_path / "answer.predictions.json"
    file.write_text("".join(line + "\n" for line in lines), "utf-8")
    assert [each.values["text"] for each in read_predictions(file)] == texts


def test_the_only_prediction_may_have_an_id(tmp_path: Path) -> None:
    """It is no object of answers by id, as SQuAD's are."""
    file = tmp_path / "answer.jsonl"
    file.write_text('{"id": "7", "text": "x"}\n')
    (found,) = read_predictions(file)
    assert (found.key, found.value("text")) == ("7", "x")


def test_the_only_prediction_may_be_one_text(tmp_path: Path) -> None:
    """It is no object of answers either."""
    file = tmp_path / "answer.jsonl"
    file.write_text('{"label": "x"}\n')
    (found,) = read_predictions(file, "label")
    assert (found.key, found.value("label")) == (None, "x")
    (found,) = read_predictions(file, "text")  # an answer to the question of this id
    assert (found.key, found.value("text")) == ("label", "x")


@pytest.mark.parametrize("first", ["id", "index"])
def test_a_first_prediction_may_look_like_a_title(first: str, tmp_path: Path) -> None:
    """Such as `id`, the language."""
    file = tmp_path / "language.txt"
    file.write_text(f"{first}\nen\n")
    assert [each.value("label") for each in read_predictions(file)] == [first, "en"]
