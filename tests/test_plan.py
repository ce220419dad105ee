import numpy as np
import pytest

from palm_ds.errors import UserError
from palm_ds.plan import Plan, Stage, order_of, read_stages
from palm_ds.schedule import Schedule

TASKS = ["a", "b", "c", "d"]


def steps(plan: Plan) -> list[dict[str, int]]:
    return [dict(stage.steps_of) for stage in plan.stages]


def test_continual_is_the_published_allocation():
    plan = read_stages({"continual": TASKS, "steps": 50_000}, TASKS)
    assert steps(plan) == [
        {"a": 20_000},
        {"a": 10_000, "b": 30_000},
        {"a": 10_000, "b": 10_000, "c": 40_000},
        {"a": 10_000, "b": 10_000, "c": 10_000, "d": 50_000},
    ]
    assert plan.steps == 200_000


@pytest.mark.parametrize("budget", [5, 7, 50_001, 99_999])
def test_continual_gives_every_blend_its_budget_exactly(budget):
    plan = read_stages({"continual": ["a", "b + a", "c"], "steps": budget}, TASKS)
    totals = {}
    for row in steps(plan):
        for blend, n in row.items():
            totals[blend] = totals.get(blend, 0) + n
    assert set(totals.values()) == {budget}


def test_other_shapes():
    assert steps(read_stages({"joint": ["a", "b"], "steps": 3}, TASKS)) == [{"a": 3, "b": 3}]
    assert steps(read_stages({"sequential": ["a", "b"], "steps": 3}, TASKS)) == [
        {"a": 3},
        {"b": 3},
    ]
    explicit = read_stages([{"a": 1, "b+a": 2, "mix": "step"}, {"c": 4}], TASKS)
    assert steps(explicit) == [{"a": 1, "b + a": 2}, {"c": 4}]
    assert [stage.mix for stage in explicit.stages] == ["step", "batch"]
    assert [explicit.stage_at(s) for s in range(7)] == [0, 0, 0, 1, 1, 1, 1]


def test_the_order_of_mixed_steps_has_exact_counts_and_depends_on_the_seed():
    stage = Stage((("a", 10), ("b", 30)), "step", 0)
    order = order_of(stage, 0, seed=1)
    assert np.bincount(order).tolist() == [10, 30]
    assert np.array_equal(order, order_of(stage, 0, seed=1))
    assert not np.array_equal(order, order_of(stage, 0, seed=2))


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({"continual": ["a"], "stepz": 3}, 'stepz: unknown key; did you mean "steps"'),
        ({"continual": ["a", "e"], "steps": 3}, "no task 'e'"),
        ({"continual": ["a", "a"], "steps": 3}, "stands there twice"),
        ({"continual": [], "steps": 3}, "expected a list of blends"),
        ({"joint": ["a"], "continual": ["b"], "steps": 3}, "exactly one of"),
        ({"joint": ["a"]}, "stages.steps: expected a whole number"),
        ({"joint": ["a"], "steps": -1}, "expected a whole number"),
        ({"joint": ["a"], "steps": 2.5}, "got 2.5"),
        ({"joint": ["a"], "steps": 0}, "no steps at all"),
        ({"joint": ["a"], "steps": 3, "mix": "row"}, "neither batch nor step"),
        ([{"a + a": 3}], "names a task twice"),
        ([{"a": "many"}], "stages.0.a"),
        (["a"], "expected `blend: steps`"),
        ("a", "expected a list of stages"),
    ],
)
def test_wrong_stages_say_what_is_wrong(stages, message):
    with pytest.raises(UserError) as error:
        read_stages(stages, TASKS)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def factors(schedule: Schedule, plan: Plan) -> list[float]:
    return [round(schedule.factor(step, plan), 4) for step in range(plan.steps)]


def test_schedules():
    plan = read_stages([{"a": 8}], TASKS)
    assert factors(Schedule(kind="linear", warmup=4), plan) == [
        *(0.25, 0.5, 0.75, 1.0),
        *(1.0, 0.75, 0.5, 0.25),
    ]
    noam = factors(Schedule(kind="noam", warmup=2), plan)
    assert noam[:2] == [0.5, 1.0]
    assert noam[7] == 0.5  # sqrt(2 / 8)
    wsd = factors(Schedule(kind="wsd", warmup=2, decay=4, end=0.2), plan)
    assert wsd == [0.5, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4]
    assert factors(Schedule(kind="constant"), plan) == [1.0] * 8


def test_restart_at_each_stage():
    plan = read_stages([{"a": 4}, {"b": 4}], TASKS)
    schedule = Schedule(kind="noam", warmup=2, restart="stage")
    assert factors(schedule, plan)[:4] == factors(schedule, plan)[4:]
    once = Schedule(kind="noam", warmup=2)
    assert factors(once, plan)[4] < 1
