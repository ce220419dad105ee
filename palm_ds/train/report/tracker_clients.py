"""The clients of Weights & Biases, MLflow and trackio, each imported when it connects."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from palm_ds.common.errors import UserError


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
