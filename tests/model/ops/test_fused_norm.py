"""Our LayerNorm kernels in Triton's interpreter, against torch's LayerNorm and our dropout."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from palm_ds.model import kernels
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import Kernels
from palm_ds.model.ops import fused_norm
from palm_ds.model.ops.dropout import add_dropout, dropout, dropout_keys
from palm_ds.model.ops.fused_norm import Drop, FusedLayerNorm
from tests.model.test_multi_task_model import dropping, losses_and_grads

ROOT = Path(__file__).resolve().parents[3]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}


@pytest.fixture(autouse=True)
def interpreted() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles for the GPU here")
    from triton import __version__

    if tuple(map(int, __version__.split(".")[:2])) < (3, 7):
        pytest.skip(f"the interpreter of triton {__version__} does not work with NumPy 2.4")


def drop_of(rows: int, length: int, size: int, rate: float) -> Drop:
    batch = Batch.from_rows([[]] * rows, length=length, pad=0)
    batch.first_row, batch.dropout_key = 3, 2**62
    return Drop(rate, dropout_keys(batch, size))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("rate", "after"),
    [
        (0.0, False),
        (0.3, True),
        pytest.param(0.0, True, marks=pytest.mark.exhaustive),
        pytest.param(0.3, False, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize(
    ("rows", "length", "size"), [(1, 1, 1), (2, 3, 5), (3, 7, 16), (1, 2, 130)]
)
def test_equals_the_plain_forms(
    rows: int,
    length: int,
    size: int,
    after: bool,
    rate: float,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused_norm, "_PROGRAMS", 4)
    torch.manual_seed(rows)
    norm = FusedLayerNorm(size, eps=1e-5).to(dtype)
    with torch.no_grad():
        norm.weight.normal_()
        norm.bias.normal_()
    drop = drop_of(rows, length, size, rate) if rate else None
    keys = drop.keys if drop else None
    x, y, grad = torch.randn(3, rows, length, size).to(dtype)
    if after and not drop:
        pytest.skip("torch's own LayerNorm")
    results = []
    for kind in (torch.float32, dtype):  # the plain forms, then the kernels
        norm = norm.to(kind)
        leaves = [each.to(kind, copy=True).requires_grad_() for each in (x, y)]
        if kind is dtype and results:
            out = norm(leaves[0], None, drop, True) if after else norm(*leaves, drop)
        elif after:
            out = dropout(plain(norm, leaves[0]), rate, keys)
        else:
            out = plain(norm, add_dropout(*leaves, rate, keys))
        inputs = [*leaves[: 1 if after else 2], norm.weight, norm.bias]
        results.append([out.detach(), *torch.autograd.grad(out, inputs, grad.to(kind))])
    assert torch.equal(results[0][0] == 0, results[1][0] == 0)
    for exact, found in zip(*results, strict=True):
        difference = (found.float() - exact).norm()
        assert difference <= TOLERANCE[dtype] * (exact.norm() + exact.numel() ** 0.5)


def plain(norm: FusedLayerNorm, x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def test_an_encoder_learns_the_same_with_it() -> None:
    """With dropout of the same numbers, wherever labels are."""
    chosen = Kernels(masked_lm_loss="chunked")
    nets = [dropping(chosen), dropping(replace(chosen, layer_norm="triton"))]
    exact, found = (losses_and_grads(net, [slice(2, 4)], [13]) for net in nets)
    torch.testing.assert_close(found, exact, atol=1e-5, rtol=1e-4)
    assert list(nets[0].state_dict()) == list(nets[1].state_dict())


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_trial_of_the_kernels_passes(dtype: torch.dtype) -> None:
    assert kernels._fused_norm_error(torch.device("cpu"), dtype) < kernels._TOLERANCE / 4


@pytest.mark.exhaustive  # and on a card in all tests of the kernels
def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """The interpreter accepts more than the compiler does."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    del environment["TRITON_INTERPRET"]
    command = [sys.executable, "-W", "ignore", "-m", "tests.helpers.compile_fused_norm"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    sizes = json.loads(done.stdout)
    assert len(sizes) == 6 and min(sizes.values()) > 0
