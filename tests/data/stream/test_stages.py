import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palm_ds.common.errors import UserError
from palm_ds.data.stream.budgets import DatasetSize
from palm_ds.data.stream.curriculum_spec import parse_stages, read_stages
from palm_ds.data.stream.stages import (
    Curriculum,
    PrefixCounts,
    Stage,
    order_of,
    spread,
    spread_counts,
)

TASKS = ["a", "b", "c", "d"]


def steps(curriculum: Curriculum) -> list[dict[str, int]]:
    return [dict(stage.steps_of) for stage in curriculum.stages]


def test_continual_is_the_published_allocation():
    curriculum = read_stages({"continual": TASKS, "steps": 50_000}, TASKS)
    assert steps(curriculum) == [
        {"a": 20_000},
        {"a": 10_000, "b": 30_000},
        {"a": 10_000, "b": 10_000, "c": 40_000},
        {"a": 10_000, "b": 10_000, "c": 10_000, "d": 50_000},
    ]
    assert curriculum.steps == 200_000


@pytest.mark.parametrize("budget", [5, 7, 50_001, 99_999])
def test_continual_gives_every_blend_its_budget_exactly(budget):
    curriculum = read_stages({"continual": ["a", "b + a", "c"], "steps": budget}, TASKS)
    totals = {}
    for row in steps(curriculum):
        for task_group, n in row.items():
            totals[task_group] = totals.get(task_group, 0) + n
    assert set(totals.values()) == {budget}


def test_other_curricula():
    assert steps(read_stages({"joint": ["a", "b"], "steps": 3}, TASKS)) == [{"a": 3, "b": 3}]
    assert steps(read_stages({"sequential": ["a", "b"], "steps": 3}, TASKS)) == [
        {"a": 3},
        {"b": 3},
    ]
    explicit = read_stages([{"a": 1, "b+a": 2, "mix": "step"}, {"c": 4}], TASKS)
    assert steps(explicit) == [{"a": 1, "b + a": 2}, {"c": 4}]
    assert [stage.mix for stage in explicit.stages] == ["step", "batch"]
    assert [explicit.stage_at(s) for s in range(7)] == [0, 0, 0, 1, 1, 1, 1]


def test_continual_with_different_budgets():
    """Every task group gives B // (N + 1) of its own budget to each later stage."""
    stages = {"continual": ["a", "b", "c"], "steps": {"b": 80, "a": 40, "c": 7}}
    assert steps(read_stages(stages, TASKS)) == [
        {"a": 20},
        {"a": 10, "b": 60},
        {"a": 10, "b": 20, "c": 7},
    ]


def test_alternate_is_joint_with_one_task_per_step():
    curriculum = read_stages({"alternate": ["a", "b"], "steps": {"a": 3, "b": 1}}, TASKS)
    same = read_stages({"joint": ["a", "b"], "steps": {"a": 3, "b": 1}, "mix": "step"}, TASKS)
    assert curriculum == same
    assert steps(curriculum) == [{"a": 3, "b": 1}]
    assert curriculum.stages[0].mix == "step"


def test_a_task_in_every_blend():
    """ERNIE 2.0's CMTL+ and Alt.+: every task group that lacks the task gets it."""
    stages = {
        "continual": ["d", "a", "b + d"],
        "always": "d",
        "steps": {"a": 8, "b+d": 8, "d": 4},
    }
    curriculum = read_stages(stages, TASKS)
    assert curriculum.task_groups == ("d", "a + d", "b + d")
    assert [curriculum.total_of(task_group) for task_group in curriculum.task_groups] == [4, 8, 8]
    several = {"joint": ["a", "b + d"], "always": "d + c", "steps": 1}
    assert read_stages(several, "abcd").task_groups == ("a + d + c", "b + d + c")
    listed = {"explicit": [{"a": 1, "d": 2}, {"a + d": 3}], "always": "d"}
    assert steps(read_stages(listed, TASKS)) == [{"a + d": 1, "d": 2}, {"a + d": 3}]
    weights = {"weights": {"a": 3, "b": 1}}
    sampled = {"alternate": ["a", "b"], "always": "d", "steps": 8, "sampler": weights}
    assert steps(read_stages(sampled, TASKS)) == [{"a + d": 6, "b + d": 2}]


def test_a_list_is_short_for_explicit_and_mix_may_stand_for_all_stages():
    listed = [{"a": 1, "b": 2}, {"c": 4, "mix": "batch"}]
    assert read_stages({"explicit": listed}, TASKS) == read_stages(listed, TASKS)
    curriculum = read_stages({"explicit": listed, "mix": "step"}, TASKS)
    assert [stage.mix for stage in curriculum.stages] == ["step", "batch"]


MEASURES = {
    "a": DatasetSize(10_000, 10.0),
    "b": DatasetSize(40_000, 25.0),
    "a + b": DatasetSize(50_000, 40.0),
}


def test_budgets_in_tokens_and_sequences():
    """Steps of 1,000 tokens, rounded up."""
    stages = {"joint": ["a", "b"], "steps": {"a": "12_001 tokens", "b": "200 sequences"}}
    spec = parse_stages(stages, TASKS)
    assert spec.needs_corpus and not spec.resolved
    assert steps(spec.resolve(1000, MEASURES)) == [{"a": 13, "b": 5}]
    listed = parse_stages([{"a": "5000 tokens"}, {"a": 2, "b": "40 sequences"}], TASKS)
    assert steps(listed.resolve(1000, MEASURES)) == [{"a": 5}, {"a": 2, "b": 1}]
    none = parse_stages([{"b": 0, "a": "1 epochs"}, {"b": "0 epochs", "a": 2}], TASKS)
    assert steps(none.resolve(1000, {"a": MEASURES["a"]})) == [{"a": 10}, {"a": 2}]
    continual = {"continual": ["a", "b"], "steps": "90_000 tokens"}
    assert steps(read_stages(continual, TASKS, step_tokens=1000)) == [{"a": 60}, {"a": 30, "b": 90}]


@pytest.mark.parametrize(
    ("stages", "needs_corpus", "resolved"),
    [
        ({"joint": ["a"], "steps": 3}, False, True),
        ({"joint": ["a"], "steps": "3 steps"}, False, True),
        ([{"a": 3}], False, True),
        ({"joint": ["a"], "steps": "3 tokens"}, False, False),
        ([{"a": 3}, {"b": "3 sequences"}], True, False),
        ({"joint": ["a", "b"], "steps": 3, "sampler": "uniform"}, False, False),
        ({"joint": ["a", "b"], "steps": "3 sequences", "sampler": "uniform"}, True, False),
        ({"joint": ["a", "b"], "steps": 3, "sampler": "proportional"}, True, False),
        ({"joint": ["a", "b"], "sampler": {"mix_ratio": {}}}, True, False),
    ],
)
def test_which_stages_need_an_open_corpus(stages, needs_corpus, resolved):
    spec = parse_stages(stages, TASKS)
    assert (spec.needs_corpus, spec.resolved) == (needs_corpus, resolved)
    if needs_corpus:
        with pytest.raises(UserError, match="only once the corpora are open"):
            spec.resolve(1000)


def test_samplers_split_a_total():
    stages = {"joint": ["a", "b", "a + b"], "steps": 10, "sampler": "proportional"}
    curriculum = read_stages(stages, TASKS, step_tokens=1000, sizes=MEASURES)
    assert steps(curriculum) == [{"a": 1, "b": 4, "a + b": 5}]
    ratios = {"mix_ratio": {"b": 0.5, "a + b": 2}, "reference": "a", "epochs": 3}
    stages = {"alternate": ["a", "b", "a+b"], "sampler": ratios}
    curriculum = read_stages(stages, TASKS, step_tokens=1000, sizes=MEASURES)
    assert steps(curriculum) == [{"a": 30, "b": 15, "a + b": 60}]
    # A sampler gives budgets; any shape arranges them.
    stages = {"continual": ["a", "b"], "steps": 12, "sampler": {"weights": {"a": 1, "b": 3}}}
    assert steps(read_stages(stages, TASKS)) == [{"a": 2}, {"a": 1, "b": 9}]


BLENDS = ["a", "b", "c + a", "d", "b + a"]
amounts = st.one_of(
    st.integers(1, 10**6),
    st.integers(1, 10**9).map("{} tokens".format),
    st.integers(1, 10**6).map("{} sequences".format),
)


@given(
    kind=st.sampled_from(["continual", "joint", "alternate", "sequential"]),
    task_groups=st.lists(st.sampled_from(BLENDS), min_size=1, unique=True),
    data=st.data(),
)
def test_every_shape_gives_every_blend_its_budget_exactly(kind, task_groups, data):
    budgets = {task_group: data.draw(amounts) for task_group in task_groups}
    lengths = {task_group: data.draw(st.floats(4, 512)) for task_group in task_groups}
    sizes = {task_group: DatasetSize(1e6, length) for task_group, length in lengths.items()}
    stages = {kind: task_groups, "steps": budgets}
    try:
        curriculum = read_stages(stages, TASKS, step_tokens=4096, sizes=sizes)
    except UserError as error:
        assert kind == "continual" and "too few for continual" in str(error)
        return
    assert curriculum.task_groups == tuple(task_groups)
    for task_group, budget in budgets.items():
        number, _, unit = str(budget).partition(" ")
        tokens = int(number) * {"": 4096, "tokens": 1, "sequences": lengths[task_group]}[unit]
        assert abs(curriculum.total_of(task_group) - math.ceil(tokens / 4096)) <= (
            unit == "sequences"
        )
    assert all(count > 0 for stage in curriculum.stages for _, count in stage.steps_of)
    assert [stage.first for stage in curriculum.stages] == [
        sum(stage.steps for stage in curriculum.stages[:i]) for i in range(len(curriculum.stages))
    ]
    # As a list of stages, as a settled recipe has it, it is the same plan.
    assert read_stages(curriculum.explicit(), TASKS) == curriculum


@given(
    total=st.integers(10, 10**7),
    task_groups=st.lists(st.sampled_from(BLENDS), min_size=1, unique=True),
    sampler=st.sampled_from(["uniform", "proportional", {"temperature": 3}, "weights"]),
    data=st.data(),
)
def test_samplers_split_the_total_exactly(total, task_groups, sampler, data):
    tokens = {task_group: data.draw(st.integers(50, 100)) for task_group in task_groups}
    if sampler == "weights":
        sampler = {"weights": tokens}
    sizes = {task_group: DatasetSize(size, 10.0) for task_group, size in tokens.items()}
    stages = {"continual": task_groups, "steps": total, "sampler": sampler}
    try:
        curriculum = read_stages(stages, TASKS, step_tokens=64, sizes=sizes)
    except UserError as error:
        assert "too few for continual" in str(error)
        return
    assert curriculum.steps == total
    assert all(curriculum.total_of(task_group) > 0 for task_group in task_groups)
    by_size = sorted(task_groups, key=lambda task_group: tokens[task_group])
    counts = [curriculum.total_of(task_group) for task_group in by_size]
    assert sampler == "uniform" or all(a <= b + 1 for a, b in zip(counts, counts[1:], strict=False))


def test_the_table_shows_steps_tokens_warm_ups_and_mixes():
    stages = {"continual": ["a", "b + a"], "steps": 3000}
    curriculum = read_stages(stages, TASKS)
    assert curriculum.table().splitlines() == [
        "        stage 1   stage 2       all",
        "a         2,000     1,000     3,000",
        "b + a         -     3,000     3,000",
        "steps     2,000     4,000     6,000",
    ]
    table = read_stages(stages | {"mix": "step"}, TASKS).table(
        tokens=[512 * 2000, 512 * 4000], warmups=[400, 400]
    )
    assert table.splitlines() == [
        "          stage 1   stage 2       all     tokens",
        "a           2,000     1,000     3,000  1,536,000",
        "b + a           -     3,000     3,000  1,536,000",
        "steps       2,000     4,000     6,000  3,072,000",
        "warm-up       400       400",
        "mix          step      step",
    ]
    once = curriculum.table(warmups=[400, 0])
    assert once.splitlines()[-1].split() == ["warm-up", "400", "-"]


@settings(max_examples=12, deadline=None)
@given(counts=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any))
def test_spreading_is_exact_and_even(counts) -> None:
    order, prefix = spread(counts), PrefixCounts(spread(counts), len(counts))
    assert np.bincount(order, minlength=len(counts)).tolist() == counts
    for n in range(len(order) + 1):
        shares = [n * count / len(order) for count in counts]
        done = np.bincount(order[:n], minlength=len(counts))
        assert spread_counts(counts, n).tolist() == prefix(n).tolist() == done.tolist()
        assert (abs(done - shares) < max(1, len(counts) / 2)).all()
    for number, count in enumerate(counts):
        gaps = np.diff(np.flatnonzero(order == number))
        assert count < 2 or gaps.max() <= len(order) / count + len(counts)


def test_prefixes_of_long_orders_are_counted_without_them():
    order = spread([30_000, 7, 11_111])
    prefix = PrefixCounts(order, 3)
    for n in (4095, 4096, 4097, 20_000, len(order)):
        done = np.bincount(order[:n], minlength=3).tolist()
        assert prefix(n).tolist() == spread_counts([30_000, 7, 11_111], n).tolist() == done
    billions = [6 * 10**11, 3 * 10**11, 10**11]
    assert spread_counts(billions, 10**11).tolist() == [6 * 10**10, 3 * 10**10, 10**10]


def test_turns_are_spread_evenly_as_written():
    def turns(**counts: int) -> str:
        order = order_of(Stage(tuple(counts.items()), "turns", 0), 0, seed=1)
        return "".join([*counts][number] for number in order)

    assert turns(b=3, a=3) == "bababa"
    assert turns(a=6, b=2) == "aabaaaba"
    whole = read_stages([{"a": 4, "b + d": 2, "mix": "turns"}, {"c": 1}], TASKS)
    groups = [whole.at(step, seed=7).task_groups for step in range(7)]
    assert groups == [("a",), ("b + d",), ("a",), ("a",), ("b + d",), ("a",), ("c",)]
    assert read_stages(whole.explicit(), TASKS) == whole


def test_the_order_of_mixed_steps_has_exact_counts_and_depends_on_the_seed():
    stage = Stage((("a", 10), ("b", 30)), "step", 0)
    order = order_of(stage, 0, seed=1)
    assert np.bincount(order).tolist() == [10, 30]
    assert np.array_equal(order, order_of(stage, 0, seed=1))
    assert not np.array_equal(order, order_of(stage, 0, seed=2))


@pytest.mark.parametrize("mix", ["step", "turns"])
def test_a_stage_may_have_more_task_groups_than_a_byte_counts(mix) -> None:
    stage = Stage(tuple((f"task {n}", 2) for n in range(300)), mix, 0)
    assert np.bincount(order_of(stage, 0, seed=1)).tolist() == [2] * 300


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({"continual": ["a"], "stepz": 3}, 'stepz: unknown key; did you mean "steps"'),
        (
            {"a": "3 epochs"},
            "a: unknown key; a stage is an element of a list: stages: [{a: 3 epochs}]",
        ),
        ({"continual": ["a", "e"], "steps": 3}, "no task 'e'"),
        ({"continual": ["a", "a"], "steps": 3}, "duplicate task group"),
        ({"continual": [], "steps": 3}, "expected a list of task groups"),
        ({"joint": ["a"], "continual": ["b"], "steps": 3}, "exactly one of"),
        ({"continual": ["a", "b"], "steps": 2}, "each needs at least 3, as it is trained in every"),
        (
            {"continual": ["a", "b"], "steps": {"a": 1, "b": 9}},
            "stages.steps: 1 of 'a' are too few",
        ),
        ({"joint": ["a"]}, "stages.steps: expected a whole number"),
        ({"joint": ["a"], "steps": -1}, "expected a whole number"),
        ({"joint": ["a"], "steps": 2.5}, "got 2.5"),
        ({"joint": ["a"], "steps": 0}, "no task group has any steps"),
        ({"joint": ["a"], "steps": 3, "mix": "row"}, "expected one of batch, step, turns"),
        ([{"a + a": 3}], "names a task twice"),
        ([{"a": "many"}], "stages.0.a"),
        (["a"], "expected `task group: steps`"),
        ("a", "expected a list of stages"),
        ({"alternate": ["a"], "steps": 3, "mix": "batch"}, "`alternate` is `joint` with"),
        ({"joint": ["a"], "steps": 3, "always": "e"}, "stages.always: no task 'e'"),
        ({"joint": ["a", "a + d"], "steps": 3, "always": "d"}, "duplicate task group"),
        ({"explicit": [{"a": 3, "a + d": 1}], "always": "d"}, "'a + d' is a duplicate"),
        ({"explicit": [{"a": 3}], "steps": 3}, "explicit stages have their own steps"),
        ({"explicit": [{"a": 3}], "sampler": "uniform"}, "explicit stages have their own steps"),
        ({"explicit": {"a": 3}}, "stages.explicit: expected a list of stages"),
        ({"joint": ["a", "b"], "steps": {"a": 3}}, "stages.steps: missing for 'b'"),
        (
            {"joint": ["a"], "steps": {"a": 3, "b": 2}},
            "stages.steps: 'b' is not one of the task groups",
        ),
        ({"joint": ["a"], "steps": {"a": "3 rows"}}, "stages.steps.a: expected a whole number"),
        ({"joint": ["a"], "steps": "0 tokens"}, "no task group has any steps"),
        ({"joint": ["a"], "steps": 0, "sampler": "uniform"}, "no task group has any steps"),
        ({"joint": ["a"], "sampler": "uniform"}, "stages.steps: expected a whole number"),
        ({"joint": ["a"], "steps": {"a": 3}, "sampler": "uniform"}, "the total of all task groups"),
        ({"joint": ["a"], "steps": 3, "sampler": {"mix_ratio": {}}}, "remove `steps`"),
        ([{}], "no task group has any steps"),
        ([{"a+b": 3, "a + b": 2}], "stages.0: 'a + b' is a duplicate"),
    ],
)
def test_invalid_stages_are_clear_errors(stages, message):
    with pytest.raises(UserError) as error:
        read_stages(stages, TASKS)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
