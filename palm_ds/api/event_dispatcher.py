"""Events of a loop passed on to event handlers and to callbacks (palm_ds/api/callbacks.py)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from palm_ds.api import events
from palm_ds.common.errors import UserError, suggest
from palm_ds.train.evaluate.evaluate import TaskScore
from palm_ds.train.loop.loop import Loop
from palm_ds.train.report.metrics_file import FILE, read_metrics

_HOOK_OF: dict[type[events.Event], str] = {
    events.BeginTraining: "on_train_begin",
    events.BeginPass: "on_epoch_begin",
    events.BeginIteration: "on_step_begin",
    events.EndIteration: "on_step_end",
    events.Evaluation: "on_evaluate",
    events.Saved: "on_save",
    events.EndPass: "on_epoch_end",
    events.EndTraining: "on_train_end",
}
HOOKS = (*_HOOK_OF.values(), "on_log")
"""The names of the methods of palm.Callback."""


def check_callbacks(callbacks: Sequence[object]) -> tuple[object, ...]:
    """The callbacks. Raises UserError for an object that is none."""
    if not isinstance(callbacks, Sequence):
        raise UserError(f"callbacks: expected a list of objects, got {callbacks!r:.60}")
    for number, callback in enumerate(callbacks):
        where = f"callbacks[{number}]"
        if any(kind.__module__.startswith("transformers.") for kind in type(callback).__mro__):
            raise UserError(
                f"{where}: {type(callback).__name__} is a callback of transformers; derive it from "
                "palm.Callback, whose methods get (trainer, event)"
            )
        named = (
            [x for x in dir(callback) if x.startswith("on_")]
            if not isinstance(callback, type)
            else []
        )
        for name in named:
            if name not in HOOKS:
                raise UserError(f"{where}: no event {name!r}{suggest(name, HOOKS)}")
            if not _takes_two(getattr(callback, name)):
                raise UserError(f"{where}: {name}: expected a method of (trainer, event)")
        if not named:
            raise UserError(f"{where}: expected an object with methods such as on_step_end")
    return tuple(callbacks)


def _takes_two(method: object) -> bool:
    try:
        inspect.signature(method).bind(None, None) if callable(method) else None
    except TypeError:
        return False
    except ValueError:  # a function of C, which has no signature
        return True
    return callable(method)


def caller(callbacks: Sequence[object], trainer: object, log_every: int) -> events.EventHandler:
    """An event handler that calls the methods of callbacks, in their order."""

    def handle(event: events.Event) -> None:
        names = [_HOOK_OF[type(event)]]
        if isinstance(event, events.EndIteration) and (event.batch_id + 1) % log_every == 0:
            names.append("on_log")
        for name in names:
            for callback in callbacks:
                if method := getattr(callback, name, None):
                    method(trainer, event)

    return handle


def as_metrics(scores: Mapping[str, TaskScore]) -> dict[str, dict[str, float]]:
    """{task: {metric: value}}, the primary metric first."""
    return {
        name: {**score.metrics, "loss": score.loss}
        | ({} if score.metrics else {"accuracy": score.accuracy})
        for name, score in scores.items()
    }


def stored_metrics(folder: Path) -> dict[str, dict[str, float]]:
    """`as_metrics` of the last evaluation in a run folder; empty if there was none."""
    file = folder / FILE
    evaluations = read_metrics(file, steps=False).evaluations if file.is_file() else []
    scores = evaluations[-1]["scores"] if evaluations else {}
    found = {
        name: {**(score.get("metrics") or {}), "loss": score["loss"]}
        | ({} if score.get("metrics") else {"accuracy": score["accuracy"]})
        for name, score in scores.items()
    }
    return {  # JSON has null for what is no number
        name: {metric: math.nan if value is None else value for metric, value in own.items()}
        for name, own in found.items()
    }


class EventDispatcher:
    """The event handler of a loop; passes events on to the user's `handlers`.

    Losses are summed over all processes, so reading them is collective. They are read after every
    step if there are handlers, or with `read_losses`."""

    def __init__(
        self,
        loop: Loop,
        reference: str,
        handlers: Sequence[events.EventHandler],
        *,
        read_losses: bool,
        stops: Callable[[], bool],
    ):
        """`reference`: the task whose epochs are passes; without steps of it, the first that has
        some. `stops`: whether a handler has asked to end the training."""
        self.loop, self.handlers, self._stops = loop, handlers, stops
        self.read_losses = read_losses or bool(handlers)
        self.losses: dict[str, float] = {}
        """Of the last step."""
        self.done = 0
        """Completed steps of the run."""
        self._pass: int | None = None
        datasets = loop.stream.datasets
        named = (x for x in datasets if reference in [task.name for task in x.tasks])
        dataset = next(named, datasets[0])
        self._dataset, self._items = dataset.name, dataset.num_items

    def __call__(self, name: str, facts: Mapping[str, Any]) -> None:
        if name == "begin":
            self.done = facts["step"]
            self._emit(events.BeginTraining(step=self.done))
        elif name == "next":
            self._begin_step(facts["step"])
        elif name == "step":
            self._end_step(facts)
            self._end_if_asked()
        elif name == "evaluation":
            self._emit(events.Evaluation(step=facts["step"], metrics=as_metrics(facts["scores"])))
            self._end_if_asked()
        elif name == "save":
            self._emit(events.Saved(step=facts["step"]))

    def _end_if_asked(self) -> None:
        """Collective with handlers: the processes end together, if any of them asks."""
        if self.handlers:
            asked = self.loop.engine.reduce({"stops": float(self._stops())})["stops"]
            self.loop.end_requested = asked > 0

    def end(self) -> None:
        """Emit the final events, after the last step."""
        scores = as_metrics(self.loop.scores)
        if self._pass is not None:
            self._emit(events.EndPass(pass_id=self._pass, metrics=scores))
        self._emit(events.EndTraining(step=self.done, metrics=scores))

    def _begin_step(self, step: int) -> None:
        now = self.pass_at(step) if self.handlers else None
        if now is not None and now != self._pass:
            if self._pass is not None:
                self._emit(events.EndPass(pass_id=self._pass, metrics=as_metrics(self.loop.scores)))
            self._emit(events.BeginPass(pass_id=now))
            self._pass = now
        self._emit(events.BeginIteration(pass_id=now or 0, batch_id=step))

    def _end_step(self, facts: Mapping[str, Any]) -> None:
        self.done = facts["step"]
        if not self.read_losses:
            return
        result = facts["result"]
        counts = {task: count for task, count in result.counts.items() if count}
        sums = self.loop.engine.reduce(
            {f"loss {task}": result.loss_sums[task] for task in counts}
            | {f"right {task}": result.correct[task] for task in counts}
        )
        self.losses = {task: sums[f"loss {task}"] / count for task, count in counts.items()}
        accuracy = {task: sums[f"right {task}"] / count for task, count in counts.items()}
        weights = self.loop.task_weights
        self._emit(
            events.EndIteration(
                pass_id=self._pass or 0,
                batch_id=self.done - 1,
                cost=sum(weights[task] * loss for task, loss in self.losses.items()),
                lr=facts["lr"],
                metrics={t: {"loss": self.losses[t], "accuracy": accuracy[t]} for t in counts},
            )
        )

    def pass_at(self, step: int) -> int:
        """Complete passes over the reference task before a step."""
        return self.loop.stream.consumed(step)[self._dataset] // max(self._items, 1)

    def _emit(self, what: events.Event) -> None:
        for handler in self.handlers:
            handler(what)
