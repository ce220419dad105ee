"""The kernels for GPUs, in Triton's interpreter, against the update for CPUs."""

from __future__ import annotations

import ast
import importlib.util
import os
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch

from palm_ds.runtime.optimizer import scaled_adam, scaled_adam_triton
from palm_ds.runtime.optimizer.optimizer import OptimizerConfig, build_optimizer
from palm_ds.runtime.optimizer.scaled_adam import ScaledAdam
from tests.helpers.simulated_zero import (
    LayersModel,
    as_zero_1,
    as_zero_3,
    gradients,
    train_cut,
    train_whole,
)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks, so that parameters have several. The interpreter runs in one thread at a
    time."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles for the GPU here")
    monkeypatch.setattr(scaled_adam_triton, "is_usable", lambda tensors: True)
    monkeypatch.setattr(scaled_adam_triton, "_VALUES", 32)
    monkeypatch.setattr(scaled_adam_triton, "_BLOCK", 16)
    lock = Lock()
    for name in ("measure", "apply"):
        function = getattr(scaled_adam_triton, name)
        monkeypatch.setattr(scaled_adam_triton, name, partial(_locked, lock, function))


def _locked(lock: Lock, function: Any, *positional: Any, **named: Any) -> Any:
    with lock:
        return function(*positional, **named)


@pytest.mark.parametrize("kind", ["lamb", "stable_adamw"])
def test_the_kernels_compute_the_same(kind: str, kernels, monkeypatch) -> None:
    config = OptimizerConfig(kind=kind, weight_decay=0.1)
    with monkeypatch.context() as patch:
        patch.setattr(scaled_adam_triton, "is_usable", lambda tensors: False)
        expected = train_whole(config, range(2))
    monkeypatch.setattr(scaled_adam.ScaledAdam, "_scaled", None)  # so that it cannot be used
    found = [
        train_whole(config, range(2)),
        train_cut(config, range(2), cut=as_zero_1, world=2),
        train_cut(config, range(2), cut=as_zero_3, world=3),
    ]
    for model in found:
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["lamb", "stable_adamw"])
def test_a_step_that_is_skipped_on_the_device_changes_nothing(kind: str, kernels) -> None:
    model = LayersModel()
    config = OptimizerConfig(kind=kind, weight_decay=0.1)
    optimizer = build_optimizer(model, config, zero_stage=0, checked=False)
    assert isinstance(optimizer, ScaledAdam)
    before = {}
    for step, found_inf in enumerate((0.0, 1.0)):
        for parameter, gradient in gradients(model, step).items():
            parameter.grad = gradient / (1 - found_inf)
        optimizer.found_inf, optimizer.grad_scale = torch.tensor(found_inf), torch.tensor(1.0)
        optimizer.step()
        after = {
            (name, kind): value.clone()
            for name, p in model.named_parameters()
            for kind, value in {"weight": p.detach(), **optimizer.state[p]}.items()
        }
        assert all(value.isfinite().all() for value in after.values())
        same = [torch.equal(value, before[key]) for key, value in after.items() if before]
        assert all(same) and len(same) == (len(after) if step else 0)
        before = after


def test_gradients_are_divided_by_their_scale(kernels) -> None:
    config = OptimizerConfig(kind="stable_adamw", weight_decay=0.1)
    models = LayersModel(), LayersModel()
    for model, scale in zip(models, (1.0, 4.0), strict=True):
        optimizer = build_optimizer(model, config, zero_stage=0, checked=False)
        assert isinstance(optimizer, ScaledAdam)
        optimizer.found_inf, optimizer.grad_scale = torch.tensor(0.0), torch.tensor(scale)
        for parameter, gradient in gradients(model, 0).items():
            parameter.grad = gradient * scale
        optimizer.step()
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(p, q)


ROOT = Path(__file__).resolve().parents[3]
LOCALS = {"params", "specialization", "options"}
"""Of the function that Triton writes to launch a kernel."""


def test_no_argument_of_a_kernel_is_hidden_by_triton_s_launcher() -> None:
    """A kernel with an argument `params` fails on every GPU; neither the interpreter nor the
    compiler uses the launcher."""
    found = {}
    for file in sorted(ROOT.glob("palm_ds/**/*_kernels.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                found[file.stem, node.name] = {argument.arg for argument in node.args.args}
    assert len(found) == 8
    assert {key: names & LOCALS for key, names in found.items() if names & LOCALS} == {}
