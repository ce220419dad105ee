"""Spikes are steps far above the losses before them; noise, descent and new stages are not."""

from __future__ import annotations

import json

import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.train.loop.loss_spikes import LossSpike, SpikeDetector
from palm_ds.train.recipe.sections import SpikeSettings


def spikes(losses: list[float], **settings: float) -> list[LossSpike]:
    detector = SpikeDetector(SpikeSettings(**settings))  # type: ignore[arg-type]
    found = (detector.judge(step, 0, {"task": loss}) for step, loss in enumerate(losses))
    return [spike for spike in found if spike]


NOISE = np.random.default_rng(1).normal(0, 1, 500)
USUAL = {
    "pretraining begins": [10.4 - 5 * (1 - 0.99**i) + 0.2 * NOISE[i] for i in range(500)],
    "flat": [2.0] * 300,
    "noisy": [abs(3 + NOISE[i]) for i in range(500)],
    "fine-tuning near 0": [0.01 + 0.5 * (i % 17 == 0) for i in range(300)],
    "descends to 0": [5 / (i + 1) for i in range(300)],
    "two levels, as with unequal batches": [1.0 + (i % 2) for i in range(300)],
}


@pytest.mark.parametrize("name", USUAL)
def test_usual_losses_are_no_spikes(name: str) -> None:
    assert spikes(USUAL[name]) == []


@pytest.mark.parametrize("name", USUAL)
def test_a_divergence_is_one(name: str) -> None:
    (found,) = spikes([*USUAL[name], 1.8e12])
    assert (found.step, found.began, found.loss) == (len(USUAL[name]), len(USUAL[name]), 1.8e12)
    assert str(found).startswith("the loss of task is 1.8e+12, its median ")


def test_one_that_lasts_remains_one_and_knows_when_it_began() -> None:
    found = spikes([2.0] * 50 + [9.0] * 300 + [2.0, 9.0])
    assert [spike.step for spike in found] == [*range(50, 350), 351]
    assert {spike.began for spike in found} == {50, 351}


def test_it_is_over_only_near_the_median() -> None:
    """Broken weights may reach a loss below the threshold."""
    losses = [*[2.0] * 50, 9.0, 2.4, 2.9, 2.2, 2.9]
    assert [(one.step, one.began) for one in spikes(losses)] == [(50, 50), (51, 50), (52, 50)]


def test_it_lasts_into_the_next_stage() -> None:
    detector = SpikeDetector(SpikeSettings())
    for step in range(30):
        detector.judge(step, 0, {"a": 1.0, "b": 1.0})
    assert detector.judge(30, 0, {"a": 100.0, "b": 1.0})
    assert detector.judge(31, 1, {"b": 50.0}) is None and detector.began == 30
    spike = detector.judge(32, 1, {"a": 60.0})
    assert spike and (spike.began, spike.length) == (30, 3)
    assert detector.judge(33, 1, {"a": 1.0}) is None and detector.began is None


def test_losses_of_earlier_texts_are_compared_without_entering_the_window() -> None:
    detector = SpikeDetector(SpikeSettings())
    for step in range(30):
        detector.judge(step, 1, {"a": 1.0})
    state = json.dumps(detector.state_dict())
    before = {"a": 1.1, "b": 1.0}
    assert detector.compare(20, 1, before, {"a": 1.5, "b": 1e9}) is None
    spike = detector.compare(20, 1, before, {"a": 4.0, "b": 1e9})
    assert spike and (spike.task, spike.loss) == ("a", 4.0)
    assert detector.compare(20, 0, {"a": 3.0}, {"a": 6.0}) is None  # of another stage
    assert detector.compare(20, 0, {"a": 3.0}, {"a": 60.0})
    assert detector.compare(20, 1, {"a": 9.0}, {"a": 8.0}) is None  # not above what it was
    assert json.dumps(detector.state_dict()) == state


def test_at_the_start_only_much_larger_losses_count() -> None:
    assert spikes([4.0, 9.0, 11.0]) == []
    assert spikes([0.3, 2.9, 0.2, 3.1]) == []  # small batches
    assert [spike.step for spike in spikes([4.0, 1e9])] == [1]


def test_a_full_window_is_enough_however_short() -> None:
    """Losses twice as high were none after ten of a window of ten."""
    assert [spike.step for spike in spikes([4.1] * 12 + [8.3, 8.1], window=10)] == [12, 13]
    assert spikes([4.1] * 12 + [8.3]) == []
    assert spikes([0.3, 2.9, 0.2, 3.1], window=2) == []


def test_losses_that_keep_a_spike_from_its_end_count_on_request() -> None:
    detector = SpikeDetector(SpikeSettings())
    for step in range(30):
        detector.judge(step, 0, {"a": 2.0, "b": 2.0})
    before, now = {"a": 2.0, "b": 2.0}, {"a": 2.6, "b": 2.6}
    assert detector.compare(29, 0, before, now, over=True) is None
    assert detector.judge(30, 0, {"a": 99.0, "b": 2.0})
    assert detector.compare(29, 0, before, now) is None
    spike = detector.compare(29, 0, before, now, over=True)
    assert spike and spike.task == "a"  # b has none


def test_the_last_update_may_begin_a_spike_that_its_texts_show() -> None:
    """Runs ended with code 0 and a loss that their last update had raised by 1.5."""
    detector = SpikeDetector(SpikeSettings())
    for step in range(30):
        detector.judge(step, 0, {"a": 5.0 + 0.3 * (step % 3 - 1)})
    assert detector.compare(29, 0, {"a": 4.9}, {"a": 7.4}) is None
    spike = detector.compare(29, 0, {"a": 4.9}, {"a": 7.4}, over=True)
    assert spike and 5 < spike.zscore < 20
    assert detector.compare(29, 0, {"a": 4.9}, {"a": 5.8}, over=True) is None  # hardly a unit
    assert detector.compare(29, 1, {"a": 4.9}, {"a": 7.4}, over=True) is None  # of another stage


def test_stages_and_tasks_are_apart() -> None:
    detector = SpikeDetector(SpikeSettings())
    for step in range(30):
        assert detector.judge(step, 0, {"a": 1.0, "b": 100.0}) is None
    assert detector.judge(30, 1, {"a": 100.0, "c": 100.0}) is None
    spike = detector.judge(31, 1, {"a": 5000.0, "c": 9000.0})
    assert spike is not None and spike.task == "c" and detector.ongoing == spike


def test_infinite_losses_are_anothers_concern() -> None:
    assert spikes([2.0] * 30 + [float("nan"), float("inf"), 2.0]) == []


def test_the_state_is_json_and_continues_exactly() -> None:
    losses = [float(3 + x) for x in NOISE[:80]] + [99.0] * 5
    whole, first = SpikeDetector(SpikeSettings(window=30)), SpikeDetector(SpikeSettings(window=30))
    for step, loss in enumerate(losses):
        one = whole.judge(step, 0, {"a": loss})
        if step % 7 == 0:
            state = json.loads(json.dumps(first.state_dict()))
            first = SpikeDetector(SpikeSettings(window=30))
            first.load_state_dict(state)
        assert first.judge(step, 0, {"a": loss}) == one
    assert first.ongoing is not None and first.ongoing.began == 80


def test_zero_turns_it_off_and_wrong_settings_are_refused() -> None:
    assert spikes([2.0] * 30 + [1e12], zscore=0) == []
    with pytest.raises(UserError, match="zscore"):
        SpikeSettings(zscore=-1)
    with pytest.raises(UserError, match="window: expected 2 or more"):
        SpikeSettings(window=1)
