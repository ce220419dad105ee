"""The command on real runs with a launcher; completed runs are not repeated."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml

from tests.helpers.launchers import TORCHRUN
from tests.helpers.small_corpus import write_small_corpus
from tests.helpers.warm_python import python

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ROOT = Path(__file__).resolve().parent.parent.parent
ABLATE = str(ROOT / "launch" / "ablate.py")
MASKS, ORDER = "knowledge_masking", "sentence_reordering"


def test_each_schedule_is_trained_in_its_own_processes(run_program, tmp_path, every) -> None:
    write_small_corpus(tmp_path / "corpus")
    recipe, ds_config, out = (tmp_path / name for name in ("recipe.yaml", "machine.json", "out"))
    values = {
        "backbone": {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "max_positions": 64},
        "length": 64,
        "batch": "8 rows",
        "sources": {"text": {"corpus": str(tmp_path / "corpus")}},
        "held_out": 0.2,
        "tasks": {MASKS: {"source": "text"}, ORDER: {"source": "text"}},
        "stages": {"continual": [MASKS, ORDER], "steps": 50},
        "evaluate": {"examples": 20},
    }
    recipe.write_text(yaml.safe_dump(values))
    ds_config.write_text(json.dumps({"zero_optimization": {"stage": 1}}))

    def ablate(*more: str) -> str:
        given = [ABLATE, recipe, "--deepspeed_config", ds_config, "--out", out, *more]
        return run_program(*given, launcher="python", timeout=400).output

    torchrun = shlex.join([*TORCHRUN, "--standalone", "--nproc_per_node=1"])
    launcher = ["--launcher", torchrun if every else python()]
    schedules = ["joint", "continual"] if every else ["continual"]
    if every:
        ablate("--steps", "6", "--schedules", "joint", "log.every=2")
        first = (out / "joint" / "metrics.jsonl").read_bytes()
    output = ablate("--steps", "6", "--schedules", ",".join(schedules), *launcher)
    if every:
        assert "== joint (1 of 2): done" in output
        assert (out / "joint" / "metrics.jsonl").read_bytes() == first
    table = [line for line in output.splitlines() if line.startswith("|")]
    columns = [cell.strip() for cell in table[0].split("|")]
    assert columns[3 : 3 + len(schedules)] == schedules
    assert len(table) == 2 + 2 * 3
    record = json.loads((out / "ablation.json").read_text())["schedules"]
    assert record["continual"]["stages"] == [{MASKS: 4}, {MASKS: 2, ORDER: 6}]
    for schedule in record.values():
        assert schedule["steps"] == 12
        assert set(schedule["scores"]) == {MASKS, ORDER}
        assert schedule["scores"][MASKS]["loss"] > 0
    assert (out / "continual" / "hf" / "model.safetensors").exists()
    assert not (out / "continual" / "hf" / "onnx").exists()  # unless the recipe asks for it
    assert output.rstrip().endswith("and ablation.json")
