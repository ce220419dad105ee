"""Every attention implementation against the plain one, for awkward shapes.

`triton` has a file of its own: test_triton.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from palm_ds.model.attention.attention import attend, plan_attention
from palm_ds.model.attention.tiles import TILE
from palm_ds.model.attention.triton import sequence_bounds
from palm_ds.model.attention.varlen import pad_sequences
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.ops.dropout import DropoutKeys, dropout_keys

TOLERANCE = {
    torch.float32: dict(atol=2e-5, rtol=1e-4),
    torch.float16: dict(atol=1e-2, rtol=1e-2),
    torch.bfloat16: dict(atol=5e-2, rtol=5e-2),
}


def batch_of(rows: list[list[int]], length: int) -> Batch:
    """A batch with only what attention reads: sequences with these lengths, then padding."""
    sequence_ids, sizes = torch.full((len(rows), length), -1), []
    for r, row in enumerate(rows):
        ids = torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row, dtype=torch.int64))
        sequence_ids[r, : len(ids)] = ids
        sizes += [*row, length - sum(row)] if sum(row) < length else row
    cu_seqlens = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
    unused = torch.zeros_like(sequence_ids)
    return Batch(unused, unused, unused, unused, sequence_ids, cu_seqlens, {})


SHAPES = [
    ([[7]], 7, 1, 3),
    ([[1]], 1, 1, 1),
    ([[3, 1, 4], [1, 5], []], 9, 2, 5),
    ([[2 * TILE + 3], [TILE, TILE, 1], [TILE + 1, 1, 1, 1, TILE - 1]], 2 * TILE + 3, 3, 8),
    ([[1] * 31, [31], [30]], 31, 4, 4),
]


# dtype, window (None: everything), dropout
NUMBERS = [
    (torch.float32, None, 0.0),
    (torch.bfloat16, None, 0.0),
    (torch.float32, None, 0.3),
    (torch.float32, 0, 0.0),
    (torch.float32, 1, 0.4),
    (torch.float32, 5, 0.0),
    (torch.float32, TILE, 0.4),
    (torch.float32, 10_000, 0.0),
]


@pytest.mark.parametrize("kernel", ["sdpa", "tiles"])
@pytest.mark.parametrize(("dtype", "window", "dropout"), NUMBERS)
@pytest.mark.parametrize(("rows", "length", "heads", "head_size"), SHAPES)
def test_every_form_equals_the_plain_one(
    rows: list[list[int]],
    length: int,
    heads: int,
    head_size: int,
    dtype: torch.dtype,
    window: int | None,
    dropout: float,
    kernel: str,
) -> None:
    """Tiles drop what plain attention drops; sdpa draws its own masks."""
    batch = batch_of(rows, length)
    qkv = torch.randn(len(rows), length, 3 * heads * head_size).to(dtype)
    keys = dropout_keys(batch, length) if dropout and kernel == "tiles" else None
    rate = dropout if keys is not None else 0.0
    compare(batch, qkv, kernel, keys, num_heads=heads, dropout=rate, window=window)


@pytest.mark.parametrize("window", [0, 1, 5, TILE, 10_000])
@pytest.mark.parametrize(("rows", "length", "heads", "head_size"), SHAPES)
def test_a_window_is_a_mask(
    rows: list[list[int]], length: int, heads: int, head_size: int, window: int
) -> None:
    plan, at = plan_attention(batch_of(rows, length), "plain"), torch.arange(length)
    near = (at[:, None] - at).abs() <= window
    qkv = torch.randn(len(rows), length, 3 * heads * head_size)
    assert plan.mask is not None
    masked = attend(qkv, replace(plan, mask=plan.mask & near), num_heads=heads)
    torch.testing.assert_close(attend(qkv, plan, num_heads=heads, window=window), masked)


@pytest.mark.parametrize(("rows", "length", "heads", "head_size"), SHAPES)
def test_attention_without_gradients(
    rows: list[list[int]], length: int, heads: int, head_size: int
) -> None:
    batch, qkv = batch_of(rows, length), torch.randn(len(rows), length, 3 * heads * head_size)
    learning = attend(qkv, plan_attention(batch, "tiles"), num_heads=heads)
    dropping = plan_attention(batch, "tiles", keys=dropout_keys(batch, length))
    dropped = attend(qkv.requires_grad_(), dropping, num_heads=heads, dropout=0.3)
    with torch.no_grad():
        plan = plan_attention(batch, "tiles")
        close = dict(atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(attend(qkv, plan, num_heads=heads), learning, **close)
        assert torch.equal(attend(qkv, dropping, num_heads=heads, dropout=0.3), dropped)


def test_tiled_attention_passes_gradcheck() -> None:
    batch = batch_of([[3, 2], [4]], 6)
    plan = plan_attention(batch, "tiles", keys=dropout_keys(batch, 6))
    torch.manual_seed(0)
    qkv = torch.randn(2, 6, 3 * 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: attend(x, plan, num_heads=2, dropout=0.4), qkv)


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


def compare(
    batch: Batch,
    qkv: torch.Tensor,
    kernel: str,
    keys: DropoutKeys | None = None,
    *,
    num_heads: int,
    dropout: float = 0.0,
    window: int | None = None,
) -> None:
    """Output and gradient of a form and the plain one, which computes in fp32."""
    upstream = torch.randn(*qkv.shape[:2], qkv.shape[2] // 3).to(qkv)
    results = []
    for form, numbers in (("plain", qkv.float()), (kernel, qkv)):
        x, plan = numbers.clone().requires_grad_(), plan_attention(batch, form, keys=keys)
        out = attend(x, plan, num_heads=num_heads, dropout=dropout, window=window)
        out.backward(upstream.to(out))
        results.append((out.detach().float(), x.grad.float()))  # type: ignore[union-attr]
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(other, plain, **TOLERANCE[qkv.dtype])


def test_empty_sequences_at_the_end_change_nothing() -> None:
    rows = [[3, 1, 4], [1, 5], []]
    batch, padded = batch_of(rows, 9), batch_of(rows, 9)
    padded.cu_seqlens = pad_sequences(batch.cu_seqlens)
    assert len(padded.cu_seqlens) == 65 and padded.cu_seqlens[-1] == 27
    qkv = torch.randn(3, 9, 3 * 8)
    plans = [plan_attention(each, "tiles") for each in (batch, padded)]
    outs = [attend(qkv, plan, num_heads=2) for plan in plans]
    assert torch.equal(*outs)
    assert torch.equal(sequence_bounds(batch), sequence_bounds(padded))


def test_the_number_of_sequences_is_rounded_up() -> None:
    def padded(sequences: int) -> int:
        cu_seqlens = torch.arange(sequences + 1, dtype=torch.int32)
        out = pad_sequences(cu_seqlens)
        assert (
            torch.equal(out[: sequences + 1], cu_seqlens) and (out[sequences:] == sequences).all()
        )
        assert out.dtype == torch.int32
        return len(out) - 1

    assert [padded(n) for n in (1, 64, 65, 512, 513, 1000, 1025)] == [
        64, 64, 128, 512, 640, 1024, 1280,
    ]  # fmt: skip


def test_sequence_bounds_say_where_a_sequence_begins_and_ends() -> None:
    batch = batch_of([[3, 1], [5]], 5)
    first, last = sequence_bounds(batch)
    assert first.tolist() == [0, 0, 0, 3, 4, 5, 5, 5, 5, 5]
    assert last.tolist() == [3, 3, 3, 4, 5, 10, 10, 10, 10, 10]


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["varlen", "triton"])
@pytest.mark.parametrize(("rows", "length", "heads", "head_size"), SHAPES[2:])
def test_attention_on_a_gpu(
    rows: list[list[int]],
    length: int,
    heads: int,
    head_size: int,
    kernel: str,
    dtype: torch.dtype,
    window: int | None,
) -> None:
    if (kernel, dtype) == ("varlen", torch.float32):
        pytest.skip("it has none")
    batch = batch_of(rows, length).to("cuda")
    keys = dropout_keys(batch, length) if kernel == "triton" else None
    qkv = torch.randn(len(rows), length, 3 * heads * 8 * head_size).to("cuda", dtype)
    rate = 0.0 if keys is None else 0.3
    compare(batch, qkv, kernel, keys, num_heads=heads, dropout=rate, window=window)


@pytest.mark.gpu
def test_torch_s_own_dropout_keeps_the_mean() -> None:
    batch = batch_of([[5, 3]] * 600, 8).to("cuda")
    qkv = torch.randn(1, 8, 3 * 64).expand(600, 8, 192).to("cuda", torch.float16)
    plan = plan_attention(batch, "varlen")
    exact = attend(qkv, plan, num_heads=1)[0].float()
    dropped = attend(qkv, plan, num_heads=1, dropout=0.3).float()
    error = dropped.std(0) / 600**0.5
    assert ((dropped.mean(0) - exact).abs() < 5 * error + 2e-3).all()
