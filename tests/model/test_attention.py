"""Every attention implementation against the plain one, for awkward shapes."""

from __future__ import annotations

import pytest
import torch

from palm_ds.model.attention import TILE, attend, plan_attention
from palm_ds.model.batch import Batch
from palm_ds.model.dropout import dropout_keys

TOLERANCE = {torch.float32: dict(atol=2e-5, rtol=1e-4), torch.bfloat16: dict(atol=5e-2, rtol=5e-2)}


def batch_of(rows: list[list[int]], length: int) -> Batch:
    """A batch with only what attention reads: sequences with these lengths, then padding."""
    sequence_ids, sizes = torch.full((len(rows), length), -1), []
    for r, row in enumerate(rows):
        ids = torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row, dtype=torch.int64))
        sequence_ids[r, : len(ids)] = ids
        sizes += [*row, length - sum(row)] if sum(row) < length else row
    cu_seqlens = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
    unused = torch.zeros_like(sequence_ids)
    return Batch(unused, unused, unused, unused, sequence_ids, cu_seqlens, max(sizes), {})


SHAPES = [
    ([[7]], 7, 1, 3),
    ([[1]], 1, 1, 1),
    ([[3, 1, 4], [1, 5], []], 9, 2, 5),
    ([[2 * TILE + 3], [TILE, TILE, 1], [TILE + 1, 1, 1, 1, TILE - 1]], 2 * TILE + 3, 3, 8),
    ([[1] * 31, [31], [30]], 31, 4, 4),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["sdpa", "tiles"])
@pytest.mark.parametrize(("rows", "length", "heads", "head_size"), SHAPES)
def test_attention(
    rows: list[list[int]], length: int, heads: int, head_size: int, kernel: str, dtype: torch.dtype
) -> None:
    batch = batch_of(rows, length)
    torch.manual_seed(length)
    hidden_size = heads * head_size
    qkv = torch.randn(len(rows), length, 3 * hidden_size).to(dtype)
    upstream = torch.randn(len(rows), length, hidden_size).to(dtype)
    results = []
    for which in ("plain", kernel):
        x = qkv.clone().requires_grad_()
        out = attend(x, plan_attention(batch, which), num_heads=heads)
        out.backward(upstream)
        results.append((out.detach(), x.grad))
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(other, plain, **TOLERANCE[dtype])


@pytest.mark.parametrize(("rows", "length", "heads", "head_size"), SHAPES)
def test_attention_without_gradients(
    rows: list[list[int]], length: int, heads: int, head_size: int
) -> None:
    batch, qkv = batch_of(rows, length), torch.randn(len(rows), length, 3 * heads * head_size)
    learning = attend(qkv, plan_attention(batch, "tiles"), num_heads=heads)
    with torch.no_grad():
        plan = plan_attention(batch, "tiles")
        assert plan.kernel == ("sdpa" if length <= TILE else "tiles")
        torch.testing.assert_close(
            attend(qkv, plan, num_heads=heads), learning, atol=2e-5, rtol=1e-4
        )


def test_tiled_attention_passes_gradcheck() -> None:
    batch = batch_of([[3, 2], [4]], 6)
    plan = plan_attention(batch, "tiles", keys=dropout_keys(batch, 6))
    torch.manual_seed(0)
    qkv = torch.randn(2, 6, 3 * 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: attend(x, plan, num_heads=2, dropout=0.4), qkv)


@pytest.mark.parametrize(("rows", "length", "heads", "head_size"), SHAPES)
def test_tiles_drop_what_plain_attention_drops(
    rows: list[list[int]], length: int, heads: int, head_size: int
) -> None:
    batch, width = batch_of(rows, length), heads * head_size
    keys, qkv = dropout_keys(batch, length), torch.randn(len(rows), length, 3 * width)
    results = []
    for kernel in ("plain", "tiles"):
        x, plan = qkv.clone().requires_grad_(), plan_attention(batch, kernel, keys=keys)
        out = attend(x, plan, num_heads=heads, dropout=0.3)
        out.square().sum().backward()
        results.append((out.detach(), x.grad))
        with torch.no_grad():
            assert torch.equal(attend(x, plan, num_heads=heads, dropout=0.3), out)
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(other, plain, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("counter", [True, False])
@pytest.mark.parametrize("kernel", ["plain", "sdpa", "tiles"])
def test_attention_dropout_keeps_the_mean(kernel: str, counter: bool) -> None:
    if (kernel, counter) == ("sdpa", True):
        pytest.skip("it draws its own masks")
    batch = batch_of([[5, 3]] * 600, 8)
    torch.manual_seed(0)
    qkv = torch.randn(1, 8, 3 * 4).expand(600, 8, 12).contiguous()
    plan = plan_attention(batch, kernel, keys=dropout_keys(batch, 8) if counter else None)
    exact = attend(qkv, plan, num_heads=1)[0]
    dropped = attend(qkv, plan, num_heads=1, dropout=0.3)
    assert (dropped[0] - dropped[1]).abs().max() > 0.01
    error = dropped.std(0) / 600**0.5
    assert ((dropped.mean(0) - exact).abs() < 5 * error + 1e-6).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "length", "heads", "head_size"), SHAPES[2:])
def test_varlen_attention(rows: list[list[int]], length: int, heads: int, head_size: int) -> None:
    batch = batch_of(rows, length).to("cuda")
    hidden_size = heads * 8 * head_size
    qkv = torch.randn(len(rows), length, 3 * hidden_size, device="cuda", dtype=torch.bfloat16)
    plain = attend(qkv, plan_attention(batch, "plain"), num_heads=heads)
    varlen = attend(qkv, plan_attention(batch, "varlen"), num_heads=heads)
    torch.testing.assert_close(varlen, plain, **TOLERANCE[torch.bfloat16])
