"""Sweep files: what they search, and one clear line for what is wrong with them."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from palm_ds.common.errors import UserError
from palm_ds.train.sweeps.search_space import Choices, Range, SearchSpace, read_sweep, search_space
from tests.helpers.small_tables import TINY

SPACE = {
    "optimizer.lr": {"low": "1e-5", "high": 1e-3, "log": True},
    "batch": ["4 examples", "8 examples"],
    "backbone.num_layers": {"low": 1, "high": 3},
}
RECIPE = {
    "backbone": TINY,
    "length": 64,
    "batch": "8 examples",
    "sources": {"rows": {"table": "train.tsv", "tokenizer": "vocab.txt"}},
    "tasks": {"topic": {"kind": "classification", "source": "rows"}},
    "stages": [{"topic": 10}],
    "evaluate": {"best": "topic.f1"},
}


def write(folder: Path, **changes: Any) -> Path:
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    values = {"recipe": str(folder / "recipe.yaml"), "space": SPACE, **changes}
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in values.items() if v is not None}))
    return path


def opened(folder: Path, **changes: Any) -> SearchSpace:
    return search_space(read_sweep(write(folder, **changes)), "sweep.yaml")


def test_parameters_and_the_recipe_of_a_trial(tmp_path: Path) -> None:
    space = opened(tmp_path, overrides=["length=32"])
    assert space.parameters == {
        "optimizer.lr": Range(low=1e-5, high=1e-3, log=True),
        "batch": Choices(values=("4 examples", "8 examples")),
        "backbone.num_layers": Range(low=1, high=3, whole=True),
    }
    values = space.recipe_values({"optimizer.lr": 0.5, "batch": "4 examples"})
    assert values == {**RECIPE, "length": 32, "optimizer": {"lr": 0.5}, "batch": "4 examples"}
    assert space.values == {**RECIPE, "length": 32}  # unchanged


@pytest.mark.parametrize(
    ("metric", "direction", "minimizes"),
    (
        (None, None, False),  # evaluate.best: topic.f1
        ("topic.loss", None, True),
        ("topic.zero_one_loss", None, True),
        ("mean", None, False),
        ("topic.loss", "maximize", False),
    ),
)
def test_direction(tmp_path: Path, metric: Any, direction: Any, minimizes: bool) -> None:
    space = opened(tmp_path, metric=metric, direction=direction)
    assert space.sweep.minimizes == minimizes
    assert space.sweep.metric == (metric or "topic.f1")


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"space": {}}, "space: empty; name at least one key of the recipe"),
    ({"trials": 0}, "trials: expected a number above 0, got 0"),
    ({"trails": 3}, 'trails: unknown key; did you mean "trials"?'),
    ({"sampler": "tpa"}, "sampler: "),
    ({"metric": "topik.f1"}, "metric: 'topik.f1': no task 'topik'; did you mean"),
    ({"space": {"optimizer.rl": [1, 2]}}, "optimizer.rl: unknown key"),
    ({"space": {"optimizer.lr": []}}, "space.optimizer.lr: expected different values, got []"),
    ({"space": {"optimizer.lr": [1, 1]}}, "space.optimizer.lr: expected different values"),
    (
        {"space": {"tasks.topic.source": [date(2020, 1, 1), "rows"]}},
        "space.tasks.topic.source: Object of type date is not JSON serializable; write it as text",
    ),
    ({"space": {"optimizer.lr": 3}}, "space.optimizer.lr: expected a list of values, or {low:"),
    ({"space": {"optimizer.lr": {"low": 1}}}, "space.optimizer.lr.high: missing"),
    ({"space": {"optimizer.lr": {"low": "a", "high": 1}}}, "space.optimizer.lr.low: expected a n"),
    ({"space": {"optimizer.lr": {"low": 2, "high": 1}}}, "low 2 is not below high 1"),
    (
        {"space": {"optimizer.lr": {"low": 0, "high": 1, "log": True}}},
        "space.optimizer.lr: log: true needs a low above 0, got 0",
    ),
    (
        {"space": {"optimizer.lr": {"low": 1, "high": 2, "log": True, "step": 1}}},
        "give `log` or `step`, not both",
    ),
    ({"space": {"optimizer.lr": {"low": 1, "high": 2, "step": 3}}}, "step: 3 is not from above 0"),
    ({"space": {"optimizer.lr": {"lo": 1, "high": 2}}}, "space.optimizer.lr.lo: unknown key; did"),
    (
        {"overrides": ["batch=8 examples", "optimizer.lr=1e-3"]},
        "override 'batch=8 examples': `space` has batch; remove one of the two",
    ),
    (
        {"space": {"optimizer": [{"lr": 1e-4}, {"lr": 1e-3}]}, "overrides": ["optimizer.lr=1"]},
        "override 'optimizer.lr=1': `space` has optimizer; remove one of the two",
    ),
    ({"space": {"length": [64, 4]}}, "space.length: 4: length: expected 8 or more, got 4"),
)


@pytest.mark.parametrize(("changes", "error"), WRONG, ids=lambda x: str(x)[:50])
def test_what_is_wrong_is_one_line(tmp_path: Path, changes: dict[str, Any], error: str) -> None:
    with pytest.raises(UserError) as caught:
        opened(tmp_path, **changes)
    assert error in str(caught.value) and "sweep.yaml: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_metric_must_be_given(tmp_path: Path) -> None:
    path = write(tmp_path)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "evaluate": {}}))
    with pytest.raises(UserError, match=r"metric: missing; give `task.metric`, or `evaluate.best`"):
        search_space(read_sweep(path), "sweep.yaml")
