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
        rate = made.stage_plan.mask_rates.at(step)
        assert (lr, decay, rate) == pytest.approx(wanted, abs=1e-12), step
        assert made.step_settings.frozen(at) == (("backbone.word.*",) if step >= 20 else ())
    assert made.step_settings.freezable == ["backbone.word.*"]


def rows_of(table: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in table.splitlines()}


def test_the_plan_has_the_warm_ups_of_stages_with_schedules_of_their_own() -> None:
    """It had the recipe's for all of them."""
    wsd = {"kind": "wsd", "warmup": 6, "decay": 2}
    restarted: dict[str, Any] = {"kind": "linear", "warmup": 4, "restart": "stage"}
    made = recipe(stages=[{MASKS: 10}, {MASKS: 10, "schedule": wsd}], schedule=restarted)
    assert rows_of(made.plan_table())["warm-up"] == ["4", "6"]
    factors = [made.lr_scale(made.curriculum.at(step, made.seed)) for step in range(20)]
    assert [factors.index(1.0), 10 + factors[10:].index(1.0)] == [4 - 1, 10 + 6 - 1]
    made = recipe(stages=[{MASKS: 10, "schedule": wsd}, {MASKS: 10}], schedule={"kind": "constant"})
    assert rows_of(made.plan_table())["warm-up"] == ["6", "-"]


def test_a_stage_that_is_too_short_for_its_own_schedule_is_named() -> None:
    stages = [{MASKS: 10, "schedule": {"warmup": 50}}, {MASKS: 5, "schedule": {"warmup": 0.2}}]

    def lines(schedule: dict[str, Any]) -> list[str]:
        made = recipe(stages=stages, schedule=schedule)
        return made.schedule_in_steps.warnings(made.curriculum, made.stage_plan.schedules)

    short = "note: schedule: stage 1 ends after 10 of 50 warm-up steps, at 20 % of `lr`"
    for schedule in ({"kind": "constant"}, {"warmup": 30}, {"warmup": 30, "restart": "stage"}):
        assert lines(schedule) == [short], schedule  # no stage has the recipe's


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


SIZES = [
    {MASKS: 10, "length": 16, "batch": "512 tokens"},
    {
        f"{APART} + {MASKS}": "20_480 tokens",
        "length": 32,
        "batch": {"start": "8 rows", "end": "32 rows", "over": "8_000 tokens"},
        "schedule": {"kind": "wsd", "warmup": "1_000 tokens", "decay": "4_096 tokens"},
    },
    {MASKS: "5_120 tokens"},
]


def test_steps_have_the_size_of_their_stage(tmp_path: Path) -> None:
    """Restated by hand: 8, 16 and 24 rows of 32 for 5 steps each, since 8,000 tokens are 5.2 times
    those of 8, 16 and 24 rows; 7,680 tokens, and 13 steps for the rest of 20,480."""
    write_small_corpus(tmp_path / "corpus")
    made = recipe(tmp_path / "corpus", stages=SIZES, schedule={"kind": "constant"})
    assert [stage.steps for stage in made.curriculum.stages] == [10, 15 + 13, 10]
    wanted = [(32, 16)] * 10
    wanted += [(rows, 32) for rows in (8, 16, 24) for _ in range(5)] + [(32, 32)] * 13
    wanted += [(8, 64)] * 10
    stream = build_stream(made, open_data(made))
    seen: set[tuple[str, int]] = set()
    for step, (rows, length) in enumerate(wanted):
        (batch,) = stream.batches(step, 0, 1, rows)
        assert batch.input_ids.shape == (rows, length), step
        halves = [stream.batches(step, rank, 2, 4) for rank in (0, 1)]
        ids = np.concatenate([each.input_ids for half in halves for each in half])
        np.testing.assert_array_equal(batch.input_ids, ids)
        for ref in (ref for row in stream.step_rows(step) for ref in row):
            dataset = stream.datasets[ref.dataset]
            assert dataset.max_length == length and (dataset.name, ref.number) not in seen
            seen.add((dataset.name, ref.number))
        resumed = build_stream(made, open_data(made))
        resumed.load_state_dict(stream.state_dict(step))
        np.testing.assert_array_equal(
            resumed.batches(step, 0, 1, rows)[0].input_ids, batch.input_ids
        )
    factors = [made.lr_scale(made.curriculum.at(step, 1)) for step in range(10, 38)]
    assert factors[:5] == [1 / 4, 2 / 4, 3 / 4, 1, 1]  # 3 x 256 tokens and one step more
    assert factors[-5:] == pytest.approx([1, 1, 3 / 4, 2 / 4, 1 / 4])
    table = made.plan_table()
    assert "25,600" not in table and f"{10 * 512 + 4608 + 16 * 1024 + 10 * 512:,}" in table


def test_the_largest_step_is_planned_without_packing_what_comes_before(tmp_path: Path) -> None:
    write_small_corpus(tmp_path / "corpus")
    made = recipe(tmp_path / "corpus", stages=SIZES, schedule={"kind": "constant"})
    stream = build_stream(made, open_data(made))
    (batch,), rows = stream.largest_step()
    assert (batch.input_ids.shape, rows) == ((8, 64), 8) and not stream._stages
    alone = recipe(tmp_path / "corpus", stages=SIZES[2:], schedule={"kind": "constant"})
    (first,) = build_stream(alone, open_data(alone)).batches(0, 0, 1, 8)
    np.testing.assert_array_equal(batch.position_ids, first.position_ids)


def test_a_stage_mixes_corpora_by_weights_of_its_own(tmp_path: Path) -> None:
    for name in "ab":
        write_small_corpus(tmp_path / name)
    a, b = (str(tmp_path / name) for name in "ab")
    stages = [
        {MASKS: 40},
        {MASKS: 40, "mixture": {"text": {a: 1, b: 4}}},
        {MASKS: 10, "mixture": {"text": {b: 1}}},
    ]
    made = recipe(sources={"text": {"mix": {a: 1, b: 1}}}, stages=stages)
    stream = build_stream(made, open_data(made))
    shares = []
    for stage in made.curriculum.stages:
        tokens = {0: 0, 1: 0}
        for step in range(stage.first, stage.first + stage.steps):
            for ref in (ref for row in stream.step_rows(step) for ref in row):
                tokens[ref.dataset] += ref.length
        shares.append(tokens[0] / sum(tokens.values()))
    assert shares == pytest.approx([0.5, 0.2, 0], abs=0.03)


@pytest.mark.parametrize("amount", ["2 epochs", "600 sequences"])
@pytest.mark.parametrize("task", [MASKS, APART])
def test_epochs_and_sequences_are_those_of_a_stages_own_rows(
    task: str, amount: str, tmp_path: Path
) -> None:
    write_small_corpus(tmp_path / "corpus")
    stages = [{MASKS: 1, APART: 0}, {task: amount, MASKS if task == APART else APART: 0}]
    stages[1] |= {"length": 24, "batch": "4 rows"}
    written = recipe(tmp_path / "corpus", stages=stages, schedule={"kind": "constant"})
    data = open_data(written)
    stream = build_stream(resolve(written, data), data)
    (dataset,) = (each for each in stream.datasets if each.name == f"{task} in rows of 24")
    wanted = 2 * dataset.num_items if "epochs" in amount else 600
    assert stream.consumed()[dataset.name] == pytest.approx(wanted, rel=0.05)


def test_an_epoch_of_a_stage_is_of_the_corpora_that_it_reads(tmp_path: Path) -> None:
    for name in "ab":
        write_small_corpus(tmp_path / name, documents=60)
    a, b = (str(tmp_path / name) for name in "ab")
    stages = [{MASKS: "1 epochs", "mixture": {"text": {b: 1}}}]
    written = recipe(sources={"text": {"mix": {a: 1, b: 1}}}, stages=stages)
    data = open_data(written)
    stream = build_stream(resolve(written, data), data)
    items = stream.datasets[1].num_items
    assert [*stream.consumed().values()] == [0, pytest.approx(items, rel=0.1)]


def test_corpora_are_weighed_by_their_size(tmp_path: Path) -> None:
    """As XLM's formula: p ** alpha, normalized, over the shares of tokens (Conneau and Lample 2019,
    3.1), whose weights a stage may have of its own."""
    tokens = {
        str(tmp_path / name): write_small_corpus(tmp_path / name, documents=n).manifest.tokens
        for name, n in (("a", 10), ("b", 40), ("c", 25))
    }
    a, b, c = tokens

    def shares(alpha: float, weights: dict[str, float]) -> Any:
        p = np.array([tokens[name] for name in weights]) / sum(tokens.values())
        scaled = p**alpha * np.array([*weights.values()])
        return pytest.approx(dict(zip(weights, scaled / scaled.sum(), strict=True)), rel=1e-5)

    stages = [
        {MASKS: 4},
        {MASKS: 4, "sampling_exponent": 0.3},
        {MASKS: 4, "mixture": {"text": {b: 2, c: 1}}},
        {MASKS: 4, "mixture": {"text": {a: 1, b: 1}}, "sampling_exponent": 0},
    ]
    equal = {a: 1.0, b: 1.0, c: 1.0}
    source = {"mix": equal, "sampling_exponent": 0.7}
    written = recipe(sources={"text": source}, stages=stages)
    data = open_data(written)
    made = resolve(written, data)
    assert made.sources["text"].mix == shares(0.7, equal)
    assert {name: weight for name, _, weight in data.train["text"]} == made.sources["text"].mix
    own = [settings.mixture for settings in made.stage_plan.settings]
    assert own[0] is None and own[1] == {"text": shares(0.3, equal)}
    assert own[2] == {"text": shares(0.7, {b: 2, c: 1})} and own[3] == {"text": {a: 1, b: 1}}
    assert all(each.sampling_exponent is None for each in made.stage_plan.settings)
    assert resolve(made) is made  # nothing is left to weigh
    streams = [build_stream(each, data) for each in (made, resolve(written))]
    assert streams[0].mixtures == streams[1].mixtures


def test_sequences_of_a_stage_are_counted_with_its_own_sampling_exponent(tmp_path: Path) -> None:
    """They had the mean length of texts that are sampled by the recipe's weights."""
    folders = [str(tmp_path / name) for name in "ab"]
    for folder, documents in zip(folders, (6, 40), strict=True):
        write_small_corpus(Path(folder), documents=documents, seed=documents)
    sources = {"text": {"mix": dict.fromkeys(folders, 1.0)}}
    budget = {MASKS: "40_000 sequences"}
    written = recipe(sources=sources, stages=[budget, {**budget, "sampling_exponent": 3}])
    data = open_data(written)
    made = resolve(written, data)
    mixture = made.stage_plan.settings[1].mixture
    alike = recipe(sources=sources, stages=[budget, {**budget, "mixture": mixture}])
    steps, wanted = (
        [stage.steps for stage in each.curriculum.stages] for each in (made, resolve(alike, data))
    )
    assert steps == wanted and steps[0] != steps[1]


def test_a_stage_is_evaluated_as_often_as_it_says() -> None:
    stages = [{MASKS: 10}, {MASKS: 7, "evaluate_every": 2}, {MASKS: 6, "evaluate_every": 0}]
    plan = recipe(stages=stages).stage_plan
    assert [n for n in range(1, 24) if plan.evaluates_after(n, 4)] == [4, 8, 10, 12, 14, 16, 17, 23]
    assert [n for n in range(1, 24) if plan.evaluates_after(n, 0)] == [10, 12, 14, 16, 17, 23]


def test_a_resolved_recipe_keeps_them(tmp_path: Path) -> None:
    write_small_corpus(tmp_path / "corpus")
    values = [{**PHASES[0], MASKS: "1 epochs"}, *PHASES[1:]]
    made = resolve(recipe(tmp_path / "corpus", stages=values))
    again = make_recipe({k: v for k, v in made.resolved().items() if v is not None})
    assert again.stages == made.stages and again.fingerprint == made.fingerprint
    for mine, its in zip(made.stage_plan.settings, recipe().stage_plan.settings, strict=True):
        assert mine == its
    table = made.plan_table()
    assert "rate" in table and "0.3 to 0.1" in table and "backbone.word.*" in table


def test_the_stages_of_a_shape_have_a_list_of_settings() -> None:
    shape = {"continual": [MASKS, APART], "steps": 30, "settings": [{"rate": 0.3}, {"lr": 1e-4}]}
    made = recipe(stages=shape)
    assert [own.rates for own in made.stage_plan.settings] == [(0.3,), ()]
    assert made.stage_plan.settings[1].lr == 1e-4
    assert {tasks_of(group) for group in made.curriculum.task_groups} == {(MASKS,), (APART,)}


def test_a_group_without_steps_has_its_place_in_the_list_of_settings() -> None:
    """There was a traceback, or the settings were those of other stages."""
    steps = {MASKS: 0, APART: 30}
    shape = {"steps": steps, "settings": [{"rate": 0.3}, {"lr": 1e-4}]}
    for kind in ("sequential", "continual"):
        made = recipe(stages={kind: [*steps], **shape})
        assert [(x.steps, dict(x.settings)) for x in made.curriculum.stages] == [(30, {"lr": 1e-4})]
    with pytest.raises(UserError, match="expected a list of 2 mappings, one for each stage, got 1"):
        recipe(stages={"sequential": [*steps], **shape, "settings": [{"lr": 1e-4}]})


def test_a_task_may_be_called_like_a_setting() -> None:
    tasks = {"length": {"kind": MASKS, "source": "text"}, MASKS: {"source": "text"}}
    made = recipe(tasks=tasks, stages=[{"length": 10, "rate": 0.3}])
    assert made.curriculum.task_groups == ("length",) and made.curriculum.steps == 10
    assert made.stage_plan.settings[0].length is None and made.stage_plan.settings[0].rates == (
        0.3,
    )


def test_the_keys_are_those_of_the_dataclass() -> None:
    assert set(StageSettings.__dataclass_fields__) == set(STAGE_SETTINGS)


def phase(**values: Any) -> list[dict[str, Any]]:
    return [{MASKS: 10}, {MASKS: 10, **values}]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stages": phase(lr=0)}, r"stages.1: lr: expected a number above 0, got 0"),
        ({"stages": phase(lr="fast")}, r"stages.1: lr"),
        ({"stages": phase(rate=1.5)}, r"stages.1: rate: expected a share between 0 and 1"),
        ({"stages": phase(rate=[0.1, 0.2, 0.3])}, r"or \[from, to\], got \[0.1, 0.2, 0.3\]"),
        ({"stages": phase(weight_decay=-1)}, r"stages.1: weight_decay: expected 0 or more, got -1"),
        ({"stages": phase(schedule={"kind": "sine"})}, r"stages.1: schedule.kind"),
        (
            {"stages": phase(schedule={"warmup": 2, "restart": "stage"})},
            r"stages.1: schedule.restart: a stage's own schedule starts with it",
        ),
        (
            {"stages": [{APART: 10, "rate": 0.3}]},
            r"stages.0.rate: no task of this stage masks tokens at a rate",
        ),
        (
            {"stages": phase(weight_decay=0.1), "optimizer": {"weight_decay": 0.0}},
            r"stages.1.weight_decay: optimizer.weight_decay is 0; give it a value",
        ),
        ({"stages": phase(length=4)}, r"stages.1: length: expected 8 or more, got 4"),
        ({"stages": phase(length=128)}, r"length: rows of 128 tokens, but backbone.max_positions"),
        ({"stages": phase(batch="100 tokens")}, r"stages.1: batch: 100 tokens is not a multiple"),
        ({"stages": phase(batch="8 examples")}, r"stages.1: batch: '8 examples': a stage's own"),
        (
            {"stages": phase(batch={"start": "3 rows", "end": "8 rows", "over": "99 tokens"})},
            r"stages.1: batch.end: expected a larger multiple of `start`, 3 rows, got 8 rows",
        ),
        (
            {"stages": phase(batch={"start": "4 rows", "end": "4 rows", "over": "99 tokens"})},
            r"stages.1: batch.end: expected a larger multiple of `start`, 4 rows, got 4 rows",
        ),
        (
            {"stages": phase(batch={"start": "4 rows", "end": "8 rows", "over": "99 steps"})},
            r"stages.1: batch.over: expected tokens, such as `1_000_000 tokens`, got '99 steps'",
        ),
        ({"stages": phase(batch={"start": "4 rows"})}, r"stages.1: batch"),
        ({"stages": phase(length=32)}, r"schedule: in tokens, but a stage has a length or batch"),
        (
            {"stages": phase(length=32), "batch": "8 examples", "schedule": {}},
            r"stages.1: length: needs the recipe's `batch` in rows or tokens",
        ),
        (
            {
                "sources": {"text": {"mix": {"here": 1, "there": 1}}},
                "stages": phase(mixture={"text": {"here": 1}}),
                "batch": "8 examples",
                "schedule": {},
            },
            r"stages.1: mixture: needs the recipe's `batch` in rows or tokens",
        ),
        (
            {"stages": [{MASKS: 4, APART: "900 tokens", "length": 32}], "schedule": {}},
            r"stages.0: has a batch of its own, so all its amounts must be in steps, or none",
        ),
        (
            {"stages": [{MASKS: "9000 tokens", APART: "30 tokens", "length": 32}], "schedule": {}},
            r"stages.0: sentence_distance: 30 tokens are less than one of its steps, 256 tokens",
        ),
        ({"stages": phase(mixture={"txt": {}})}, r"stages.1.mixture: no 'txt' in `sources`"),
        ({"stages": phase(mixture={"text": {"a": 1}})}, r"sources.text is not a `mix` of corpora"),
        (
            {
                "sources": {"text": {"mix": {"here": 1, "there": 1}}},
                "stages": phase(mixture={"text": {"here": 1, "their": 1}}),
            },
            r"stages.1.mixture.text: no corpus 'their'; did you mean \"there\"",
        ),
        (
            {
                "stages": phase(evaluate_every=4),
                "save": {"best": 2, "every": 6},
                "evaluate": {"every": 3},
            },
            r"save.best: .* save.every is 6 and stages.1.evaluate_every 4; make the first a mult",
        ),
        (
            {"stages": phase(sampling_exponent=0.7)},
            r"stages.1.sampling_exponent: no task of this stage reads a `mix`",
        ),
        (
            {"sources": {"text": {"corpus": "a", "sampling_exponent": 0.7}}},
            r"sources.text.*sampling_exponent: needs `mix`, several corpora",
        ),
        ({"stages": phase(rope_base=1e4)}, r"stages: rope_base: bert has no rotary positions"),
        (
            {
                "stages": phase(rope_base=1e4),
                "backbone": {"preset": "modern-tiny", "max_positions": 64},
            },
            r"stages.1.rope_base: 10000, but the weights are stored with that of .*, 160000;",
        ),
        (
            {
                "stages": phase(local_rope_base=1e4),
                "backbone": {"preset": "neobert", "vocab_size": 64},
            },
            r"stages: local_rope_base: neobert has no layers with windows and rotary positions",
        ),
        ({"stages": phase(rat=0.3)}, r"stages: no task 'rat' in `tasks`"),
        (
            {"stages": {"joint": [MASKS], "steps": 9, "settings": []}},
            r"stages.settings: expected a list of 1 mapping, one for each stage, got 0",
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
            r"schedule.shape: linear has a fixed one",
        ),
        (
            {"schedule": {"warmup": "9 tokens"}, "batch": "8 examples", "stages": [{MASKS: 9}]},
            r"schedule.warmup: 9 tokens, but `batch` is in examples; give a number of steps",
        ),
    ],
)
def test_mistakes_name_the_stage_and_the_key(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        _ = recipe(**values).curriculum
