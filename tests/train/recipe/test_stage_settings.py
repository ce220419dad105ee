"""Stages with settings of their own, step by step, and mistakes in them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.data.stream.stages import STAGE_SETTINGS, tasks_of
from palm_ds.train.recipe.recipe import Recipe, make_recipe
from palm_ds.train.recipe.stage_settings import StageSettings
from palm_ds.train.setup.build import build_stream
from palm_ds.train.setup.resolve import resolve
from palm_ds.train.setup.sources import open_data
from tests.helpers.small_corpus import write_small_corpus

MASKS, APART = "knowledge_masking", "sentence_distance"
PHASES = [
    {MASKS: 10, "rate": 0.3},
    {
        f"{APART} + {MASKS}": 10,
        "lr": 5e-4,
        "rate": [0.3, 0.1],
        "weight_decay": 0.05,
        "schedule": {"kind": "wsd", "warmup": 2, "decay": 0.5, "shape": "1-sqrt", "end": 0.1},
    },
    {MASKS: 10, "freeze": ["backbone.word.*"], "schedule": {"kind": "cosine", "end": 0.2}},
]


def recipe(corpus: Path | str = "corpus", **values: Any) -> Recipe:
    return make_recipe(
        {
            "backbone": {"preset": "tiny", "max_positions": 64},
            "length": 64,
            "batch": "8 rows",
            "optimizer": {"lr": 1e-3, "weight_decay": 0.1},
            "schedule": {"kind": "constant", "warmup": "2048 tokens"},
            "sources": {"text": {"corpus": str(corpus)}},
            "tasks": {MASKS: {"source": "text"}, APART: {"source": "text"}},
            "stages": PHASES,
            **values,
        }
    )


def test_every_step_has_the_rates_of_its_stage() -> None:
    """Restated by hand."""
    made = recipe()
    for step in range(30):
        at = made.curriculum.at(step, made.seed)
        lr, decay = made.optimizer.lr * made.lr_scale(at), 0.1 * made.decay_scale(at)
        k = step % 10
        if step < 10:
            wanted = 1e-3 * min((step + 1) / 4, 1), 0.1, 0.3  # 2,048 tokens are 4 steps
        elif step < 20:
            factor = [0.5, 1, 1, 1, 1, 1][k] if k < 5 else 0.1 + 0.9 * (1 - math.sqrt((k - 5) / 5))
            wanted = 5e-4 * factor, 0.05, 0.3 - 0.2 * k / 9
        else:
            wanted = 1e-3 * (0.2 + 0.8 * (1 + math.cos(math.pi * k / 10)) / 2), 0.1, None
        rate = made.mask_rates.at(step)
        assert (lr, decay, rate) == pytest.approx(wanted, abs=1e-12), step
        assert made.frozen_in(at) == (("backbone.word.*",) if step >= 20 else ())
    assert made.freezable == ["backbone.word.*"]


def test_the_masks_follow_the_rate(tmp_path: Path) -> None:
    write_small_corpus(tmp_path / "corpus")
    made = recipe(tmp_path / "corpus")
    data = open_data(made)
    stream = build_stream(made, data)
    shares = []
    for step in range(30):
        (batch,) = stream.batches(step, 0, 1, 8)
        words = int((batch.sequence_ids >= 0).sum()) - 2 * int(batch.sequence_ids.max(1)[0].sum())
        shares.append(batch.count(MASKS) / words)
        same = stream.batches(step, 1, 2, 4)[0]
        np.testing.assert_array_equal(batch.input_ids[4:], same.input_ids)
    assert np.mean(shares[:10]) > 0.2 and shares[10] > 0.2 > shares[19]
    assert np.mean(shares[20:]) < np.mean(shares[:10]) * 0.7
    plain = build_stream(recipe(tmp_path / "corpus", stages=[{MASKS: 10}]), data)
    rows = [[(ref.dataset, ref.number) for ref in row] for row in stream.step_rows(3)]
    assert rows == [[(ref.dataset, ref.number) for ref in row] for row in plain.step_rows(3)]


def test_a_resolved_recipe_keeps_them(tmp_path: Path) -> None:
    write_small_corpus(tmp_path / "corpus")
    values = [{**PHASES[0], MASKS: "1 epochs"}, *PHASES[1:]]
    made = resolve(recipe(tmp_path / "corpus", stages=values))
    again = make_recipe({k: v for k, v in made.resolved().items() if v is not None})
    assert again.stages == made.stages and again.fingerprint == made.fingerprint
    for mine, its in zip(made.stage_settings, recipe().stage_settings, strict=True):
        assert mine == its
    table = made.plan_table()
    assert "rate" in table and "0.3 to 0.1" in table and "backbone.word.*" in table


def test_the_stages_of_a_shape_have_a_list_of_settings() -> None:
    shape = {"continual": [MASKS, APART], "steps": 30, "settings": [{"rate": 0.3}, {"lr": 1e-4}]}
    made = recipe(stages=shape)
    assert [own.rates for own in made.stage_settings] == [(0.3,), ()]
    assert made.stage_settings[1].lr == 1e-4
    assert {tasks_of(group) for group in made.curriculum.task_groups} == {(MASKS,), (APART,)}


def test_the_keys_are_those_of_the_dataclass() -> None:
    assert set(StageSettings.__dataclass_fields__) == set(STAGE_SETTINGS)


def phase(**values: Any) -> list[dict[str, Any]]:
    return [{MASKS: 10}, {MASKS: 10, **values}]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stages": phase(lr=0)}, r"stages.1: lr: must be above 0, got 0"),
        ({"stages": phase(lr="fast")}, r"stages.1: lr"),
        ({"stages": phase(rate=1.5)}, r"stages.1: rate: expected a share between 0 and 1"),
        ({"stages": phase(rate=[0.1, 0.2, 0.3])}, r"or \[from, to\], got \[0.1, 0.2, 0.3\]"),
        ({"stages": phase(weight_decay=-1)}, r"stages.1: weight_decay: must not be negative"),
        ({"stages": phase(schedule={"kind": "sine"})}, r"stages.1: schedule.kind"),
        (
            {"stages": phase(schedule={"warmup": 2, "restart": "stage"})},
            r"stages.1: schedule.restart: a stage's own schedule always does",
        ),
        (
            {"stages": [{APART: 10, "rate": 0.3}]},
            r"stages.0.rate: no task of this stage masks tokens at a rate",
        ),
        (
            {"stages": phase(weight_decay=0.1), "optimizer": {"weight_decay": 0.0}},
            r"stages.1.weight_decay: optimizer.weight_decay is 0; give it a value",
        ),
        ({"stages": phase(rat=0.3)}, r"stages: no task 'rat' in `tasks`"),
        (
            {"stages": {"joint": [MASKS], "steps": 9, "settings": []}},
            r"stages.settings: expected a list with a mapping for each stage, got 0 for 1",
        ),
        (
            {"stages": {"joint": [MASKS], "steps": 9, "settings": [{"rat": 0.3}]}},
            r"stages.settings.0: no setting 'rat' of a stage; did you mean \"rate\"",
        ),
        (
            {"stages": {"explicit": phase(), "settings": [{}, {}]}},
            r"stages.settings: explicit stages have them beside their task groups",
        ),
        ({"schedule": {"warmup": "many tokens"}}, r"schedule.warmup: 'many tokens' is neither"),
        (
            {"schedule": {"kind": "linear", "shape": "cosine"}},
            r"schedule.shape: linear has its own",
        ),
        (
            {"schedule": {"warmup": "9 tokens"}, "batch": "8 examples", "stages": [{MASKS: 9}]},
            r"schedule.warmup: 9 tokens, but `batch` is in examples; give a number of steps",
        ),
    ],
)
def test_mistakes_name_the_stage_and_the_key(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        recipe(**values)
