"""Amounts and samplers, compared with numbers computed by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palm_ds.common.errors import UserError
from palm_ds.data.stream.budgets import (
    Budget,
    DatasetSize,
    read_budget,
    read_sampler,
    sampled,
    share_out,
)

BLENDS = ["a", "b", "a + b"]


def normalize(task_group: str) -> str:
    return " + ".join(part.strip() for part in task_group.split("+"))


@pytest.mark.parametrize(
    ("written", "budget"),
    [
        (5000, Budget(5000)),
        ("5_000", Budget(5000)),
        ("5000 steps", Budget(5000)),
        ("20_000_000 tokens", Budget(20_000_000, "tokens")),
        (" 300000sequences ", Budget(300_000, "sequences")),
        (0, Budget(0)),
    ],
)
def test_amounts_are_read_with_their_units(written, budget):
    assert read_budget(written, "steps") == budget


@pytest.mark.parametrize(
    "written", [None, True, -1, 2.5, "many", "5 rows", "1e6 tokens", "tokens", "_5", [5], ""]
)
def test_invalid_amounts_are_refused(written):
    with pytest.raises(UserError, match=r"^stages\.steps: expected a whole number of steps") as e:
        read_budget(written, "stages.steps")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("budget", "mean_length", "steps"),
    [
        (Budget(7), None, 7),
        (Budget(4096, "tokens"), None, 1),
        (Budget(4097, "tokens"), None, 2),
        (Budget(0, "tokens"), None, 0),
        (Budget(100, "sequences"), 40.96, 1),
        (Budget(101, "sequences"), 40.96, 2),
        (Budget(3, "sequences"), 10.0, 1),
        (Budget(1, "epochs"), 1.0, 11),
        (Budget(0.5, "epochs"), 1.0, 6),
    ],
)
def test_amounts_in_steps_of_4096_tokens_are_rounded_up(budget, mean_length, steps):
    size = DatasetSize(tokens=40_961, mean_length=mean_length) if mean_length else None
    assert budget.steps(4096, size, "stages.steps") == steps


def test_amounts_that_need_a_corpus_are_errors_without_one():
    with pytest.raises(UserError, match="a: 3 sequences can be converted to steps only once"):
        Budget(3, "sequences").steps(4096, None, "a")
    with pytest.raises(UserError, match="only once the corpora are open"):
        sampled(read_sampler("proportional", BLENDS, normalize), Budget(9), 64, None)
    with pytest.raises(UserError, match="only once the corpora are open"):
        sampled(read_sampler({"mix_ratio": {}}, BLENDS, normalize), None, 64, None)


HUNDRED = Budget(100)


def by_hand(sampler, total: Budget | None = HUNDRED, step_tokens=100):
    """Epochs of 1,000, 3,000 and 16,000 tokens; examples of 10, 20 and 40."""
    sizes = {
        "a": DatasetSize(1000, 10),
        "b": DatasetSize(3000, 20),
        "a + b": DatasetSize(16_000, 40),
    }
    steps = sampled(read_sampler(sampler, BLENDS, normalize), total, step_tokens, sizes)
    return [steps[task_group] for task_group in BLENDS]


def test_shares_of_a_total():
    assert by_hand("uniform") == [34, 33, 33]
    assert by_hand("uniform", Budget(101)) == [34, 34, 33]
    assert by_hand("proportional") == [5, 15, 80]
    assert by_hand({"temperature": 1}) == [5, 15, 80]
    # square roots: 31.62, 54.77, 126.49 of 212.88 -> 14.85, 25.73, 59.42
    assert by_hand({"temperature": 2}) == [15, 26, 59]
    # so hot that all are equal but for the remainders, which the larger ones have
    assert by_hand({"temperature": 1e9}) == [33, 33, 34]
    assert by_hand({"weights": {"b": 2, "a+b": 1.5, "a": 0.5}}) == [13, 50, 37]


def test_a_total_in_tokens_or_sequences():
    assert by_hand("uniform", Budget(3001, "tokens")) == [11, 10, 10]
    # A third of the tokens each: an example is 3 / (1/10 + 1/20 + 1/40) = 17.14 tokens long.
    assert sum(by_hand("uniform", Budget(175, "sequences"))) == 30
    assert sum(by_hand("uniform", Budget(176, "sequences"))) == 31


def test_mix_ratio_equals_paddlepalms():
    """int(epochs * ratio * steps of an epoch of the reference); an epoch of b: 30 steps."""
    ratios = {"mix_ratio": {"a": 0.5, "b": 1.0, "a + b": 0.25}, "reference": "b", "epochs": 3}
    assert by_hand(ratios, None) == [45, 90, 22]
    assert by_hand({"mix_ratio": {"a + b": 0.35}, "epochs": 2}, None) == [20, 20, 7]
    # 0.7 * 10 is 7, but not in binary floating point
    assert by_hand({"mix_ratio": {"a": 0.7}, "reference": "a"}, None)[0] == 7
    # what does not fill a step of the reference does not count
    assert by_hand({"mix_ratio": {}, "reference": "a"}, None, step_tokens=300) == [3, 3, 3]


def test_every_blend_gets_a_step():
    with pytest.raises(UserError) as error:
        by_hand({"mix_ratio": {"b": 0.05}, "epochs": 1}, None)
    assert "'b' would get 1 epochs x ratio 0.05 x 10 steps per epoch of 'a'" in str(error.value)
    with pytest.raises(UserError, match="a total of 5 steps gives 'a' no step"):
        by_hand("proportional", Budget(5))


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ("even", "stages.sampler: expected uniform, proportional, or one of temperature"),
        (None, "stages.sampler: expected uniform"),
        ({}, "stages.sampler: expected uniform"),
        ({"temperature": 2, "weights": {"a": 1}}, "stages.sampler: expected uniform"),
        ({"temperature": 0}, "stages.sampler.temperature: expected a number above 0, got 0"),
        ({"temperature": True}, "temperature: expected a number above 0"),
        ({"temperature": "hot"}, "temperature: expected a number above 0, got 'hot'"),
        ({"temperature": float("inf")}, "temperature: expected a number above 0"),
        ({"temperature": 1, "epochs": 2}, "stages.sampler.epochs: unknown key"),
        ({"weights": {"a": 1, "b": 1}}, "stages.sampler.weights: missing for 'a + b'"),
        (
            {"weights": {"a": 1, "c": 1}},
            "stages.sampler.weights: 'c' is not one of the task groups",
        ),
        ({"weights": {"a": -1, "b": 1, "a + b": 1}}, "weights.a: expected a number above 0"),
        ({"weights": {"a+b": 1, "a + b": 1}}, "'a + b' is a duplicate"),
        ({"weights": [1, 2, 3]}, "expected `task group: number`"),
        ({"mix_ratio": {"a": 0}}, "stages.sampler.mix_ratio.a: expected a number above 0"),
        ({"mix_ratio": {}, "reference": "ab"}, "stages.sampler.reference: 'ab' is not one of"),
        ({"mix_ratio": {}, "epochs": 0}, "stages.sampler.epochs: expected a number above 0"),
        ({"mix_ratio": {}, "epoch": 2}, 'epoch: unknown key; did you mean "epochs"'),
    ],
)
def test_invalid_samplers_are_clear_errors(sampler, message):
    with pytest.raises(UserError) as error:
        read_sampler(sampler, BLENDS, normalize)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@given(
    total=st.integers(0, 10**9),
    weights=st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=12),
)
def test_rounded_shares_add_up_and_are_off_by_less_than_one(total, weights):
    shares = {str(i): Fraction(weight) for i, weight in enumerate(weights)}
    counts = share_out(total, shares)
    assert list(counts) == list(shares)
    assert sum(counts.values()) == total
    for name, count in counts.items():
        assert count >= 0
        assert abs(count - total * shares[name] / sum(shares.values())) < 1
