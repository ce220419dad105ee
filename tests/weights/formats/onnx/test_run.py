"""ONNX Runtime as it is started here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from onnx import TensorProto, helper, save

SCRIPT = """
import sys
from pathlib import Path
from palm_ds.weights.formats.onnx.description import OnnxDescription
from palm_ds.weights.formats.onnx.run import OnnxModel
OnnxModel(Path(sys.argv[1]), None)
"""


def graph(path: Path) -> Path:
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["n"])
    out = helper.make_tensor_value_info("out", TensorProto.INT64, ["n"])
    node = helper.make_node("Identity", ["input_ids"], ["out"])
    made = helper.make_graph([node], "g", [ids], [out])
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 9
    save(model, path)
    return path


def home_after(home: Path, model: Path, **variables: str) -> list[str]:
    """Files of ONNX Runtime in the user's home folder after a graph was loaded, without signs of a
    test: with them it reports nothing."""
    keep = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
    home.mkdir()
    env = {name: os.environ[name] for name in keep if name in os.environ} | {"HOME": str(home)}
    command = [sys.executable, "-c", SCRIPT, str(model)]
    subprocess.run(command, env=env | variables, check=True)
    return [path.name for path in home.rglob("*") if "onnxruntime" in path.name]


def test_it_reports_nothing(tmp_path: Path) -> None:
    model = graph(tmp_path / "model.onnx")
    if not home_after(tmp_path / "allowed", model, ORT_DISABLE_TELEMETRY="0"):
        pytest.skip("this ONNX Runtime has no telemetry")
    assert home_after(tmp_path / "home", model) == []
