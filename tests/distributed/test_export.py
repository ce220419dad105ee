"""Checkpoints of 1, 2 and 3 processes under each ZeRO stage are exported to the same bytes: from
palm_ds's checkpoints and from DeepSpeed's own shards, all written by real engines."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from palm_ds.runtime.checkpoint import checkpoint
from palm_ds.runtime.checkpoint.shard_files import ShardReader
from palm_ds.weights.formats.deepspeed import read as deepspeed

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

COMMAND = Path(__file__).resolve().parents[2] / "tools" / "convert_ckpt" / "convert.py"
KINDS = ("weight", "exp_avg", "exp_avg_sq")
LAUNCHERS = {1: "python", 2: "fork", 3: "fork"}
# ZeRO 3 last: it changes the process it runs in.
RUNS = ("0:fp32", "1:fp32", "2:fp32", "1:bf16", "2:bf16", "3:fp32", "3:bf16")
SOME = {2: ("0:fp32", "2:bf16"), 3: ("3:fp32",)}
MODEL = {
    "palm_ds": "weights.safetensors",
    "huggingface": "model.safetensors",
    "paddle": "model_state.pdparams",
}

Convert = Callable[..., dict[str, bytes]]


@pytest.fixture
def convert(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Convert:
    """convert(source, "paddle"): the files that the command writes, entered in this process. Two
    files of the same bytes need no proof each, only one that is `checked`."""
    spec = importlib.util.spec_from_file_location("convert_command", COMMAND)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: list[Path] = []

    def convert(source: Path, to: str, *, checked: bool = False) -> dict[str, bytes]:
        made.append(tmp_path / f"converted_{len(made)}")
        words = ["convert.py", str(source), str(made[-1]), "--to", to, "--json"]
        words += [] if checked else ["--unchecked"]
        words += ["--onnx", "none"] if to == "huggingface" else []
        monkeypatch.setattr(sys, "argv", words)
        assert module.main() == 0
        return files(made[-1])

    return convert


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def values(step: Path) -> dict[str, torch.Tensor]:
    """A checkpoint's weights and moments, concatenated."""
    stored = ShardReader(checkpoint.open_published(step).files)
    return {
        f"{kind}/{name}": stored.read(name, kind, 0, stored.size(name))
        for name in stored.names()
        for kind in KINDS
    }


def test_every_layout_exports_the_same_bytes(
    run_distributed, convert, tmp_path, every, capsys
) -> None:
    saved = tmp_path / "saved"
    runs = dict.fromkeys(LAUNCHERS, RUNS) if every else SOME
    for processes in runs:
        options, launcher = {"folder": saved, "runs": runs[processes]}, LAUNCHERS[processes]
        done = run_distributed("export.layouts", options, processes=processes, launcher=launcher)
        assert done.result == processes
    common = saved / "common" / "step_00000003"
    layouts = [saved / f"{run.replace(':', '_')}_{n}" for n in runs for run in runs[n]]
    layouts.sort(key=lambda folder: folder.name)
    check_ours(common, layouts, convert)
    check_deepspeeds(common, layouts, convert)
    check_later(common, layouts, convert)
    check_the_proof(layouts[-2:], convert, capsys)


def check_ours(common: Path, layouts: Iterable[Path], convert: Convert) -> None:
    """Restored and saved again, bf16 included: the fp32 weights are exported."""
    before = values(common)
    for kind in KINDS:
        assert any(x.any() for name, x in before.items() if name.startswith(kind)), kind
    words = before["weight/backbone.word.weight"]
    assert not torch.equal(words.bfloat16().float(), words)  # or bf16 would prove nothing
    wanted = {to: convert(common, to) for to in MODEL}
    for run in layouts:
        step = run / "checkpoints" / common.name
        found = values(step)
        assert found.keys() == before.keys()
        for name, value in before.items():
            assert torch.equal(found[name], value), (run.name, name)
        for to, model in MODEL.items():
            assert model in wanted[to]
            source = run if to == "huggingface" else step
            assert convert(source, to) == wanted[to], (run.name, to)


def check_the_proof(runs: Iterable[Path], convert: Convert, capsys: Any) -> None:
    """What is compared with its source is the same file."""
    for run, to in zip(runs, ("huggingface", "paddle"), strict=True):
        wanted = convert(run, to)
        capsys.readouterr()
        assert convert(run, to, checked=True)[MODEL[to]] == wanted[MODEL[to]]
        assert json.loads(capsys.readouterr().out)["parity"]["passed"] is True


def check_deepspeeds(common: Path, layouts: Iterable[Path], convert: Convert) -> None:
    """The same engines, saved by `save_checkpoint`: the same fp32 weights, the same model files."""
    weights = {n.split("/", 1)[1]: x for n, x in values(common).items() if n.startswith("weight/")}
    wanted = {to: convert(common, to)[model] for to, model in MODEL.items()}
    for run in layouts:
        contents = deepspeed.open_contents(run / "shards")
        assert contents.format == f"DeepSpeed ZeRO {run.name[0]}, palm_ds"
        assert contents.entries.keys() == weights.keys()
        for name, entry in contents.entries.items():
            read = entry.read()
            assert read.dtype == torch.float32, (run.name, name)
            assert torch.equal(read.flatten(), weights[name]), (run.name, name)
        for to, model in MODEL.items():
            assert convert(run / "shards", to)[model] == wanted[to], (run.name, to)


def check_later(common: Path, layouts: Iterable[Path], convert: Convert) -> None:
    """After a few steps more, fp32 layouts are as near to one another as sums in another order let
    them be (6e-8 seen), and bf16 ones nearer than the steps went (1.7e-4 of 3e-3 seen)."""
    begun = load(convert(common, "palm_ds")[MODEL["palm_ds"]])
    first: dict[str, torch.Tensor] = {}
    for run in layouts:
        here = load(convert(run / "later", "palm_ds")[MODEL["palm_ds"]])
        first = first or here
        assert farthest(here, begun) > 2e-3, run.name
        assert farthest(here, first) < (1e-6 if "fp32" in run.name else 5e-4), run.name


def farthest(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)
