"""Sends a run's numbers to experiment trackers: Weights & Biases, MLflow, trackio.

    RunLog ──values, step──> BackgroundTracker: a queue and a thread ──> the tracker's own library

Training never waits for a tracker: a thread of rank 0 imports its library, connects and sends. What
cannot be sent is kept and tried again; metrics.jsonl has everything in any case. RUN/trackers.json
holds the ids and what was sent, so that a resumed run continues there without repeating itself.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from palm_ds.common.config import read_json
from palm_ds.common.errors import UserError, first_line
from palm_ds.common.json_files import write_json
from palm_ds.common.messages import without_secrets


@dataclass(frozen=True, kw_only=True)
class WandbSettings:
    """Weights & Biases. Credentials and mode are wandb's own: `wandb login`, WANDB_MODE=offline."""

    project: str
    """The project."""
    entity: str = ""
    """User or team; empty: wandb's default."""
    group: str = ""
    """A group of runs."""
    name: str = ""
    """The run's name; empty: that of the run folder."""


@dataclass(frozen=True, kw_only=True)
class MlflowSettings:
    """MLflow."""

    experiment: str
    """The experiment; created if there is none."""
    uri: str = ""
    """Its tracking server or database, such as `sqlite:///runs/mlflow.db`; empty: that of
    MLFLOW_TRACKING_URI, else MLflow's default."""
    name: str = ""
    """The run's name; empty: that of the run folder."""


@dataclass(frozen=True, kw_only=True)
class TrackioSettings:
    """trackio, which keeps its data on this machine (TRACKIO_DIR)."""

    project: str
    """The project."""
    name: str = ""
    """The run's name; empty: that of the run folder and its id."""


@dataclass(frozen=True, kw_only=True)
class TrackSettings:
    """The trackers that a run reports to, besides metrics.jsonl and TensorBoard."""

    wandb: WandbSettings | None = None
    """Weights & Biases: `{project: NAME}`."""
    mlflow: MlflowSettings | None = None
    """MLflow: `{experiment: NAME}`."""
    trackio: TrackioSettings | None = None
    """trackio: `{project: NAME}`."""


class TrackerClient(Protocol):
    """Client that takes a run's numbers."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take numbers measured after `step` steps."""
        ...

    def close(self, *, finished: bool) -> None:
        """`finished`: the run has trained to its end."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """Description of a run for a tracker that opens."""

    folder: Path
    config: Mapping[str, Any]
    """The resolved recipe, without credentials."""
    ids: dict[str, str]
    """{tracker: the id of this run there}; those that are missing are added."""

    def id_of(self, tracker: str) -> str:
        return self.ids.setdefault(tracker, uuid.uuid4().hex[:12])


class WandbTracker:
    """A run of Weights & Biases."""

    def __init__(self, settings: WandbSettings, run: TrackedRun):
        import wandb

        wandb.setup(settings=wandb.Settings(silent=True))
        online = os.environ.get("WANDB_MODE", "online") == "online"
        if online and not wandb.login(prompt=False):
            raise UserError("no API key; call `wandb login`, or set WANDB_MODE=offline")
        self._run: Any = wandb.init(
            project=settings.project,
            entity=settings.entity or None,
            group=settings.group or None,
            name=settings.name or run.folder.name,
            id=run.id_of("wandb"),
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def close(self, *, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


class MlflowTracker:
    """A run of MLflow."""

    def __init__(self, settings: MlflowSettings, run: TrackedRun):
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "mlflow.store.db.utils", "alembic"):
            logging.getLogger(name).setLevel(logging.ERROR)
        self._metric, self._client = Metric, MlflowClient(tracking_uri=settings.uri or None)
        if "mlflow" in run.ids:
            self._id = run.ids["mlflow"]
            self._client.update_run(self._id, status="RUNNING")
            return
        name = settings.name or run.folder.name
        created = self._client.create_run(self._experiment(settings.experiment), run_name=name)
        self._id = run.ids["mlflow"] = created.info.run_id
        flat = _flat(run.config)
        params = [Param(_mlflow_name(key), str(value)[:6000]) for key, value in flat.items()]
        for first in range(0, len(params), 100):
            self._client.log_batch(self._id, params=params[first : first + 100])

    def _experiment(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        return experiment.experiment_id if experiment else self._client.create_experiment(name)

    def log(self, values: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        named = {_mlflow_name(name): value for name, value in values.items()}
        metrics = [self._metric(name, value, now, step) for name, value in named.items()]
        for first in range(0, len(metrics), 1000):
            self._client.log_batch(self._id, metrics=metrics[first : first + 1000])

    def close(self, *, finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")


class TrackioTracker:
    """A run of trackio."""

    def __init__(self, settings: TrackioSettings, run: TrackedRun):
        import trackio
        import trackio.utils

        for name, module in sys.modules.copy().items():  # a copy: the other trackers import, too
            if name.split(".")[0] == "trackio":
                vars(module)["print"] = _say_nothing  # it has no quiet mode
        own = f"{run.folder.name}-{run.id_of('trackio')[:6]}"
        self._run: Any = trackio.init(
            project=settings.project,
            name=settings.name or own,
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self, *, finished: bool) -> None:
        self._run.finish()


def _say_nothing(*_values: object, **_how: object) -> None:
    pass


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{dotted key: value}."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _mlflow_name(name: str) -> str:
    """A name with the characters that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", name)


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
