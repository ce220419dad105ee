"""Tracks the best evaluations and decides on early stopping."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from palm_ds.common.errors import UserError, suggest
from palm_ds.data.tasks.task import CorpusTask, Task
from palm_ds.tasks.metrics.units import less_is_better
from palm_ds.train.evaluate.evaluate import TaskScore
from palm_ds.train.recipe.sections import EvaluateSettings, SaveSettings


@dataclass
class BestTracker:
    """The best evaluation so far: `value` (higher is better; what should be low is negated) at
    `step`."""

    settings: EvaluateSettings
    tasks: Mapping[str, Task]
    value: float = -math.inf
    step: int = -1
    evals_since_best: int = 0
    values: dict[int, float] = field(default_factory=dict)
    """{step: its value} of the evaluations with a checkpoint; without `evaluate.best`, the mean
    held-out loss of the non-auxiliary tasks, negated."""

    def __post_init__(self) -> None:
        name = self.settings.best.partition(".")[0]
        if self.settings.best and name != "mean" and name not in self.tasks:
            raise UserError(
                f"evaluate.best: {self.settings.best!r} is neither `mean` nor `task.metric` of a "
                f"task{suggest(name, self.tasks)}"
            )

    def check(self, scored: Collection[str]) -> None:
        """Raises UserError if `evaluate.best` needs tasks that are not evaluated, or a metric that
        a task over a corpus does not have. `scored`: the tasks that have rows to evaluate on."""
        name, _, metric = self.settings.best.partition(".")
        if name == "mean" and not any(not self.tasks[task].auxiliary for task in scored):
            raise UserError(
                "evaluate.best: no non-auxiliary task has rows to evaluate on; give a source "
                "`validation`, or set held_out"
            )
        if name and name != "mean" and name not in scored:
            raise UserError(
                f"evaluate.best: no rows to evaluate {name!r} on; give its source `validation`, or "
                "set held_out"
            )
        if metric and self.known_metrics:
            self._check_known(metric, self.known_metrics)

    @property
    def known_metrics(self) -> tuple[str, ...]:
        """Of the task that `evaluate.best` names, if they are known before it is evaluated: it
        reads a corpus, and its head counts nothing of its own."""
        task = self.tasks.get(self.settings.best.partition(".")[0])
        bare = isinstance(task, CorpusTask) and type(task).tallied is Task.tallied
        return ("accuracy", "loss") if bare else ()

    @property
    def compared(self) -> list[str]:
        """The tasks whose scores are compared. What scores they have is known once they are
        evaluated."""
        name = self.settings.best.partition(".")[0]
        return self._main_tasks if name == "mean" else [name] * bool(name)

    @property
    def _main_tasks(self) -> list[str]:
        """All but auxiliary ones."""
        return [name for name, task in self.tasks.items() if not task.auxiliary]

    def check_scores(self, scores: Mapping[str, TaskScore]) -> None:
        """Raises UserError if these scores, of `compared` tasks, have nothing to compare."""
        if "." in self.settings.best:
            for score in scores.values():
                self.metric(score)
        elif scores:
            self._with_value([*scores.values()])

    def __str__(self) -> str:
        metric = self.settings.best.partition(".")[2]
        return f"{self.settings.best} {_signed(metric, self.value):.4f}"

    @property
    def enabled(self) -> bool:
        return bool(self.settings.best)

    @property
    def should_stop(self) -> bool:
        """Whether `patience` evaluations have passed without improvement."""
        return bool(self.settings.patience) and self.evals_since_best >= self.settings.patience

    @property
    def why_it_stops(self) -> str:
        since = f"since step {self.step}" if self.step >= 0 else "at all"
        return f"no improvement {since}; done"

    def update(
        self,
        step: int,
        scores: Mapping[str, TaskScore],
        *,
        saved: bool = False,
        started: Collection[str] | None = None,
    ) -> bool:
        """Record an evaluation, of a checkpoint if it is `saved`; returns whether it is the best so
        far by `evaluate.best`. A tie is not better. `started`: the tasks that were trained before
        (default: all); while a compared one waits for its stage, patience does not run out."""
        value = self._value(scores)
        if saved and math.isfinite(value):
            self.values[step] = value
        if not self.enabled:
            return False
        if math.isfinite(value) and value > self.value:
            self.value, self.step, self.evals_since_best = value, step, 0
            return True
        compared = scores.keys() & {*self.compared}
        self.evals_since_best += started is None or compared <= {*started}
        return False

    def _value(self, scores: Mapping[str, TaskScore]) -> float:
        if self.settings.best in ("", "mean"):
            targets = [s for t, s in scores.items() if t in self._main_tasks]  # no generator
            if self.enabled and targets:
                targets = self._with_value(targets)
            values = [_primary(s) if self.enabled else -s.loss for s in targets]
            return sum(values) / len(values) if values else math.nan
        self.check(scores)
        name, _, metric = self.settings.best.partition(".")
        return self.metric(scores[name]) if metric else _primary(*self._with_value([scores[name]]))

    def _with_value(self, scores: Sequence[TaskScore]) -> list[TaskScore]:
        """Those that have more than a loss, at least one. Raises UserError."""
        found = [score for score in scores if score.metrics or not math.isnan(score.accuracy)]
        if not found:
            raise UserError(
                f"evaluate.best: {self.settings.best}: there is no score but the loss; name it, as "
                "in TASK.loss"
            )
        return found

    def metric(self, score: TaskScore) -> float:
        """The value of the named metric, negated if less is better. Raises UserError if the task
        has no such metric."""
        metric = self.settings.best.partition(".")[2]
        known = {**score.metrics, "accuracy": score.accuracy, "loss": score.loss}
        self._check_known(metric, known)
        return _signed(metric, known[metric])

    def _check_known(self, metric: str, known: Collection[str]) -> None:
        if metric not in known:
            name = self.settings.best.partition(".")[0]
            raise UserError(f"evaluate.best: {name} has no {metric!r}{suggest(metric, known)}")

    @property
    def _measured(self) -> dict[str, Any]:
        """The settings on which the compared values depend."""
        settings = self.settings
        own = {task: names for task, names in settings.metrics.items() if task in self.compared}
        return {"examples": settings.examples, "mask_rate": settings.mask_rate, "metrics": own}

    def record(self) -> dict[str, Any]:
        """For a checkpoint."""
        value = self.value if math.isfinite(self.value) else None
        state = {"best": self.settings.best, "value": value, "step": self.step}
        state |= {"since": self.evals_since_best, "measured": self._measured}
        return state | {"values": {str(step): each for step, each in self.values.items()}}

    def restore(self, record: Mapping[str, Any]) -> str:
        """Restore the state from a checkpoint's `record()`. Values that were measured otherwise
        cannot be compared: they are forgotten; returns a line that says so."""
        if not record:
            return ""
        now = {"best": self.settings.best, **self._measured}
        # the first ones of 0.1.0 lack some
        before = {**now, "best": record.get("best", now["best"]), **record.get("measured", {})}
        if changed := [name for name in now if before[name] != now[name]]:
            each = (
                f"evaluate.{name} was {_shown(before[name])} and is {_shown(now[name])} now"
                for name in changed
            )
            return (
                f"{'; '.join(each)}: the best evaluation, `patience` and `save.best` start again, "
                "without the evaluations so far"
            )
        value = record["value"]
        self.value = -math.inf if value is None else value
        self.step, self.evals_since_best = record["step"], record["since"]
        self.values = {int(step): each for step, each in record.get("values", {}).items()}
        return ""


def _shown(value: object) -> str:
    return "none" if value in ("", None, {}) else repr(value)


def _primary(score: TaskScore) -> float:
    """The first metric, else the accuracy, negated if less is better."""
    return _signed(next(iter(score.metrics), "accuracy"), score.value)


def _signed(metric: str, value: float) -> float:
    return -value if less_is_better(metric) else value


def check_held_out(save: SaveSettings, scored: Collection[str]) -> None:
    """Raises UserError if `save.best` has nothing to compare checkpoints by. `scored`: the tasks
    that have rows to evaluate on."""
    if save.best and not scored:
        raise UserError(
            "save.best: there are no rows to evaluate on; give a source `validation`, or set "
            "held_out"
        )
