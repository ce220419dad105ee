"""From what the loop tells to the events that a person is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from palm_ds.api import events as event
from palm_ds.train.evaluate import TaskScore
from palm_ds.train.loop import Loop


def as_metrics(scores: Mapping[str, TaskScore]) -> dict[str, dict[str, float]]:
    """{task: {metric: value}}, the one that counts first."""
    return {
        name: {**score.metrics, "loss": score.loss}
        | ({} if score.metrics else {"accuracy": score.accuracy})
        for name, score in scores.items()
    }


class EventDispatcher:
    """Hears the loop. Losses are read after every step where somebody wants them: by all processes,
    since they are added up."""

    def __init__(
        self, loop: Loop, reference: str, handler: Callable[[Any], None] | None, *, read: bool
    ):
        """`reference`: the task whose epochs are passes; `read`: losses, whoever listens."""
        self.loop, self.handler = loop, handler
        self.read = read or handler is not None
        self.losses: dict[str, float] = {}
        """Of the last step."""
        self.done = 0
        """Steps of the run that are done."""
        self._pass: int | None = None
        number, feed = next(
            (number, feed)
            for number, feed in enumerate(loop.stream.feeds)
            if reference in [task.name for task in feed.tasks]
        )
        self._feed, self._items = feed.name, len(feed.items)

    def __call__(self, name: str, facts: Mapping[str, Any]) -> None:
        if name == "begin":
            self.done = facts["step"]
            self._tell(event.BeginTraining(step=self.done))
        elif name == "next":
            self._begin_step(facts["step"])
        elif name == "step":
            self._end_step(facts)
        elif name == "evaluation":
            self._tell(event.Evaluation(step=facts["step"], metrics=as_metrics(facts["scores"])))

    def end(self) -> None:
        """After the last step."""
        scores = as_metrics(self.loop.scores)
        if self._pass is not None:
            self._tell(event.EndPass(pass_id=self._pass, metrics=scores))
        self._tell(event.EndTraining(step=self.done, metrics=scores))

    def _begin_step(self, step: int) -> None:
        now = self.pass_at(step) if self.handler else None
        if now is not None and now != self._pass:
            if self._pass is not None:
                self._tell(event.EndPass(pass_id=self._pass, metrics=as_metrics(self.loop.scores)))
            self._tell(event.BeginPass(pass_id=now))
            self._pass = now
        self._tell(event.BeginIteration(pass_id=now or 0, batch_id=step))

    def _end_step(self, facts: Mapping[str, Any]) -> None:
        self.done = facts["step"]
        if not self.read:
            return
        result = facts["result"]
        seen = [task for task, count in result.counts.items() if count]
        sums = self.loop.engine.reduce(
            {f"loss {task}": result.loss_sums[task] for task in seen}
            | {f"right {task}": result.correct[task] for task in seen}
        )
        counts = result.counts
        self.losses = {task: sums[f"loss {task}"] / counts[task] for task in seen}
        right = {task: sums[f"right {task}"] / counts[task] for task in seen}
        tasks = self.loop.recipe.built_tasks
        self._tell(
            event.EndIteration(
                pass_id=self._pass or 0,
                batch_id=self.done - 1,
                cost=sum(tasks[task].weight * loss for task, loss in self.losses.items()),
                lr=facts["lr"],
                metrics={t: {"loss": self.losses[t], "accuracy": right[t]} for t in seen},
            )
        )

    def pass_at(self, step: int) -> int:
        """How often the reference was read whole before a step."""
        return self.loop.stream.consumed(step)[self._feed] // max(self._items, 1)

    def _tell(self, what: Any) -> None:
        if self.handler:
            self.handler(what)
