"""Training on readers without an end: passes, and one curve whatever happens to the processes."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

import palm_ds as palm
from palm_ds.train.report.metrics_file import read_metrics
from tests.helpers import endless_readers
from tests.helpers.endless_readers import KILL_AT
from tests.helpers.small_tables import TINY, write_tables
from tests.helpers.warm_python import clear_away, run, start_together

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of DeepSpeed's
PASS = 16


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tables(tmp_path_factory.mktemp("place"))
    for reader in ("seeking", "plain"):
        recipe = {
            "backbone": TINY,
            "length": 32,
            "batch": "8 examples",
            "optimizer": {"lr": 2.0e-3},
            "sources": {
                "rows": {
                    "reader": f"{endless_readers.__name__}.{reader}",
                    "pass_examples": PASS,
                    "tokenizer": "vocab.txt",
                }
            },
            "tasks": {"kind": {"kind": "classification", "source": "rows"}},
            "stages": [{"kind": "5 passes"}],
            "save": {"passes": True, "background": False},
            "log": {"every": 1},
            "export_onnx": [],
        }
        (folder / f"{reader}.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def words(place: Path, reader: str, folder: Path) -> list[str]:
    names = [f"{place / reader}.yaml", "--deepspeed_config", "cpu", "--run_dir", str(folder)]
    return ["-m", "palm_ds", "finetune", *names]


def losses(folder: Path) -> list[tuple[int, float]]:
    """Of every step, the last time that it was trained."""
    steps = read_metrics(folder / "metrics.jsonl").steps
    return sorted({each["step"]: each["loss"]["kind"] for each in steps}.items())


def trainer(place: Path, folder: Path, reader: Any, **values: Any) -> palm.Trainer:
    task = palm.tasks.Classification.on(train=reader, pass_examples=PASS, name="kind", **values)
    backbone = palm.Backbone.from_config(TINY, tokenizer=place / "vocab.txt")
    usual: dict[str, Any] = {"batch": 8, "epochs": 5, "lr": 2e-3, "length": 32, "log_every": 1}
    usual["recipe"] = {"export_onnx": [], "evaluate": {"passes": True}}
    usual["deepspeed_config"] = {"zero_optimization": {"stage": 0}}
    return palm.Trainer(task, backbone=backbone, folder=folder, **usual)


def test_passes_from_python(place: Path, tmp_path: Path) -> None:
    events: list[Any] = []
    made = trainer(place, tmp_path, endless_readers.plain, dev=_dev(place))
    made.train(event_handler=events.append)
    ends = [event for event in events if isinstance(event, palm.event.EndPass)]
    assert [each.pass_id for each in ends] == [0, 1, 2, 3, 4]
    scored = [event.step for event in events if isinstance(event, palm.event.Evaluation)]
    assert scored == [2, 4, 6, 8, 10] and ends[0].metrics["kind"]["loss"] > 0
    lines = read_metrics(tmp_path / "metrics.jsonl").events
    assert [x["number"] for x in lines if x["event"] == "pass"] == [1, 2, 3, 4, 5]


def _dev(place: Path) -> list[dict[str, str]]:
    return [{"text_a": "w0 w1", "label": "c0"}, {"text_a": "w1 w9", "label": "c1"}]


@pytest.mark.parametrize("reader", ["plain", pytest.param("seeking", marks=pytest.mark.exhaustive)])
def test_a_killed_run_continues_bit_for_bit(place: Path, tmp_path: Path, reader: str) -> None:
    killed = run(words(place, reader, tmp_path / "b"), cwd=place, env={KILL_AT: "56"})
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = run(words(place, reader, tmp_path / "b"), cwd=place)
    assert again.returncode == 0, again.stderr
    once = run(words(place, reader, tmp_path / "a"), cwd=place)
    assert once.returncode == 0, once.stderr
    assert "pass 2 of kind ended (16 examples)" in once.stdout
    assert losses(tmp_path / "a") == losses(tmp_path / "b") != []
    one, other = (load_file(tmp_path / x / "weights/weights.safetensors") for x in "ab")
    assert all(one[name].equal(other[name]) for name in one)


@pytest.mark.distributed
@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [2, 3])
def test_any_number_of_processes_has_one_curve(place: Path, tmp_path: Path, world: int) -> None:
    programs = start_together(world, words(place, "plain", tmp_path / "b"), env={}, cwd=place)
    try:
        for program in programs:
            out, _ = program.communicate(timeout=300)
            assert program.wait() == 0, out
    finally:
        clear_away(programs)
    once = run(words(place, "seeking", tmp_path / "a"), cwd=place)
    assert once.returncode == 0, once.stderr
    expected, found = dict(losses(tmp_path / "a")), dict(losses(tmp_path / "b"))
    assert found.keys() == expected.keys()
    assert all(found[step] == pytest.approx(expected[step], abs=1e-5) for step in found)
