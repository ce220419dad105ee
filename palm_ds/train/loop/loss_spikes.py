"""Detects steps whose loss is far above those before.

The robust z-score of a loss is its distance from the median of the task's last losses, in units of
their spread (1.4826 times the median absolute deviation, the standard deviation of normal numbers):
the median and the spread of a window are not moved by a few outliers. Each stage begins with empty
windows, since losses jump when tasks join, except those of a task whose spike lasts. Losses of a
spike do not enter the window, so one that lasts remains one; it is over once a loss is near the
median again.

    detector.judge(step, stage, {"knowledge_masking": 1.8e12})     -> a LossSpike, or None

The losses are those of whole steps over all processes, so every rank comes to the same judgment.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from palm_ds.train.recipe.sections import SpikeSettings

_SPREAD = 1.4826
_FULL_WINDOW = 20
"""Losses whose spread is known well. A shorter window has to do when it is full."""
_SMALL_WINDOW = 9
"""Losses whose spread is not known."""
_END_FACTOR = 0.25
"""Part of `zscore` that a loss must fall to for its spike to be over: broken weights may reach a
loss somewhat below the threshold."""
_MIN_SPREAD = 0.05
"""Smallest spread: losses near 0 have next to none."""


@dataclass(frozen=True, kw_only=True)
class LossSpike:
    """A loss far above its median."""

    task: str
    step: int
    """Counted from 0."""
    loss: float
    median: float
    zscore: float
    began: int
    """The first step of the spike."""

    @property
    def length(self) -> int:
        """Steps that it has lasted."""
        return self.step - self.began + 1

    def __str__(self) -> str:
        return f"the loss of {self.task} is {self.loss:.4g}, its median {self.median:.4g}"


class SpikeDetector:
    """The last losses of every task in the current stage."""

    def __init__(self, settings: SpikeSettings):
        self._settings = settings
        self._stage = -1
        self._windows: dict[str, list[float]] = {}
        self._spikes: dict[str, LossSpike] = {}

    @property
    def watches(self) -> bool:
        """Whether any loss can be a spike."""
        return self._settings.zscore > 0

    @property
    def ongoing(self) -> LossSpike | None:
        """The worst spike that has not ended, as last seen."""
        return max(self._spikes.values(), key=lambda spike: spike.zscore, default=None)

    @property
    def began(self) -> int | None:
        """The first step of the oldest spike that has not ended."""
        return min((spike.began for spike in self._spikes.values()), default=None)

    def judge(self, step: int, stage: int, losses: Mapping[str, float]) -> LossSpike | None:
        """The worst spike of a step; its other losses enter the windows."""
        if stage != self._stage:
            self._stage = stage
            self._windows = {task: self._windows[task] for task in self._spikes}
        spikes = [spike for task in losses if (spike := self._judge(step, task, losses[task]))]
        return max(spikes, key=lambda spike: spike.zscore, default=None)

    def compare(
        self,
        step: int,
        stage: int,
        before: Mapping[str, float],
        now: Mapping[str, float],
        *,
        over: bool = False,
    ) -> LossSpike | None:
        """The worst spike among the losses that a training step of this stage would have `now`. It
        has had those of `before`. The windows stay as they are; a task without one has no spike.
        `over`: whether losses count that are too high for a spike to be over: that of their task,
        or one that the last update began."""
        spikes = []
        for task in before.keys() & now.keys():
            window = self._windows.get(task)
            if not window or now[task] <= before[task]:
                continue
            if stage != self._stage:  # other examples, of another loss
                window = [max(before[task], statistics.median(window))] * _SMALL_WINDOW
            median, zscore = self._zscore(now[task], window)
            high = stage == self._stage and now[task] - median > self._settings.zscore * _MIN_SPREAD
            if zscore > self._threshold(ongoing=over and (high or task in self._spikes)) > 0:
                loss = now[task]
                spikes.append(
                    LossSpike(
                        task=task, step=step, loss=loss, median=median, zscore=zscore, began=step
                    )
                )
        return max(spikes, key=lambda spike: (spike.zscore, spike.task), default=None)

    def _judge(self, step: int, task: str, loss: float) -> LossSpike | None:
        window = self._windows.setdefault(task, [])
        if not math.isfinite(loss):
            return None
        if window and self.watches:
            median, zscore = self._zscore(loss, window)
            ongoing = self._spikes.get(task)
            if zscore > self._threshold(ongoing=ongoing is not None):
                began = ongoing.began if ongoing else step
                self._spikes[task] = LossSpike(
                    task=task, step=step, loss=loss, median=median, zscore=zscore, began=began
                )
                return self._spikes[task]
        self._spikes.pop(task, None)
        window.append(loss)
        del window[: -self._settings.window]
        return None

    def _threshold(self, *, ongoing: bool) -> float:
        """The score above which a loss is a spike, or belongs to an `ongoing` one."""
        return self._settings.zscore * (_END_FACTOR if ongoing else 1)

    def _zscore(self, loss: float, window: list[float]) -> tuple[float, float]:
        """The median of the window, and the robust z-score of a loss."""
        median = statistics.median(window)
        enough = min(_FULL_WINDOW, max(self._settings.window, _SMALL_WINDOW + 1))
        return median, (loss - median) / _spread(window, median, enough)

    def state_dict(self) -> dict[str, Any]:
        spikes = [asdict(spike) for spike in self._spikes.values()]
        return {"stage": self._stage, "windows": self._windows, "spikes": spikes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._stage = state["stage"]
        self._windows = {task: list(window) for task, window in state["windows"].items()}
        self._spikes = {spike["task"]: LossSpike(**spike) for spike in state["spikes"]}


def _spread(window: list[float], median: float, enough: int) -> float:
    """The robust standard deviation of the losses. Fewer than `enough` say little: at least a tenth
    of their median then, and of the first ones a good deal more."""
    deviation = _SPREAD * statistics.median(abs(loss - median) for loss in window)
    if len(window) >= enough:
        return max(deviation, 0.02 * abs(median), _MIN_SPREAD)
    return max(deviation, 0.1 * abs(median), max(abs(median), 1.0) / len(window))
