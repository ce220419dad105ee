"""Lines of a pipe are answered as the rows of a file are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palm_ds.cli.embed import COMMAND as EMBED
from palm_ds.cli.predict import COMMAND as PREDICT
from palm_ds.common.errors import UserError
from palm_ds.inference.predict_files import PredictionJob, predict_files
from palm_ds.inference.trained_model import TrainedModel
from tests.helpers.saved_model import save_model, texts, write_rows


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("run"), stages=("mood", "size"))


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The lines that a command prints for its standard input, and its error."""

    def lines(command: Any, text: str, *words: str) -> tuple[list[dict[str, Any]], str]:
        (tmp_path / "in").write_text(text)
        error = ""
        with (tmp_path / "in").open() as handle:
            monkeypatch.setattr("sys.stdin", handle)
            try:
                assert command.call([*words, "--input", "-"]) == 0
            except UserError as raised:
                error = str(raised)
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()], error

    return lines


@pytest.mark.parametrize("tasks", [("mood",), ("mood", "size")])
def test_predictions_are_those_of_files(run: Path, tasks, typed, tmp_path: Path) -> None:
    rows = [row | {"id": f"t{n}"} for n, row in enumerate(texts(9))]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    job = PredictionJob(inputs=[str(file)], output=tmp_path / "out")
    predict_files(TrainedModel.open(run).predictor(tasks), job)
    made, error = typed(PREDICT, file.read_text(), str(run), "--tasks", ",".join(tasks))
    assert not error and len(made) == 9
    for task in tasks:
        written = (tmp_path / "out" / f"{task}.predictions.json").read_text().splitlines()
        for line, record in zip(written, made, strict=True):
            known = {key: record[key] for key in ("index", "id")}
            own = record if len(tasks) == 1 else known | record[task]
            assert _close(own, json.loads(line))


def _close(one: Any, other: Any) -> bool:
    """Whether values are equal but for rounding."""
    if isinstance(one, dict):
        return list(one) == list(other) and all(_close(one[key], other[key]) for key in one)
    return one == other if isinstance(one, str) else bool(np.allclose(one, other, atol=2e-6))


def test_vectors_are_those_of_the_embedder(run: Path, typed) -> None:
    words = [str(run), "--layers=1", "--normalize"]
    made, _ = typed(EMBED, "so good\nfair w1 w2\n", *words)
    embedder = TrainedModel.open(run).embedder()
    settings = type(embedder.settings)(layers=(1,), normalize=True)
    expected = embedder.with_settings(settings).embed(["so good", "fair w1 w2"])
    np.testing.assert_allclose([each["embedding"] for each in made], expected, atol=1e-6)
    (of_tokens,), _ = typed(EMBED, '{"text": "so good"}', str(run), "--tokens")
    assert len(of_tokens["embeddings"]) == 4


@pytest.mark.parametrize(
    ("row", "message"),
    [('{"text_a": ["so"]}', "text_a"), ('{"txt": "so"}', "no known column among `txt`")],
)
def test_a_row_that_cannot_be_read_is_named_after_the_others_are_answered(
    run, typed, row: str, message: str
) -> None:
    text = f'{{"text_a": "so"}}\n{{"text_a": "good"}}\n{row}\n{{"text_a": "good"}}\n'
    made, error = typed(PREDICT, text, str(run), "--tasks", "mood")
    assert len(made) == 2 and error.startswith(f"<stdin>:3: {message}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--output", "out"), "remove --output out"),
        (("--input", "-", "more.tsv"), "remove more.tsv"),
        (("--tsv",), "--tsv: predictions of a pipe are lines of JSON"),
        (("--report",), "--report and --html: predictions of a pipe are not scored"),
        (("--html", "scores.html"), "--report and --html: predictions of a pipe are not scored"),
    ],
)
def test_what_a_pipe_cannot_have(words, message: str) -> None:
    with pytest.raises(UserError, match=message):
        PREDICT.call(["nowhere", "--input", "-", *words])


def test_files_need_a_place_for_their_output() -> None:
    with pytest.raises(UserError, match="--output: missing"):
        PREDICT.call(["nowhere", "--input", "a.tsv"])
