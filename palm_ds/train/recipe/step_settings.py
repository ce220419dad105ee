"""Settings that a recipe gives the optimizer in single steps: those of a stage, and those of tasks
where a step trains one task group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from palm_ds.data.stream.stages import StepInfo, tasks_of
from palm_ds.data.tasks.task import Task
from palm_ds.runtime.optimizer.param_groups import AllBut, Selection
from palm_ds.runtime.optimizer.step_settings import TaskOptimizerSettings
from palm_ds.train.recipe.stage_settings import StageSettings


@dataclass(frozen=True)
class StepSettings:
    """The settings of each step."""

    stages: Sequence[StageSettings]
    tasks: Mapping[str, Task]

    def optimizer(self, at: StepInfo) -> TaskOptimizerSettings:
        """Those of the first task of a step that trains one task group; else none."""
        alone = self._alone(at)
        return alone[0].optimizer if alone else TaskOptimizerSettings()

    def frozen(self, at: StepInfo) -> tuple[Selection, ...]:
        """Parameters that the stage of a step freezes, and its tasks, if it trains one task
        group."""
        parts = (self.stages[at.stage], *self._alone(at))
        return tuple(dict.fromkeys(each for part in parts for each in _frozen_by(part)))

    @property
    def freezable(self) -> list[Selection]:
        """Parameters that some steps freeze."""
        parts = (*self.stages, *self.tasks.values())
        return [each for part in parts for each in _frozen_by(part)]

    def _alone(self, at: StepInfo) -> list[Task]:
        """The tasks of a step that trains one task group; else none."""
        names = tasks_of(at.task_groups[0]) if len(at.task_groups) == 1 else ()
        return [self.tasks[name] for name in names]


def _frozen_by(part: StageSettings | Task) -> tuple[Selection, ...]:
    """Parameters that a stage or a task does not update."""
    others = (AllBut(tuple(part.trains)),) if part.trains else ()
    return (*part.freeze, *others)
