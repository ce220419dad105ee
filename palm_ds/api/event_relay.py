"""Turns the events of the training loop into those of palm.event."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from palm_ds.api import events as event
from palm_ds.train.evaluate.evaluate import TaskScore
from palm_ds.train.loop.loop import Loop
from palm_ds.train.report.metrics_file import FILE, read_metrics


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
    evaluations = read_metrics(file).evaluations if file.is_file() else []
    scores = evaluations[-1]["scores"] if evaluations else {}
    return {
        name: {**(score.get("metrics") or {}), "loss": score["loss"]}
        | ({} if score.get("metrics") else {"accuracy": score["accuracy"]})
        for name, score in scores.items()
    }


class EventDispatcher:
    """The event handler of a loop; passes events on to the user's `handler`.

    Losses are summed over all processes, so reading them is collective. They are read after every
    step if there is a handler, or with `read_losses`."""

    def __init__(
        self,
        loop: Loop,
        reference: str,
        handler: event.EventHandler | None,
        *,
        read_losses: bool,
        stops: Callable[[], bool],
    ):
        """`reference`: the task whose epochs are passes. `stops`: whether the handler has asked to
        end the training."""
        self.loop, self.handler, self._stops = loop, handler, stops
        self.read_losses = read_losses or handler is not None
        self.losses: dict[str, float] = {}
        """Of the last step."""
        self.done = 0
        """Completed steps of the run."""
        self._pass: int | None = None
        dataset = next(
            dataset
            for dataset in loop.stream.datasets
            if reference in [task.name for task in dataset.tasks]
        )
        self._dataset, self._items = dataset.name, dataset.num_items

    def __call__(self, name: str, facts: Mapping[str, Any]) -> None:
        if name == "begin":
            self.done = facts["step"]
            self._emit(event.BeginTraining(step=self.done))
        elif name == "next":
            self._begin_step(facts["step"])
        elif name == "step":
            self._end_step(facts)
            self._end_if_asked()
        elif name == "evaluation":
            self._emit(event.Evaluation(step=facts["step"], metrics=as_metrics(facts["scores"])))
            self._end_if_asked()
        elif name == "save":
            self._emit(event.Saved(step=facts["step"]))

    def _end_if_asked(self) -> None:
        """Collective with a handler: the processes end together, if any of them asks."""
        if self.handler:
            asked = self.loop.engine.reduce({"stops": float(self._stops())})["stops"]
            self.loop.end_requested = asked > 0

    def end(self) -> None:
        """Emit the final events, after the last step."""
        scores = as_metrics(self.loop.scores)
        if self._pass is not None:
            self._emit(event.EndPass(pass_id=self._pass, metrics=scores))
        self._emit(event.EndTraining(step=self.done, metrics=scores))

    def _begin_step(self, step: int) -> None:
        now = self.pass_at(step) if self.handler else None
        if now is not None and now != self._pass:
            if self._pass is not None:
                self._emit(event.EndPass(pass_id=self._pass, metrics=as_metrics(self.loop.scores)))
            self._emit(event.BeginPass(pass_id=now))
            self._pass = now
        self._emit(event.BeginIteration(pass_id=now or 0, batch_id=step))

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
        tasks = self.loop.recipe.built_tasks
        self._emit(
            event.EndIteration(
                pass_id=self._pass or 0,
                batch_id=self.done - 1,
                cost=sum(tasks[task].weight * loss for task, loss in self.losses.items()),
                lr=facts["lr"],
                metrics={t: {"loss": self.losses[t], "accuracy": accuracy[t]} for t in counts},
            )
        )

    def pass_at(self, step: int) -> int:
        """Complete passes over the reference task before a step."""
        return self.loop.stream.consumed(step)[self._dataset] // max(self._items, 1)

    def _emit(self, what: event.Event) -> None:
        if self.handler:
            self.handler(what)
