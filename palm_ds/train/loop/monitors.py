"""Monitors of a running loop.

StepMeter    losses, accuracy and speed of the steps since the last logged one
SlowRanks    processes that make all others wait
LabelWatch   tasks that get no label in the steps that should train them
Passes       epochs of the first task group that have ended
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from palm_ds.data.sources.table import TableSource
from palm_ds.data.stream.stages import Curriculum, StepInfo, tasks_of
from palm_ds.data.stream.task_group_dataset import TaskGroupDataset
from palm_ds.engine import Engine
from palm_ds.runtime.device.memory import compile_count, peak_flops, take_memory_use
from palm_ds.runtime.processes.launchers import host_name
from palm_ds.runtime.step.gradient_accumulation import StepResult
from palm_ds.train.recipe.recipe import Recipe


@dataclass
class StepMeter:
    """Sums over the steps since the last logged one. They stay on the device until read."""

    loss: dict[str, Any] = field(default_factory=dict)
    correct: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    flops: torch.Tensor | float = 0.0
    waited: float = 0.0
    steps: int = 0
    began: float = field(default_factory=time.monotonic)

    def add(self, result: StepResult, flops: torch.Tensor | float, waited: float) -> None:
        for task, count in result.counts.items():
            self.loss[task] = self.loss.get(task, 0.0) + result.loss_sums[task]
            self.correct[task] = self.correct.get(task, 0) + result.correct[task]
            self.counts[task] = self.counts.get(task, 0) + count
        self.tokens += result.tokens
        self.flops += flops
        self.waited += waited
        self.steps += 1

    def read(self, engine: Engine) -> dict[str, Any]:
        """The record of a logged step. Collective."""
        seen = [task for task, count in self.counts.items() if count]
        peak = peak_flops(engine.device, engine.ds_config.precision)
        sums = engine.reduce(
            {f"loss {t}": self.loss[t] for t in seen}
            | {f"right {t}": self.correct[t] for t in seen}
            | {"flops": self.flops, "waited": self.waited, "peak": peak}
        )
        seconds = max(time.monotonic() - self.began, 1e-9)
        return {
            "loss": {t: sums[f"loss {t}"] / self.counts[t] for t in seen},
            "accuracy": {t: sums[f"right {t}"] / self.counts[t] for t in seen},
            "tokens_per_second": self.tokens / seconds,
            "data_wait": sums["waited"] / engine.world / seconds,
            **_computing(sums["flops"] / seconds, sums["peak"]),
            **_memory(engine),
            "compiled": compile_count(),
        }

    def rank_times(self, engine: Engine) -> tuple[list[RankTime], float]:
        """The times of every process since the last record, and the seconds since. Collective."""
        forward = engine.take_forward_seconds()
        mine = RankTime(host=host_name(), forward=forward, waited=self.waited)
        return engine.processes.gather(mine), time.monotonic() - self.began


def _computing(flops_per_second: float, peak: float) -> dict[str, float]:
    """The rate, and model FLOPs utilization, its share of what all cards can do; without the share
    if a card is unknown, nothing if the encoder only adds, as a bag of words does."""
    if not flops_per_second:
        return {}
    mfu = {} if math.isnan(peak) else {"mfu": flops_per_second / peak}
    return {"flops_per_second": flops_per_second, **mfu}


def _memory(engine: Engine) -> dict[str, int]:
    """Bytes of the process that used most of its GPU; nothing on CPUs. Collective."""
    if (used := take_memory_use(engine.device)) is None:
        return {}
    every = engine.processes.gather(used)
    return {
        "memory_allocated": max(each.allocated for each in every),
        "memory_reserved": max(each.reserved for each in every),
    }


_TIMES = 1.3
"""A process is slow if it takes this many times the median ..."""
_SHARE = 0.1
"""... and that is this share of the time that passed, or more."""
_IN_A_ROW = 5
"""Records in a row in which a process is slow before it is named."""


@dataclass(frozen=True, kw_only=True)
class RankTime:
    """Times of one process by itself since the last record."""

    host: str
    forward: float
    """Seconds of its forward passes."""
    waited: float
    """Seconds in which it waited for data."""

    @property
    def seconds(self) -> float:
        return self.forward + self.waited


@dataclass
class SlowRanks:
    """Count of how often in a row each process was slow."""

    _slow: dict[int, int] = field(default_factory=dict)

    def add(self, times: Sequence[RankTime], passed: float) -> list[str]:
        """Judge a record of all ranks in `passed` seconds. Returns a line for each process to
        name."""
        median = statistics.median_low(rank.seconds for rank in times)
        lines = []
        for rank, rank_time in enumerate(times):
            late = rank_time.seconds - median
            slow = rank_time.seconds > _TIMES * median and late > _SHARE * passed
            self._slow[rank] = self._slow.get(rank, 0) + 1 if slow else 0
            if self._slow[rank] == _IN_A_ROW:
                lines.append(_line(rank, rank_time, median, late / passed))
        return lines


def _line(rank: int, time: RankTime, median: float, share: float) -> str:
    cause = "waiting for data" if time.waited > time.forward else "its forward passes"
    ratio = f"{time.seconds / median:.1f} times the median" if median else "the others: none"
    return (
        f"rank {rank} on {time.host} is slow: {cause}: {ratio} of all processes, which wait for it "
        f"{100 * share:.0f} % of the time"
    )


FIRST_STEPS = 20
"""A task is reported if it has no label after this number of whole steps of its own."""


@dataclass
class LabelWatch:
    """Counts the steps of every task until its first label."""

    curriculum: Curriculum
    steps: dict[str, int] = field(default_factory=dict)
    """Steps in which a task took part, whatever its share of them."""
    _whole: dict[str, float] = field(default_factory=dict)
    _settled: set[str] = field(default_factory=set)
    """Tasks that have had labels, or were reported."""
    _before: frozenset[str] | None = None
    """Tasks of the stages before the first step that was counted, in a run that was resumed: labels
    that they had then are not known."""

    def add(self, at: StepInfo, counts: Mapping[str, int]) -> list[str]:
        """Count a step with its labels. Returns the tasks to report: each once, after its first
        steps or, if all its steps were counted, at the end of the run."""
        if self._before is None:
            self._before = self.curriculum.started(at.step)
        self._settled |= {task for task, count in counts.items() if count}
        for task, share in self._shares(at):
            self.steps[task] = self.steps.get(task, 0) + 1
            self._whole[task] = self._whole.get(task, 0.0) + share
        waiting = [task for task in self.steps if task not in self._settled]
        ends = set(waiting) - self._before if at.step + 1 == self.curriculum.steps else set()
        silent = [task for task in waiting if task in ends or self._whole[task] > FIRST_STEPS - 0.5]
        self._settled |= set(silent)
        return silent

    def describe(self, task: str) -> str:
        """The line of the log about a task that `add` returned."""
        return (
            f"tasks.{task}: not one label in {self.steps[task]} steps that should train it, so it "
            "learns nothing; palm-ds inspect shows what it labels"
        )

    def _shares(self, at: StepInfo) -> Iterable[tuple[str, float]]:
        """The tasks of a step, and how much of it belongs to them."""
        stage = self.curriculum.stages[at.stage]
        steps = {group: of for group, of in stage.steps_of if group in at.task_groups}
        shares: dict[str, float] = {}
        for group, of in steps.items():
            for task in tasks_of(group):
                shares[task] = shares.get(task, 0.0) + of / sum(steps.values())
        return shares.items()


@dataclass(frozen=True)
class Passes:
    """Epochs of the first task group of a stream."""

    first: TaskGroupDataset
    """Of that task group."""
    consumed: Callable[[int], Mapping[str, int]]
    """{task group: its examples in the first N steps}, given N."""
    recipe: Recipe

    def completed(self, done: int) -> int:
        """Complete ones after `done` steps."""
        return self.consumed(done)[self.first.name] // max(self.first.num_items, 1)

    def end_at(self, done: int) -> bool:
        """Whether one ends after `done` steps."""
        return done > 0 and self.completed(done) > self.completed(done - 1)

    @cached_property
    def are_logged(self) -> bool:
        """Whether their ends are events of the run: of a reader without an end, or if asked."""
        source = self.first.source
        endless = isinstance(source, TableSource) and source.endless is not None
        asked = endless or self.recipe.evaluate.passes or self.recipe.save.passes
        return asked and bool(self.recipe.examples)

    def describe_end(self, done: int) -> str:
        """A line if one ends after `done` steps and that is an event; else empty."""
        if not (self.are_logged and self.end_at(done)):
            return ""
        number, examples = self.completed(done), self.first.num_items
        return f"pass {number} of {self.first.name} ended ({examples:,} examples)"
