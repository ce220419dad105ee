from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from palm_ds.data.stream.stages import StepSize
from palm_ds.model.encoder.flops import training_flops
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.train.plan.cluster import parse_clusters
from palm_ds.train.plan.step_time import plan_step_time
from palm_ds.train.plan.table import (
    COLUMNS,
    StageWork,
    make_plan,
    plan_lines,
    stage_lines,
    stage_work,
)
from palm_ds.train.plan.work import StepWork, TeacherSize, size_of, vocab_tasks
from palm_ds.train.setup.build import build_model, build_stream
from palm_ds.train.setup.sources import open_data
from tests.helpers.small_corpus import write_small_corpus
from tests.train.plan.test_step_time import MODEL, WORK, ds_config
from tests.train.recipe.test_stage_settings import APART, MASKS, recipe


def cells_of(lines: list[str]) -> list[list[str]]:
    rows = [line for line in lines if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_a_plan_says_that_it_is_no_measurement() -> None:
    lines = plan_lines(MODEL, WORK, ds_config(1), parse_clusters("8 to 64 x H100, 400 Gb/s, 35 %"))
    assert lines[0] == (
        "plan for 8 to 64 x H100, 8 per host, 400 Gb/s per host: PREDICTED, not measured; assumes "
        "35 % of peak in the matrix products"
    )
    heads, _, *rows = cells_of(lines)
    assert heads == list(COLUMNS) and [row[0] for row in rows] == ["8", "16", "32", "64"]
    assert rows[0][1] == "8 x 16" and rows[0][-1].endswith(" %")


def test_gpus_that_cannot_share_the_rows_are_named() -> None:
    work = StepWork(rows=24, length=128, tokens=3072, squares=3072 * 64, labels=400)
    lines = plan_lines(MODEL, work, ds_config(1), parse_clusters("8 to 16 x H100, 400 Gb/s"))
    assert len(cells_of(lines)) == 3
    assert lines[-1].startswith("16 GPUs: 24 rows per step cannot be divided evenly among 16")


def test_too_little_memory_is_shown() -> None:
    values = {"palm_ds": {}, "reduce_bucket_size": 500_000_000_000}
    [_, _, row] = cells_of(
        plan_lines(MODEL, WORK, ds_config(1, **values), parse_clusters("1 x A10"))
    )
    assert row[COLUMNS.index("GB of a GPU")].endswith("of 24 TOO MUCH")


@pytest.mark.parametrize("shard", [False, True])
def test_a_teacher_takes_its_weights_and_a_forward_pass(shard: bool) -> None:
    size = TeacherSize(config=MODEL.config, parameters=7_000_000, precision="fp32", shard=shard)
    taught, clusters = replace(MODEL, teachers=(size,)), parse_clusters("8 x H100, 400 Gb/s")
    alone, both = (make_plan(each, WORK, ds_config(1), *clusters) for each in (MODEL, taught))
    weights = 28e6 / (8 if shard else 1)
    assert both.memory.states - alone.memory.states == pytest.approx(weights)
    assert both.memory.total - alone.memory.total == pytest.approx(weights)
    assert both.time.products == pytest.approx(alone.time.products * 4 / 3)
    assert both.time.exposed == alone.time.exposed
    line = plan_lines(taught, WORK, ds_config(1), clusters)[1]
    assert "teachers of 7 M in `states` and `products`" in line


def test_without_clusters_there_is_no_plan() -> None:
    assert plan_lines(MODEL, WORK, ds_config(1), []) == []


PACKED: list[dict[str, Any]] = [
    {MASKS: 8, "length": 32, "batch": {"start": "8 rows", "end": "16 rows", "over": "768 tokens"}},
    {MASKS: 6, APART: 3, "mix": "step"},
    {f"{APART} + {MASKS}": 4, "rate": [0.3, 0.1]},
]
BY_EXAMPLE: list[dict[str, Any]] = [{MASKS: 5}, {MASKS: 3, APART: 3, "mix": "step"}]


@pytest.mark.parametrize("batch", ["8 rows", "12 examples"])
def test_stages_have_the_tokens_and_flops_of_their_steps(tmp_path: Path, batch: str) -> None:
    write_small_corpus(tmp_path / "corpus")
    stages = PACKED if batch == "8 rows" else BY_EXAMPLE
    made = recipe(tmp_path / "corpus", stages=stages, batch=batch, schedule={"kind": "constant"})
    data = open_data(made)
    stream = build_stream(made, data)
    config = make_ds_config({"zero_optimization": {"stage": 0}})
    model = build_model(made, config, data.vocabulary, device=torch.device("cpu"))
    found = stage_work(stream, model)
    assert not getattr(stream, "_stages", {})  # nothing is packed but the samples
    encoder, tasks = model.backbone.config, vocab_tasks(model)
    for stage, work in zip(made.curriculum.stages, found, strict=True):
        tokens = flops = 0.0
        for step in range(stage.first, stage.first + stage.steps):
            for part in stream.batches(step, 0, 1, stream.rows_at(step)):
                tokens += part.real_tokens
                flops += float(training_flops(encoder, part, tasks))
        assert work.steps == stage.steps
        assert work.tokens == pytest.approx(tokens, rel=0.2)
        assert work.flops(size_of(model)) == pytest.approx(flops, rel=0.2)
    hours = [
        work.hours(size_of(model), ds_config(1), *parse_clusters("1 x H100")) for work in found
    ]
    assert all(each > 0 for each in hours)


def test_steps_of_each_size() -> None:
    grown = StepSize(32, 32, (8, 16), 3)
    for steps in range(12):
        rows = [grown.rows_at(step) for step in range(steps)]
        assert grown.steps_by_rows(steps) == {x: rows.count(x) for x in dict.fromkeys(rows)}
    assert StepSize(32, 4).steps_by_rows(7) == {4: 7}


def test_hours_are_steps_times_their_seconds() -> None:
    half = WORK.of_rows(512)
    assert (half.rows, half.tokens, half.labels) == (512, WORK.tokens / 2, WORK.labels / 2)
    stages = [StageWork(((half, 100.0), (WORK, 900.0))), StageWork(((WORK, 5000.0),))]
    clusters = parse_clusters("8 to 16 x H100, 400 Gb/s")
    config = ds_config(1)

    def seconds(work: Any, cluster: Any) -> float:
        _, micro_steps = config.micro_batching(work.rows, cluster.gpus)
        return plan_step_time(MODEL, work, config, cluster, micro_steps=micro_steps).total

    wanted = [
        [100 * seconds(half, each) + 900 * seconds(WORK, each), 5000 * seconds(WORK, each)]
        for each in clusters
    ]
    heads, _, *rows = cells_of(stage_lines(MODEL, stages, config, clusters))
    assert heads == ["stage", "steps", "tokens", "FLOPs", "hours, 8 GPUs", "hours, 16 GPUs"]
    tokens = [950 * WORK.tokens, 5000 * WORK.tokens]
    for row, (name, each) in zip(rows, [("1", 0), ("2", 1), ("all", slice(None))], strict=True):
        part = [*tokens[each]] if name == "all" else [tokens[each]]
        assert row[0] == name and row[2] == f"{sum(part):,.0f}"
        assert float(row[3]) == pytest.approx(
            sum(part) / WORK.tokens * WORK.flops(MODEL.config), rel=0.01
        )
        for cell, times in zip(row[4:], wanted, strict=True):
            took = sum(times) if name == "all" else times[each]
            assert float(cell) == pytest.approx(took / 3600, abs=0.006)
    assert [row[1] for row in rows] == ["1,000", "5,000", "6,000"]


def test_steps_that_cannot_be_divided_have_no_hours() -> None:
    odd = StageWork(((WORK.of_rows(24), 10.0),))
    _, _, *rows = cells_of(
        stage_lines(MODEL, [odd], ds_config(1), parse_clusters("8 to 16 x H100, 400 Gb/s"))
    )
    assert [row[4:] for row in rows] == [[rows[0][4], "-"]] * 2 and rows[0][4] != "-"
    assert stage_lines(MODEL, [odd], ds_config(1), []) == []
