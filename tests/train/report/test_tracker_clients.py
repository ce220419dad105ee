"""What each tracker's own library reads back of a run and its resumption, without a network."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers.warm_python import run

PROGRAM = """
import json, sys, time
from pathlib import Path
from palm_ds.train.report.run_log import RunLog
from palm_ds.train.report.tracker_clients import (
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
