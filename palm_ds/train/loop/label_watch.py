"""Notices tasks that get no label in the steps that should train them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from palm_ds.data.stream.stages import Curriculum, StepInfo, tasks_of

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

    def add(self, at: StepInfo, counts: Mapping[str, int]) -> list[str]:
        """Count a step with its labels. Returns the tasks to report: each once, after its first
        steps or at the end of the run."""
        self._settled |= {task for task, count in counts.items() if count}
        for task, share in self._shares(at):
            self.steps[task] = self.steps.get(task, 0) + 1
            self._whole[task] = self._whole.get(task, 0.0) + share
        last = at.step + 1 == self.curriculum.steps
        waiting = [task for task in self.steps if task not in self._settled]
        found = [task for task in waiting if last or self._whole[task] > FIRST_STEPS - 0.5]
        self._settled |= set(found)
        return found

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
