"""Run of a trainer: its tasks, backbone and settings as a recipe and a run folder."""

from __future__ import annotations

import math
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from types import FunctionType
from typing import Any

from palm_ds.api.pretrained import Backbone
from palm_ds.api.train_settings import check_keywords, merged, read_settings
from palm_ds.common.errors import UserError
from palm_ds.common.plugins import classes_to_names, name_of
from palm_ds.data.tasks.task_with_data import TaskWithData
from palm_ds.runtime.processes.launch_env import is_single_process
from palm_ds.runtime.processes.processes import Processes, leave_at_exit, start
from palm_ds.train.recipe.custom_metrics import check_metric
from palm_ds.train.recipe.recipe import Recipe, make_recipe
from palm_ds.train.setup.resolve import resolve, size
from palm_ds.train.setup.run_folder import RunSpec
from palm_ds.train.setup.sources import Data, open_data


@dataclass(frozen=True, kw_only=True)
class TaskMixture:
    """The tasks of a run, and how its steps are divided among them."""

    groups: Sequence[Sequence[TaskWithData]]
    """The tasks, grouped by the text that they share."""
    reference: str = ""
    """The task whose epochs are counted; empty: the first."""
    mix: str = ""
    """With several groups: what a step trains, one task (`step`, `turns`) or all of them
    (`batch`)."""

    @property
    def tasks(self) -> list[TaskWithData]:
        return [task for task_group in self.groups for task in task_group]

    def stages(self, epochs: float) -> Any:
        """The `stages` of the recipe."""
        first = self.reference or self.tasks[0].name
        if not self.mix:
            return [{first: f"{epochs:g} epochs"}]
        names = [" + ".join(task.name for task in task_group) for task_group in self.groups]
        ratios = [task_group[0].mix_ratio for task_group in self.groups]
        sampler = {
            "mix_ratio": dict(zip(names, ratios, strict=True)),
            "reference": next(b for b in names if first in b.split(" + ")),
            "epochs": epochs,
        }
        return {"joint": names, "mix": self.mix, "sampler": sampler}


class RunDefinition:
    """Tasks on a backbone as a run. Nothing is opened before it is needed."""

    def __init__(
        self,
        name: str,
        backbone: Backbone | str | Path | None,
        values: Mapping[str, Any],
        metrics: Mapping[str, Any],
        mixture: TaskMixture,
    ):
        """`name`: the class that the user called, for messages. `values`: the fields of
        TrainSettings. `metrics`: {task: functions of the user's own}."""
        if isinstance(backbone, str | Path):
            backbone = Backbone.from_pretrained(backbone)
        self.backbone = backbone
        check_keywords(values, name)
        self.settings = read_settings(values, name)
        self.mixture = mixture
        self._name = name
        self._epochs: dict[str, Fraction | float] = {}
        self.metrics = {task: _functions(own) for task, own in metrics.items()}
        """{task: functions of the user's own}."""

    @property
    def tasks(self) -> dict[str, TaskWithData]:
        """By name."""
        return {task.name: task for task in self.mixture.tasks}

    @cached_property
    def folder(self) -> Path:
        """The run folder."""
        if self.settings.folder:
            return Path(self.settings.folder)
        if not is_single_process():
            raise UserError("folder: name one that all processes of the run can access")
        return self._temporary()

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe that `palm-ds finetune` would need for the same run."""
        names = [task.name for task in self.mixture.tasks]
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"two tasks are called {name!r}; give them names: name=...")
        if self.backbone is None:
            raise UserError("backbone: missing; give palm.Backbone.from_pretrained(FOLDER or NAME)")
        sources: dict[str, Any] = {}
        tasks: dict[str, Any] = {}
        for task_group in self.mixture.groups:
            first, *others = task_group
            for other in others:
                other.check_blended(first)
            sources[first.name] = first.source(self.folder / "rows")
            if self.backbone.tokenizer:
                sources[first.name]["tokenizer"] = self.backbone.tokenizer
            tasks |= {task.name: task.entry(first.name) for task in task_group}
        own = {
            name: [name_of(f) for f in functions]
            for name, functions in self.metrics.items()
            if functions
        }
        data = {
            "sources": sources,
            "tasks": tasks,
            "stages": self.mixture.stages(self.settings.epochs),
        }
        values = self.settings.values(self.backbone.max_length) | self.backbone.values() | data
        values["export_onnx"] = []  # takes longer than many a training; `recipe` may ask for it
        values = merged(values, {"evaluate": {"metrics": own}} if own else {})
        named = {name for task in self.tasks.values() for name in task.datasets}
        values = merged(values, {"datasets": sorted(named)} if named else {})
        return make_recipe(classes_to_names(merged(values, self.settings.recipe)), self._name)

    @cached_property
    def run(self) -> RunSpec:
        """The run with everything filled in that depends on the rows."""
        recipe = resolve(self.recipe, self.data)
        if not (recipe.evaluate.every or recipe.evaluate.passes):
            every = math.ceil(round(recipe.curriculum.steps / self.settings.epochs, 6))
            recipe = replace(recipe, evaluate=replace(recipe.evaluate, every=every))
        return RunSpec(
            recipe=recipe,
            ds_config=self.settings.ds_config(),
            folder=self.folder,
            resumed_by=f"call {self.call} again",
        )

    @property
    def call(self) -> str:
        """The call that trains, for messages."""
        where = f" with folder={str(self.folder)!r}" if self.settings.folder else ""
        return f"train(){where}"

    @cached_property
    def data(self) -> Data:
        """The opened rows."""
        recipe = self.recipe  # writes the rows
        rows = {
            file: rows_of_file
            for task in self.tasks.values()
            for file, rows_of_file in task.in_memory.items()
        }
        return open_data(recipe, rows)

    def invalidate(self) -> None:
        """Discard the recipe and everything derived from it, after a change to a task."""
        for name in ("recipe", "run", "data"):
            vars(self).pop(name, None)
        self._epochs.clear()

    @property
    def steps(self) -> int:
        """Steps of the whole training."""
        return self.run.recipe.curriculum.steps

    def examples_of(self, task: str) -> int:
        """Training rows of a task; of a reader without an end those of a pass."""
        source = self.run.recipe.built_tasks[task].source
        parts = [rows for _, rows, _ in self.data.train[source]]
        return sum(x.endless.pass_examples if x.endless else len(x) for x in parts)

    def epoch_of(self, task: str) -> Fraction | float:
        """Steps of an epoch of a task: of all windows of its rows, or of a pass of a reader."""
        if task not in self._epochs:
            recipe = self.run.recipe
            groups = recipe.curriculum.task_groups
            task_group = next((b for b in groups if task in b.split(" + ")), task)
            tokens = size(recipe, self.data, [task_group])[task_group].tokens
            # with a batch in examples, sizes are counted in steps
            self._epochs[task] = tokens / (recipe.stage_plan.usual_size.tokens or 1)
        return self._epochs[task]

    @cached_property
    def processes(self) -> Processes:
        """The processes of the run."""
        leave_at_exit()
        return start(self.run.ds_config)

    @property
    def first_process(self) -> bool:
        """Whether this process is the one that writes files."""
        return self.processes.rank == 0

    def _temporary(self) -> Path:
        """A folder that is removed with this object."""
        folder = tempfile.mkdtemp(prefix="palm_ds_")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return Path(folder)


def _functions(metrics: object) -> tuple[FunctionType, ...]:
    """A metric or several. Raises UserError for what is no function."""
    functions = []
    for each in metrics if isinstance(metrics, Sequence) else (metrics,):
        if not isinstance(each, FunctionType):
            raise UserError(f"metrics: expected functions (predictions, labels), got {each!r:.60}")
        check_metric(each)
        functions.append(each)
    return tuple(functions)
