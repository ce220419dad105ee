"""The statistics of a score, and its baseline."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from palm_ds.data.stream.task_group_dataset import BuiltExample, BuiltRow, ExampleRef
from palm_ds.data.tasks.example import Example, collate
from palm_ds.data.tasks.masking import unigram_baseline
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.train.evaluate.evaluate import TaskScore, _Sums
from palm_ds.train.recipe.recipe import make_recipe
from palm_ds.train.report.metrics_file import FILE, read_metrics
from palm_ds.train.setup.run_folder import RunSpec
from palm_ds.train.train import train
from tests.helpers.small_tables import TINY, write_tables


def score(accuracy: float, baseline: float, count: int = 100) -> TaskScore:
    return TaskScore(
        count=count,
        loss=1.0,
        accuracy=accuracy,
        baseline_loss=2.0,
        baseline_accuracy=baseline,
    )


def test_standard_errors_above_the_baseline() -> None:
    assert score(0.6, 0.5).standard_error == pytest.approx(math.sqrt(0.24 / 100))
    assert score(0.6, 0.5).standard_errors_above == pytest.approx(0.1 / math.sqrt(0.0024))


@pytest.mark.parametrize(
    ("accuracy", "baseline", "above"), [(0.0, 0.2, -5.0), (1.0, 0.5, 10.0), (1.0, 1.0, 0.0)]
)
def test_an_accuracy_of_0_or_1_does_not_divide_by_zero(accuracy, baseline, above) -> None:
    assert score(accuracy, baseline).standard_errors_above == pytest.approx(above)


def test_the_perplexity_of_a_huge_loss_is_finite() -> None:
    values = vars(score(0.5, 0.5)) | {"loss": 1e6}
    assert math.isfinite(TaskScore(**values).perplexity)


class _Words:
    """A task whose source is the frequencies of tokens."""

    name = "words"

    def loss_weights(self) -> dict[str, float]:
        return {"words": 1.0}

    def baseline_of(self, loss: str, targets: np.ndarray, source: np.ndarray) -> Any:
        return unigram_baseline(targets, source)


def _built(dataset: int, targets: list[int]) -> BuiltExample:
    size = len(targets) + 2
    example = Example(
        input_ids=np.arange(size),
        token_type_ids=np.zeros(size, np.int64),
        source_offsets=np.arange(size),
        annotations={},
        labels={"words": (np.arange(len(targets)) + 1, np.array(targets, np.int64))},
    )
    return BuiltExample(ExampleRef(dataset, 0, np.void(0)), example)


@pytest.mark.parametrize("reverse", [False, True])
def test_the_baseline_of_a_text_is_that_of_its_own_corpus(reverse: bool) -> None:
    """Of a task over several corpora, whatever their order."""
    frequencies = [np.array([0.9, 0.05, 0.05]), np.array([0.1, 0.1, 0.8])]
    texts = [(0, [0, 0, 1]), (1, [2, 2]), (1, []), (0, [0])]
    if reverse:
        frequencies, texts = frequencies[::-1], [(1 - corpus, ids) for corpus, ids in texts]
    task: Any = _Words()
    datasets: list[Any] = [SimpleNamespace(tasks=(task,), source=each) for each in frequencies]
    rows: list[BuiltRow] = [[_built(*each) for each in texts[:2]], [_built(*x) for x in texts[2:]]]
    batch = collate([[(x.example, 0) for x in row] for row in rows], length=16, pad=0)
    output: Any = SimpleNamespace(loss_sum=0.0, correct=0.0, tallies={})
    sums = _Sums({"words": task}, datasets)
    sums.add(rows, batch, {"words": output})
    sums.add([[]], collate([[]], length=16, pad=0), {"words": output})
    expected = -3 * math.log(0.9) - math.log(0.05) - 2 * math.log(0.8)
    assert sums.values["base loss words"] == pytest.approx(expected)
    assert (sums.values["base right words"], sums.values["count words"]) == (5, 6)


def test_rows_that_two_task_groups_read_are_counted_as_often_as_they_are_scored(
    tmp_path: Path,
) -> None:
    write_tables(tmp_path, dev=24)
    tables = {"table": str(tmp_path / "train.tsv"), "validation": str(tmp_path / "dev.tsv")}
    recipe = make_recipe(
        {
            "backbone": TINY,
            "length": 32,
            "batch": "8 examples",
            "sources": {"texts": {**tables, "tokenizer": str(tmp_path / "vocab.txt")}},
            "tasks": {
                "mood": {"kind": "classification", "source": "texts"},
                "mask": {"kind": "masked_words", "source": "texts"},
            },
            "stages": [{"mood": 1, "mood + mask": 1}],
            "export_onnx": [],
        }
    )
    run = RunSpec(recipe=recipe, ds_config=make_ds_config({}), folder=tmp_path / "run")
    assert train(run) == 0
    mood = read_metrics(run.folder / FILE).evaluations[-1]["scores"]["mood"]
    assert mood["count"] == 24
    share = mood["accuracy"]
    assert mood["standard_error"] == pytest.approx(math.sqrt(share * (1 - share) / 24))
