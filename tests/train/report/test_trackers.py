"""Trackers run in the background: a failure neither stops nor slows training, nothing is lost or
sent twice, and no credential is shown."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from palm_ds.train.report import trackers
from palm_ds.train.report.trackers import (
    BackgroundTracker,
    RunTrackers,
    TrackedRun,
    TrackSettings,
    WandbSettings,
)
from tests.helpers.warm_python import run

PROGRAM = """
import json, sys, time
from pathlib import Path
from palm_ds.train.report.run_log import RunLog
from palm_ds.train.report.trackers import (
    MlflowSettings, TrackSettings, TrackioSettings, WandbSettings
)
from rich.console import Console

folder, found = Path(sys.argv[1]), {}
uri = f"sqlite:///{folder}/mlflow.db"
track = TrackSettings(
    wandb=WandbSettings(project="mine"),
    mlflow=MlflowSettings(experiment="mine", uri=uri),
    trackio=TrackioSettings(project="mine"),
)
config = {"optimizer": {"lr": 0.001}, "sources": {"a": "s3://me:secret@bucket"}}


def arrived(place):
    file = folder / "run/trackers.json"
    sent = json.loads(file.read_text())["sent"] if file.exists() else {}
    return len(sent) == 3 and set(sent.values()) == {place}


for start in (0, 10):
    with RunLog(folder / "run", ["a"], total_steps=20, start=start, track=track, config=config,
                console=Console(file=open(folder / "console.txt", "a"), width=200)) as log:
        step = start + 10
        numbers = {"loss": {"a": 1 / step}, "accuracy": {"a": 0.5}}
        log.step({"step": step, "stage": 1, "lr": 0.1, **numbers})
        scores = {"a (hard)": {"loss": 2.0, "accuracy": 0.25, "metrics": {"f1": step / 100}}}
        log.evaluation(step, scores, stage=1, started=["a"])
        if step == 20:
            log.event("end", "done")
        while not arrived(2 * step + 1):
            time.sleep(0.05)

from mlflow.tracking import MlflowClient
client = MlflowClient(uri)
(run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
history = client.get_metric_history(run.info.run_id, "loss/a")
found["mlflow"] = {
    "loss": [[each.step, each.value] for each in history],
    "f1": client.get_metric_history(run.info.run_id, "f1/a _hard_/held_out")[-1].value,
    "params": run.data.params, "status": run.info.status, "name": run.info.run_name,
}

import sqlite3
(file,) = (folder / "trackio").glob("mine*.db")
rows = sqlite3.connect(file).execute("select run_name, step, metrics from metrics order by id")
found["trackio"] = [[name, step, json.loads(text)] for name, step, text in rows]

import wandb
wandb.teardown()  # its service writes the file after finish() has returned
from wandb.proto import wandb_internal_pb2


def records(data):
    # of a .wandb file: after 7 bytes, parts in blocks of 32 KiB, as in the log of LevelDB
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the only or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


found["wandb"] = []
for file in sorted(folder.glob("run/wandb/offline-run-*/*.wandb")):
    for record in records(file.read_bytes()):
        if record.HasField("run"):
            config = {x.key: json.loads(x.value_json) for x in record.run.config.update}
            found["wandb"].append(["run", record.run.run_id, record.run.project, config])
        if record.HasField("history"):
            items = {"/".join(x.nested_key) or x.key: x.value_json for x in record.history.item}
            found["wandb"].append(["history", {k: json.loads(v) for k, v in items.items()}])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def read_back(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("trackers")
    own = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(folder / "trackio"), "HOME": str(folder)}
    done = run(["-c", PROGRAM, folder], env=own, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout.splitlines()[-1])
    found["printed"] = done.stdout.splitlines()[:-1]
    found["console"] = (folder / "console.txt").read_text()
    return found


@pytest.mark.slow
@pytest.mark.exhaustive  # three programs start; tests of the tracker cover what they are given
def test_all_three_have_both_parts_of_the_run(read_back: dict[str, Any]) -> None:
    assert read_back["printed"] == [] and "track." not in read_back["console"]
    assert "secret" not in json.dumps(read_back)

    mlflow = read_back["mlflow"]
    assert mlflow["loss"] == [[10, 0.1], [20, 0.05]] and mlflow["f1"] == 0.2
    assert mlflow["params"]["optimizer.lr"] == "0.001" and mlflow["name"] == "run"
    assert mlflow["status"] == "FINISHED"

    rows = read_back["trackio"]
    assert len({name for name, _, _ in rows}) == 1 and rows[0][0].startswith("run-")
    losses = [[step, x["loss/a"]] for _, step, x in rows if "loss/a" in x]
    assert losses == [[10, 0.1], [20, 0.05]]
    assert rows[-1][2]["f1/a (hard)/held_out"] == 0.2

    runs = [each[1:] for each in read_back["wandb"] if each[0] == "run"]
    assert len({run[0] for run in runs}) == 1 and runs[0][1] == "mine"
    assert runs[0][2]["optimizer"] == {"lr": 0.001}
    history = [each[1] for each in read_back["wandb"] if each[0] == "history"]
    assert [[x["step"], x["loss/a"]] for x in history if "loss/a" in x] == [[10, 0.1], [20, 0.05]]
    assert history[-1]["f1/a (hard)/held_out"] == 0.2


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
