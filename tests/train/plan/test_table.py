from dataclasses import replace

import pytest

from palm_ds.train.plan.cluster import parse_clusters
from palm_ds.train.plan.table import COLUMNS, make_plan, plan_lines
from palm_ds.train.plan.work import StepWork, TeacherSize
from tests.train.plan.test_step_time import MODEL, WORK, ds_config


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
