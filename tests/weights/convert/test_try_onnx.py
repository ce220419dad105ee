"""onnx/ by default: where it cannot be had, the folder stays as it was, and one line says why."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from palm_ds.cli.convert import COMMAND
from palm_ds.common.errors import UserError
from palm_ds.weights.convert import parity, to_onnx, try_onnx
from palm_ds.weights.convert.to_onnx import OnnxFile
from palm_ds.weights.convert.try_onnx import AddedOnnx
from palm_ds.weights.formats.onnx import write
from tests.weights.formats.hf_models import make, save


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(make("bert", "ForMaskedLM", num_hidden_layers=1), tmp_path / "hf")
    return tmp_path / "hf"


def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if "onnx" in name else installed(name)
    )


def too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "MOST_BYTES", 1000)


def too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(try_onnx, "free_host_memory", lambda: 1000)


def not_exportable(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no operator for this\nand much more")

    monkeypatch.setattr(torch.onnx, "export", fail)


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(to_onnx, "_write_files", fail)


Break = Callable[[pytest.MonkeyPatch], None]
REASONS: dict[Break, str] = {
    not_installed: "onnx/ needs onnx and onnxscript and onnxruntime: pip install 'palm_ds[onnx]'",
    too_large: "weights of 13.1 KB need several files, written only on request",
    too_little_memory: "it may take 65.5 KB of memory, and 1 KB are free",
    not_exportable: "RuntimeError: no operator for this",
    full_disk: "OSError: [Errno 28] No space left on device",
}


@pytest.mark.parametrize("reason", REASONS)
def test_the_folder_stays_as_it_was(
    reason: Break, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(folder.rglob("*"))
    reason(monkeypatch)
    added = try_onnx.try_onnx(folder)
    assert added.lines(folder) == [f"no {folder}/onnx: {REASONS[reason]}"]
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("reason", [not_installed, not_exportable])
def test_a_conversion_continues_without(
    reason: Break, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    reason(monkeypatch)
    asked = [str(folder), str(tmp_path / "out"), "--to", "huggingface"]
    assert COMMAND.call(asked) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"no onnx/: {REASONS[reason]}"
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert "model.safetensors" in names and not {"onnx", "palm_ds_onnx.json"} & names
    COMMAND.call([str(folder), str(tmp_path / "again"), "--to", "huggingface", "--json"])
    record = json.loads(capsys.readouterr().out)
    assert record["onnx"] == {"files": {}, "why_none": REASONS[reason]}


def test_who_asks_for_it_gets_an_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    not_installed(monkeypatch)
    asked = [str(folder), str(tmp_path / "out"), "--to", "huggingface", "--onnx"]
    with pytest.raises(UserError, match="^--onnx needs onnx and onnxscript and onnxruntime: "):
        COMMAND.call(asked)
    assert not (tmp_path / "out").exists()


def test_none_turns_it_off(folder: Path, tmp_path: Path, capsys) -> None:
    asked = [str(folder), str(tmp_path / "out"), "--to", "huggingface", "--onnx", "none"]
    assert COMMAND.call(asked) == 0
    assert "no onnx" not in capsys.readouterr().out and not (tmp_path / "out/onnx").exists()


def test_a_line_for_each_file() -> None:
    far = parity.Difference("real", "pooled", 2e-7, 1.0)
    report = parity.ParityReport(sides=("a", "b"), differences=(far,), tolerance=1e-5)
    file = OnnxFile(precision="fp32", name="model.onnx", bytes=90_800_000, parity=report)
    assert AddedOnnx(files=(file,)).lines(Path("runs/x/hf")) == [
        "ONNX: runs/x/hf/onnx/model.onnx, 90.8 MB; largest difference 2.0e-07"
    ]
