"""Metrics of the user's own get the predictions and the labels of the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from palm_ds.common.errors import UserError
from palm_ds.data.reader import Table
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.task import Task, build
from palm_ds.text.tokenizer import SPECIALS, wordpiece
from palm_ds.train.recipe.custom_metrics import import_metrics, own_scores
from palm_ds.train.recipe.recipe import make_recipe
from tests.helpers.small_tables import TINY

TOKENIZER = wordpiece([*SPECIALS, "a"], lower=True)
SPAN = {"start": 0, "end": 1, "type": "x"}
ROWS: dict[str, tuple[dict[str, Any], list[dict[str, Any]], list[Any]]] = {
    "classification": ({"labels": ["x", "y"]}, [{"label": "x"}, {"label": "y"}], ["x", "y"]),
    "regression": ({}, [{"label": "1.5"}, {"label": 2}], [1.5, 2.0]),
    "multi_label": (
        {"labels": ["x", "y"]},
        [{"label": "x,y"}, {"label": []}],
        [["x", "y"], []],
    ),
    "tagging": ({"labels": ["O"]}, [{"tags": ["O"]}, {"tags": ["O"]}], [["O"], ["O"]]),
    "spans": ({"kind": "tagging"}, [{"spans": [SPAN]}, {"spans": []}], [[SPAN], []]),
}


def source_of(rows: list[dict[str, Any]]) -> TableSource:
    import numpy as np

    table = Table.from_rows([{"text_a": "a", **row} for row in rows])
    return TableSource(table, np.arange(len(table)), TOKENIZER, "rows")


def pair_count(predictions: list[dict[str, Any]], labels: list[Any]) -> int:
    assert len(predictions) == len(labels)
    return len(labels)


def several(predictions: list[dict[str, Any]], labels: list[Any]) -> dict[str, float]:
    return {"half": 0.5, "rows": len(labels)}


def wrong(predictions: list[dict[str, Any]], labels: list[Any]) -> Any:
    return "good"


@pytest.mark.parametrize("kind", ROWS)
def test_labels_are_those_of_the_rows(kind: str) -> None:
    settings, rows, wanted = ROWS[kind]
    task = build(kind, {"source": "s", **settings})
    found: list[Any] = []

    def seen(predictions: list[dict[str, Any]], labels: list[Any]) -> float:
        found.extend(labels)
        return float(len(predictions))

    predictions = {1: {"label": "y"}, 0: {"label": "x"}}
    assert own_scores([seen], task, predictions, source_of(rows), taken=()) == {"seen": 2.0}
    assert found == wanted[::-1]  # in the order of the predictions


def classification() -> Task:
    return build("mood", {"kind": "classification", "source": "s", "labels": ["x", "y"]})


def test_rows_without_label_or_prediction_do_not_count() -> None:
    source = source_of([{"label": "x"}, {"label": "y"}, {"label": "y"}])
    made: dict[int, dict[str, Any]] = {0: {"label": "x"}, 1: {}}
    assert own_scores([pair_count, several], classification(), made, source, taken=()) == {
        "pair_count": 1.0,
        "half": 0.5,
        "rows": 1.0,
    }
    assert own_scores([pair_count], classification(), {}, source, taken=()) == {}
    assert own_scores([pair_count], classification(), made, source_of([{}, {}]), taken=()) == {}


def test_mistakes_are_one_line() -> None:
    others = {"find": "retrieval", "twins": "class_pairs"}
    tasks = {name: build(name, {"kind": kind, "source": "s"}) for name, kind in others.items()}
    tasks["mood"] = classification()
    here = __name__
    for names, message in {
        ("find", f"{here}.several"): "evaluate.metrics: 'find' has no labels, which metrics get",
        ("twins", f"{here}.several"): "evaluate.metrics: 'twins' has no predictions to score",
        ("moood", f"{here}.several"): "evaluate.metrics: no task 'moood'; did you mean",
        ("mood", "nowhere_to.be"): "evaluate.metrics.mood: cannot import 'nowhere_to'",
        ("mood", f"{here}.absent"): r"evaluate.metrics.mood: .* has no 'absent'",
        ("mood", f"{here}.Path"): r"evaluate.metrics.mood: '.*Path' is not a function",
    }.items():
        with pytest.raises(UserError, match=f"^{message}"):
            import_metrics({names[0]: [names[1]]}, tasks)
    with pytest.raises(UserError, match=r"^metrics: wrong: wrong: expected a number, got 'good'$"):
        source = source_of([{"label": "x"}])
        own_scores([wrong], tasks["mood"], {0: {"label": "x"}}, source, taken=())


def test_two_functions_with_one_name_are_refused() -> None:
    def rows(predictions: list[dict[str, Any]], labels: list[Any]) -> float:
        return 0.0

    source = source_of([{"label": "x"}])
    with pytest.raises(
        UserError, match=r"^metrics: rows: another function of this task has 'rows'"
    ):
        own_scores([several, rows], classification(), {0: {"label": "x"}}, source, taken=())
    twice = own_scores([rows, rows], classification(), {0: {"label": "x"}}, source, taken=())
    assert twice == {"rows": 0.0}


@pytest.mark.parametrize("name", ["accuracy", "loss"])
def test_the_name_of_a_metric_of_the_task_is_refused(name: str) -> None:
    """It replaced the task's own in every report, which did not say so."""

    def metric(predictions: list[dict[str, Any]], labels: list[Any]) -> dict[str, float]:
        return {name: 0.0}

    predictions = {0: {"label": "x"}}
    with pytest.raises(
        UserError,
        match=f"^metrics: metric: the task itself has '{name}'; give this one another name$",
    ):
        own_scores(
            [metric],
            classification(),
            predictions,
            source_of([{"label": "x"}]),
            taken=["accuracy", "f1"],
        )


def test_a_recipe_names_them_and_learns_the_same(tmp_path: Path) -> None:
    values = {
        "backbone": TINY,
        "length": 32,
        "batch": "4 examples",
        "sources": {"mood": {"table": "rows.tsv"}},
        "tasks": {"mood": {"kind": "classification", "source": "mood"}},
        "stages": [{"mood": "1 epochs"}],
    }
    plain = make_recipe(values)
    named = make_recipe({**values, "evaluate": {"metrics": {"mood": [f"{__name__}.several"]}}})
    assert named.own_metrics["mood"][0].__name__ == "several"
    assert plain.own_metrics == {} and plain.fingerprint == named.fingerprint
