"""Trackers run in the background: a failure neither stops nor slows training, nothing is lost or
sent twice, and no credential is shown."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from palm_ds.train.report import trackers
from palm_ds.train.report.tracker_clients import TrackedRun, TrackSettings, WandbSettings
from palm_ds.train.report.trackers import BackgroundTracker, RunTrackers


class Client:
    """Remembers what it took; fails while `broken` has a reason."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, dict[str, float]]] = []
        self.closed: list[bool] = []
        self.broken = ""

    def log(self, values: Mapping[str, float], step: int) -> None:
        if self.broken:
            raise ConnectionError(self.broken)
        self.taken.append((step, dict(values)))

    def close(self, *, finished: bool) -> None:
        self.closed.append(finished)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_everything_arrives_in_order_and_the_client_is_closed() -> None:
    client, said = Client(), list[str]()
    tracker = BackgroundTracker("track.x", lambda: client, said.append)
    for step in range(50):
        tracker.log({"loss": step / 2}, step)
    tracker.close(finished=True)
    assert client.taken == [(step, {"loss": step / 2}) for step in range(50)]
    assert client.closed == [True] and said == []


def test_a_failure_is_one_line_and_nothing_is_lost() -> None:
    client, said = Client(), list[str]()
    client.broken = "no route to https://me:secret@host/api\nmore"
    tracker = BackgroundTracker("track.x", lambda: client, said.append, retry_seconds=0.01)
    tracker.log({"loss": 1.0}, 1)
    until(lambda: said)
    time.sleep(0.05)  # several more tries
    tracker.log({"loss": 2.0}, 2)
    client.broken = ""
    until(lambda: len(client.taken) == 2)
    tracker.close(finished=False)
    assert said == [
        "track.x: no route to https://***@host/api; training continues, tried again every 0.01 s",
        "track.x: works again; nothing is lost",
    ]
    assert client.closed == [False]


def test_a_client_that_cannot_connect_keeps_nobody_waiting(monkeypatch) -> None:
    monkeypatch.setattr(trackers, "_CLOSE_SECONDS", 0.05)
    gate, said = threading.Event(), list[str]()

    def connect() -> Any:
        gate.wait(20)
        raise OSError("no network")

    tracker = BackgroundTracker("track.x", connect, said.append)
    tracker.log({"loss": 1.0}, 1)
    tracker.close(finished=True)
    gate.set()
    assert said == ["track.x: records not sent: 1; see metrics.jsonl"]


def test_a_missing_library_names_the_extra() -> None:
    said: list[str] = []

    def connect() -> Any:
        raise ModuleNotFoundError("No module named 'wandb'", name="wandb")

    BackgroundTracker("track.wandb", connect, said.append).close(finished=True)
    assert said[0].startswith("track.wandb: needs wandb: pip install 'palm_ds[trackers]'; training")


def test_a_resumed_run_has_the_same_id_and_sends_nothing_twice(tmp_path, monkeypatch) -> None:
    clients: list[Client] = []

    def wandb(settings: WandbSettings, run: TrackedRun) -> Client:
        clients.append(Client())
        ids.append(run.id_of("wandb"))
        assert run.config == {"sources": "s3://***@bucket"}
        return clients[-1]

    ids: list[str] = []
    monkeypatch.setattr(trackers, "WandbTracker", wandb)
    settings = TrackSettings(wandb=WandbSettings(project="p"))
    config = {"sources": "s3://key:secret@bucket"}
    for steps in ((10, 20), (20, 30)):
        tracked = RunTrackers(settings, tmp_path, config, print)
        for step in steps:
            tracked.log({"loss/a": 1.0, "note": "text", "bad": float("nan")}, step)
            tracked.log({"loss/a/held_out": 2.0}, step, evaluation=True)
        tracked.close(finished=False)
        tracked.close(finished=False)
    taken = [client.taken for client in clients]
    assert ids[0] == ids[1] and len(ids) == 2
    assert [step for step, _ in taken[0]] == [10, 10, 20, 20]
    assert taken[1] == [(30, {"loss/a": 1.0}), (30, {"loss/a/held_out": 2.0})]


def test_without_settings_there_is_neither_a_thread_nor_a_file(tmp_path: Path) -> None:
    before = threading.active_count()
    tracked = RunTrackers(TrackSettings(), tmp_path, {}, print)
    tracked.log({"loss": 1.0}, 1)
    assert threading.active_count() == before
    tracked.close(finished=True)
    assert list(tmp_path.iterdir()) == []
