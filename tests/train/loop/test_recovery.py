"""Which steps end a run, which are left out, and when it gives up; in distributed/ with a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from palm_ds.common.errors import UserError
from palm_ds.data.stream.stages import StepInfo
from palm_ds.engine import Engine
from palm_ds.runtime.checkpoint import checkpoint
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.runtime.processes.process_group import SINGLE_PROCESS
from palm_ds.runtime.step.gradient_accumulation import StepResult
from palm_ds.train.loop.recovery import Recovery
from palm_ds.train.recipe.recipe import Recipe
from palm_ds.train.recipe.sections import SpikeSettings
from palm_ds.train.setup.resume import StartingPoint
from tests.helpers.write_checkpoint import write_checkpoint

NAN = float("nan")


@dataclass
class Run:
    """A run without a model: the losses of its steps are given, and checkpoints hold `weights`, the
    loss that they give for texts of earlier steps."""

    folder: Path
    recipe: dict[str, Any] = field(default_factory=dict)
    events: list[tuple[str, str]] = field(default_factory=list)
    skipped_steps: int = 0
    loss_scale: float = 1.0
    precision: str = "fp32"
    rank: int = 0
    invalid: tuple[int, ...] = ()
    weights: float = 2.0
    averages: float = 2.0
    stage: int = 0
    processes = SINGLE_PROCESS

    def __post_init__(self) -> None:
        values = {"nonfinite": "stop", "loss_spike": SpikeSettings(), "failure_limit": 2}
        values |= {"save": SimpleNamespace(every=10, keep=2, keep_every=0, best=0)}
        values |= {"optimizer": SimpleNamespace(ema=0.0)} | self.recipe
        own = {"fp16": {"enabled": True}} if self.precision == "fp16" else {}
        self.ds_config = make_ds_config({"zero_optimization": {"stage": 0}, **own})
        self.step = 0
        self.recovery = Recovery(
            recipe=cast(Recipe, SimpleNamespace(**values)),
            engine=cast(Engine, self),
            checkpoints=self.folder,
            save=self.save,
            finish_save=lambda done: None,
            event=lambda name, message="", **_: self.events.append((name, message)),
        )

    @property
    def skipped_so_far(self) -> int:
        return self.skipped_steps

    def save(self, done: int) -> None:
        if done not in checkpoint.steps_in(self.folder):
            write_checkpoint(
                self.folder,
                done,
                write=lambda *_: None,
                layout=checkpoint.Layout(world=1, stage=0, precision="fp32"),
                parameters={},
                engine={},
                state={
                    "step": done,
                    "recovery": self.recovery.record(),
                    "weights": self.weights,
                },
                group=SINGLE_PROCESS,
                keep=self.recovery.retention(done, {}),
                invalid=self.invalid,
            )
            self.invalid = ()

    def load(
        self, folder: Path, *, at_most: int, valid: int | None = None
    ) -> dict[str, Any] | None:
        limits = {"at_most": at_most, "valid": valid}
        found = checkpoint.latest_good(folder, group=SINGLE_PROCESS, warn=print, **limits)
        if found is None:
            return None
        self.invalid, self.weights = found.invalid, found.state["weights"]
        return found.state

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        self.weights, self.averages = self.averages, self.weights
        yield
        self.weights, self.averages = self.averages, self.weights

    def nonfinite_weights(self) -> list[str]:
        return ["a.weight", "b.weight"] if self.weights != self.weights else []

    def losses_again(self, batches: list[str], tasks: list[str]) -> dict[str, float]:
        assert batches == ["texts"]
        return {task: 2 * self.weights for task in tasks}

    def reduce(self, values: dict[str, float]) -> dict[str, float]:
        return values

    def train(self, *losses: float) -> bool:
        """Train steps with these losses, checked one by one; saves every 10 steps. False: the run
        was stopped."""
        for loss in losses:
            self.skipped_steps += loss != loss
            result = StepResult(
                loss_sums={"task": cast(Any, 2 * loss)},
                correct={},
                counts={"task": 2},
                tokens=1,
                stop=False,
            )
            at = StepInfo(
                step=self.step, stage=self.stage, first=0, stage_steps=9999, task_groups=()
            )
            self.recovery.add(at, result, cast(Any, ["texts"]))
            saves = (self.step + 1) % self.recovery.recipe.save.every == 0
            if not self.recovery.check(self.step, saves=saves):
                return False
            self.step += 1
            if saves:
                self.save(self.step)
        return True

    def last(self) -> str:
        return self.events[-1][1]


def test_a_non_finite_step_of_good_weights_is_saved(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.train(*[2.0] * 25) and not run.train(NAN)
    assert "step 26: the loss of task was not finite; the step was not applied. The" in run.last()
    assert checkpoint.steps_in(tmp_path) == [26, 20, 10]
    assert "unaffected; step 26 is saved" in run.recovery.reason


def test_without_a_detector_nothing_is_claimed(tmp_path: Path) -> None:
    run = Run(tmp_path, {"loss_spike": SpikeSettings(zscore=0)})
    assert run.train(*[2.0] * 5, 1.8e12) and not run.train(NAN)
    assert "The weights are finite; their losses were not watched" in run.recovery.reason
    assert "step 7 is saved." in run.recovery.reason


def test_a_non_finite_step_after_a_divergence_is_no_good_news(tmp_path: Path) -> None:
    """The weights of a loss of 1.8e12 were called unaffected, and replaced good checkpoints."""
    run = Run(tmp_path)
    assert run.train(*[2.0] * 25, 1.8e12, 1.8e12, 1e13, 1e14, 1e15, 1e16)
    assert checkpoint.steps_in(tmp_path) == [30, 20, 10]
    assert [kind for kind, _ in run.events] == ["spike"]
    assert not run.train(NAN)
    assert "The weights are not good: since step 26 the loss of task is 1e+16, its median 2." in (
        run.last()
    )
    assert checkpoint.steps_in(tmp_path) == [10]  # 20 is too close to the spike


def test_without_a_good_checkpoint_it_says_so(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.train(4.0, 1.8e12) and not run.train(NAN)
    assert "There is no good checkpoint from before that; choose another folder" in run.last()
    assert checkpoint.steps_in(tmp_path) == []


def test_skipping_has_a_limit(tmp_path: Path) -> None:
    run = Run(tmp_path, {"nonfinite": "skip"})
    assert run.train(2.0, NAN, NAN, 2.0, NAN, NAN, 2.0, NAN, NAN)
    assert run.events == [] and not run.train(NAN)
    assert "step 10: the loss of task was not finite" in run.last()


def test_fp16_may_look_for_its_loss_scale(tmp_path: Path) -> None:
    run = Run(tmp_path, precision="fp16", loss_scale=65536.0)
    assert run.train(2.0, *[NAN] * 20, 2.0)
    run.loss_scale = 1.0
    assert not run.train(NAN)


BACK = {"nonfinite": "rollback", "loss_spike": SpikeSettings(action="rollback")}


def test_rollbacks_in_a_row_have_a_limit(tmp_path: Path) -> None:
    run = Run(tmp_path, BACK)
    assert run.train(*[2.0] * 25, 99.0)
    assert "restored step 10, steps 11 to 26 are left out of training" in run.last()
    assert "continues with step 27 (rollback 1 of at most 2 in a row)" in run.last()
    assert checkpoint.steps_in(tmp_path) == [26, 10]
    assert run.train(2.0, NAN) and "restored step 26, steps 27 to 28" in run.last()
    assert not run.train(NAN) and "gives up after 2 rollbacks in a row" in run.last()


def test_a_rollback_long_after_the_last_one_counts_from_one(tmp_path: Path) -> None:
    run = Run(tmp_path, BACK)
    for _ in range(4):
        assert run.train(*[2.0] * 125, NAN)
        assert "rollback 1 of at most 2" in run.last()


def test_nothing_to_return_to(tmp_path: Path) -> None:
    run = Run(tmp_path, BACK)
    assert run.train(2.0, 2.0) and not run.train(NAN)
    assert (
        "there is no good checkpoint from before it to return to. The weights are un" in run.last()
    )


def test_weights_of_a_bad_checkpoint_are_not_saved_as_those_of_the_step(tmp_path: Path) -> None:
    """No checkpoint is good enough to return to, and the last one tried replaced the weights."""
    run = Run(tmp_path, BACK)
    assert run.train(*[2.0] * 9)
    run.weights = 1e5
    assert run.train(2.0)
    run.weights = 2.0
    assert run.train(*[2.0] * 5) and not run.train(NAN)
    assert [kind for kind, _ in run.events][-2:] == ["bad checkpoint", "nonfinite"]
    assert "The weights are not good: for the texts of step" in run.last()
    assert checkpoint.steps_in(tmp_path) == [10]


@pytest.mark.parametrize("kill_at", [31, 36, 45])
def test_a_run_killed_after_a_rollback_judges_the_same(tmp_path: Path, kill_at: int) -> None:
    losses = [2.0] * 32 + [99.0] + [2.0] * 9 + [NAN] + [2.0] * 20
    whole, killed = Run(tmp_path / "a", BACK), Run(tmp_path / "b", BACK)
    assert whole.train(*losses) and killed.train(*losses[:kill_at])
    again = Run(tmp_path / "b", BACK, events=[])
    state = again.load(tmp_path / "b", at_most=9999)
    assert state is not None
    again.step = state["step"]
    again.recovery.restore(state["recovery"])
    assert again.train(*losses[again.step :])
    assert again.events == whole.events[len(whole.events) - len(again.events) :]
    assert again.recovery.record() == whole.recovery.record()


def test_weights_that_a_step_of_normal_loss_ruined_are_not_called_unaffected(
    tmp_path: Path,
) -> None:
    """The update before a non-finite loss ruined them; no finite loss showed it."""
    for weights, evidence in (
        (1e10, "for the texts of step 25 the loss of task is 1e+10, its median 2"),
        (NAN, "a.weight (and 1 more) has values that are not finite"),
    ):
        run = Run(tmp_path / str(weights), {"nonfinite": "skip"})
        assert run.train(*[2.0] * 25)
        run.weights = weights
        assert run.train(NAN, NAN) and not run.train(NAN)
        assert "unaffected" not in run.last()
        assert f"The weights are not good: {evidence}." in run.last()
        assert "the last checkpoint from before is step 10" in run.last()
        assert checkpoint.steps_in(run.folder) == [10]


def test_never_back_to_a_checkpoint_of_ruined_weights(tmp_path: Path) -> None:
    """Step 30 ruins the weights, and they are saved before a loss shows it."""
    run = Run(tmp_path, BACK)
    assert run.train(*[2.0] * 29)
    run.weights = 1e5
    assert run.train(2.0, 1e5)
    assert "restored step 20, steps 21 to 31" in run.last() and run.weights == 2.0
    assert checkpoint.steps_in(tmp_path) == [31, 20]


def test_of_checkpoints_close_to_a_spike_only_a_checked_one_is_taken(tmp_path: Path) -> None:
    run = Run(tmp_path, BACK)
    assert run.train(*[2.0] * 10)
    run.weights = 1e5
    run.save(11)
    assert run.train(2.0, 2.0, 1e5)
    assert [kind for kind, _ in run.events] == ["bad checkpoint", "rollback"]
    assert (
        "checkpoint 11 is not good either: for the texts of step 12 the loss of task is 1e+05"
        in (run.events[0][1])
    )
    assert "restored step 10" in run.last() and run.weights == 2.0


def test_a_spike_that_returns_leads_one_checkpoint_further_back(tmp_path: Path) -> None:
    run = Run(tmp_path, BACK | {"failure_limit": 3})
    run.recovery.recipe.save.keep = 3  # type: ignore[misc]
    assert run.train(*[2.0] * 35, 99.0) and "restored step 20" in run.last()
    assert run.train(2.0, 99.0) and "restored step 10" in run.last()
    assert checkpoint.steps_in(tmp_path) == [38, 20, 10]  # the first one is not given up
    assert run.train(2.0, 99.0) and "(rollback 3 of at most 3 in a row)" in run.last()
    assert not run.train(2.0, 99.0)
    assert "gives up after 3 rollbacks in a row" in run.last()
    assert "the last checkpoint from before is step 20." in run.last()
    assert checkpoint.steps_in(tmp_path) == [20, 10]


def test_nothing_from_before_a_spike_is_deleted_while_it_lasts(tmp_path: Path) -> None:
    """Into the next stage, too."""
    run = Run(tmp_path)
    assert run.train(*[2.0] * 35, *[99.0] * 25)
    run.stage = 1
    assert run.train(*[99.0] * 40)
    assert checkpoint.steps_in(tmp_path) == [100, 90, 30, 20]
    assert run.train(*[2.0] * 20)  # over
    assert checkpoint.steps_in(tmp_path) == [120, 110]


def test_a_divergence_ends_a_run_that_only_warns(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.train(*[2.0] * 35)
    run.weights = 99.0
    assert run.train(*[99.0] * 99)
    assert [kind for kind, _ in run.events] == ["spike"]
    assert not run.train(99.0)
    assert "step 135: diverged. The weights are not good: for the texts of step 35 the loss" in (
        run.last()
    )
    assert checkpoint.steps_in(tmp_path) == [20]


def test_harder_data_do_not_end_it(tmp_path: Path) -> None:
    """Losses jump, but not those of texts from before."""
    run = Run(tmp_path)
    assert run.train(*[2.0] * 35, *[99.0] * 205)
    assert [kind for kind, _ in run.events] == ["spike"] * 3
    assert "for 200 steps by now; the weights are as good as before for earlier" in run.last()
    assert run.recovery.check(run.step - 1, last=True)


def test_weights_must_have_recovered_from_a_spike_at_the_end(tmp_path: Path) -> None:
    """They ended a run with code 0, called as good as before, if their losses were below those that
    begin a spike."""
    run = Run(tmp_path, {"loss_spike": SpikeSettings(window=10)})
    assert run.train(*[2.0] * 35)
    run.weights = 2.9
    assert run.train(99.0, *[2.9] * 9)
    assert "step 45: the loss of task is 2.9, its median 2, for 10 steps by now; for the" in (
        run.last()
    )
    assert "texts of step 35 the loss of task is 2.9, its median 2; training co" in run.last()
    assert not run.recovery.check(run.step - 1, last=True)
    assert "step 45: diverged. The weights are not good: for the texts of step 35" in run.last()
    assert checkpoint.steps_in(tmp_path) == [20]


@pytest.mark.parametrize("action", ["stop", "rollback"])
def test_ruined_weights_never_replace_the_only_checkpoint(tmp_path: Path, action: str) -> None:
    """With `save.keep: 1` the good one was deleted before a loss showed what the update did."""
    run = Run(tmp_path, {"loss_spike": SpikeSettings(action=cast(Any, action))})
    run.recovery.recipe.save.keep = 1  # type: ignore[misc]
    assert run.train(*[2.0] * 29) and checkpoint.steps_in(tmp_path) == [20]
    run.weights = 1e5
    assert run.train(2.0) == (action == "rollback")
    assert "step 30: the weights were checked before they are saved" in run.last()
    assert checkpoint.steps_in(tmp_path) == ([30, 20] if action == "rollback" else [20])
    assert run.weights == 2.0


@pytest.mark.parametrize(
    ("action", "kept"), [("warn", [10]), ("stop", [10]), ("rollback", [25, 10])]
)
def test_what_the_last_step_ruins_is_no_end(tmp_path: Path, action: str, kept: list[int]) -> None:
    """No training loss shows it."""
    run = Run(tmp_path, {"loss_spike": SpikeSettings(action=cast(Any, action))})
    assert run.train(*[2.0] * 25)
    assert run.recovery.check(24, last=True)
    run.weights = 99.0
    assert run.recovery.check(24, last=True) == (action == "rollback")
    assert "step 25: the weights were checked before the end" in run.last()
    assert ("; the run ends with these weights (" in run.last()) == (action == "rollback")
    assert checkpoint.steps_in(tmp_path) == kept
    assert run.weights == 2.0


def test_a_checkpoint_whose_weights_are_not_finite_is_not_resumed_from(tmp_path: Path) -> None:
    engine = SimpleNamespace(restore=lambda found: None, nonfinite_weights=lambda: ["a.weight"])
    start = StartingPoint(found=cast(Any, SimpleNamespace(path=tmp_path / "step_00000020")))
    with pytest.raises(UserError, match=r"step_00000020: a.weight has values .* remove this fold"):
        start.restore(cast(Engine, engine), cast(Any, None))


EMA = {"optimizer": SimpleNamespace(ema=0.99)}


def test_averages_that_hold_a_spike_are_told_from_good_ones(tmp_path: Path) -> None:
    run = Run(tmp_path, EMA)
    assert run.train(*[2.0] * 35)
    assert run.recovery.averages_problem() == ""
    run.averages = 9.0
    assert "texts of step 35 the loss of task is 9, its median 2" in run.recovery.averages_problem()
    assert run.weights == 2.0
    run.recovery.recipe = cast(Recipe, SimpleNamespace(optimizer=SimpleNamespace(ema=0.0)))
    assert run.recovery.averages_problem() == ""


def test_averages_are_judged_alike_when_a_run_is_started_again_at_its_end(tmp_path: Path) -> None:
    """They passed unchecked: a process that trains no step has none to check them with."""
    run = Run(tmp_path, EMA, averages=9.0)
    assert run.train(*[2.0] * 40)
    again, older = Run(tmp_path, EMA, averages=9.0), Run(tmp_path, EMA, averages=9.0)
    state = again.load(tmp_path, at_most=40)
    assert state is not None and state["step"] == 40
    again.recovery.restore(state["recovery"])
    assert "step 40 the loss of task is 9" in run.recovery.averages_problem()
    assert again.recovery.averages_problem() == run.recovery.averages_problem()
    again.step, again.averages = 40, 2.0
    assert again.train(2.0) and again.recovery.averages_problem() == ""  # checked by itself
    del state["recovery"]["averages"]
    older.recovery.restore(state["recovery"])
    assert older.recovery.averages_problem() == ""
