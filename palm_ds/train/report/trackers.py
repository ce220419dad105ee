"""Sends a run's numbers to experiment trackers: Weights & Biases, MLflow, trackio.

    RunLog ──values, step──> BackgroundTracker: a queue and a thread ──> the tracker's own library

Training never waits for a tracker: a thread of rank 0 imports its library, connects and sends. What
cannot be sent is kept and tried again; metrics.jsonl has everything in any case. RUN/trackers.json
holds the ids and what was sent, so that a resumed run continues there without repeating itself.
"""

from __future__ import annotations

import json
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from palm_ds.common.config import read_json
from palm_ds.common.errors import first_line
from palm_ds.common.json_files import write_json
from palm_ds.common.messages import without_secrets
from palm_ds.train.report.tracker_clients import (
    MlflowTracker,
    TrackedRun,
    TrackerClient,
    TrackioTracker,
    TrackSettings,
    WandbTracker,
)

FILE = "trackers.json"
_RETRY_SECONDS = 60.0
_CLOSE_SECONDS = 15.0
_MAX_PENDING = 100_000


class BackgroundTracker:
    """A tracker in its own thread. `say` gets a line when it fails, and when it works again."""

    def __init__(
        self,
        title: str,
        connect: Callable[[], TrackerClient],
        say: Callable[[str], None],
        *,
        sent: Callable[[int], None] = lambda place: None,
        retry_seconds: float = _RETRY_SECONDS,
    ):
        """`sent(place)` is called once the numbers of that place were taken."""
        self._title, self._connect, self._say, self._sent = title, connect, say, sent
        self._retry_seconds = retry_seconds
        self._kept: deque[tuple[Mapping[str, float], int, int]] = deque(maxlen=_MAX_PENDING)
        self._tracker: TrackerClient | None = None
        self._failing = self._finished = False
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"tracker {title}", daemon=True)
        self._thread.start()

    def log(self, values: Mapping[str, float], step: int, place: int = 0) -> None:
        self._kept.append((values, step, place))
        self._wake.set()

    def close(self, *, finished: bool) -> None:
        """Send what is left, for a few seconds at most."""
        self._finished = finished
        self._closing.set()
        self._wake.set()
        self._thread.join(_CLOSE_SECONDS)
        if self._kept:
            self._say(f"{self._title}: records not sent: {len(self._kept)}; see metrics.jsonl")

    def _work(self) -> None:
        while True:
            closing = self._closing.is_set()  # before sending, so that nothing comes later
            self._wake.clear()
            try:
                self._send()
                if closing and self._tracker:
                    self._tracker.close(finished=self._finished)
            except (Exception, SystemExit) as error:
                self._failed(error)
            if closing:
                return
            if self._failing:
                self._closing.wait(self._retry_seconds)
            else:
                self._wake.wait()

    def _send(self) -> None:
        if self._tracker is None:
            self._tracker = self._connect()
        while self._kept:
            values, step, place = self._kept[0]
            self._tracker.log(values, step)
            self._kept.popleft()
            self._sent(place)
        if self._failing:
            self._failing = False
            self._say(f"{self._title}: works again; nothing is lost")

    def _failed(self, error: BaseException) -> None:
        if not self._failing:
            again = f"tried again every {self._retry_seconds:g} s"
            self._say(f"{self._title}: {_reason(error)}; training continues, {again}")
        self._failing = True


def _reason(error: BaseException) -> str:
    """The first line of an error, without credentials."""
    if isinstance(error, ImportError) and error.name:
        return f"needs {error.name}: pip install 'palm_ds[trackers]'"
    return without_secrets(first_line(error))[:200]


# ---- of a run ----


class RunTrackers:
    """All trackers of a run."""

    def __init__(
        self,
        settings: TrackSettings,
        folder: Path,
        config: Mapping[str, Any],
        say: Callable[[str], None],
    ):
        """`config`: the resolved recipe. A folder that has been tracked before continues the same
        runs."""
        self._file, self._lock = folder / FILE, threading.Lock()
        record = read_json(self._file) if self._file.is_file() else {}
        self._ids: dict[str, str] = dict(record.get("ids", {}))
        self._places: dict[str, int] = dict(record.get("sent", {}))
        clean = json.loads(without_secrets(json.dumps(config)))
        run = TrackedRun(folder=folder, config=clean, ids=self._ids)
        connects: dict[str, Callable[[], TrackerClient]] = {}
        if settings.wandb:
            connects["wandb"] = partial(WandbTracker, settings.wandb, run)
        if settings.mlflow:
            connects["mlflow"] = partial(MlflowTracker, settings.mlflow, run)
        if settings.trackio:
            connects["trackio"] = partial(TrackioTracker, settings.trackio, run)
        self._before = dict(self._places)
        self._trackers = {
            name: BackgroundTracker(f"track.{name}", connect, say, sent=partial(self._sent, name))
            for name, connect in connects.items()
        }

    def log(self, values: Mapping[str, object], step: int, *, evaluation: bool = False) -> None:
        """Numbers of a training step or an evaluation. Those that were sent before a restart, and
        are computed again, are left out."""
        place = 2 * step + evaluation  # an evaluation comes after its step
        numbers = {k: float(v) for k, v in values.items() if isinstance(v, (int, float))}
        numbers = {name: value for name, value in numbers.items() if math.isfinite(value)}
        for name, tracker in self._trackers.items():
            if numbers and place > self._before.get(name, -1):
                tracker.log(numbers, step, place)

    def _sent(self, name: str, place: int) -> None:
        with self._lock:
            self._places[name] = place
            ids = self._ids.copy()  # to which a tracker may be adding its own
            write_json(self._file, {"ids": ids, "sent": self._places})

    def close(self, *, finished: bool) -> None:
        """May be called twice."""
        while self._trackers:
            self._trackers.popitem()[1].close(finished=finished)
