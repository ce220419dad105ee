"""The Triton kernels of `fused_norm`. Imported where a kernel is needed: it needs triton.

    forward    a row: sum of x and y (dropped before), LayerNorm (dropped after)
    backward   a share of the rows: their gradient, and the share's sums for weight and bias

Rows are (rows, N), contiguous; BLOCK is the power of two that N is padded to. `hashes` (rows,) and
`columns` (N,) are odd int32: the masks are those of `palm_ds.model.ops.dropout.keep_mask`. Every
number is written by one program, in one order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from palm_ds.model.ops import dropout

_GOLDEN_32 = tl.constexpr(dropout.GOLDEN_32)


@triton.jit
def forward_kernel(
    x,
    y,
    hashes,
    columns,
    weight,
    bias,
    out,
    total,
    mean,
    rstd,
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    DROPPED: tl.constexpr,
    INVERSE_KEEP: tl.constexpr,
    AFTER: tl.constexpr,
):
    """`total` gets x + y, `mean` and `rstd` what normalized it, for the backward pass."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < N
    values = tl.load(x + row * N + at, mask=inside, other=0.0).to(tl.float32)
    kept = _kept(hashes, columns, row, at, inside, DROPPED)
    if y is not None:
        added = tl.load(y + row * N + at, mask=inside, other=0.0).to(tl.float32)
        if not AFTER:
            added = _dropped(added, kept, DROPPED, INVERSE_KEEP)
        values += added
    values = values.to(total.dtype.element_ty)
    tl.store(total + row * N + at, values, mask=inside)
    values = values.to(tl.float32)
    center = tl.sum(values, 0) / N
    centered = tl.where(inside, values - center, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centered * centered, 0) / N + eps)
    tl.store(mean + row, center)
    tl.store(rstd + row, scale)
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    result = centered * scale * factor + tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    if AFTER:
        result = _dropped(result, kept, DROPPED, INVERSE_KEEP)
    tl.store(out + row * N + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    grad,
    total,
    mean,
    rstd,
    hashes,
    columns,
    weight,
    d_x,
    d_y,
    d_weight,
    d_bias,
    rows,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    DROPPED: tl.constexpr,
    INVERSE_KEEP: tl.constexpr,
    AFTER: tl.constexpr,
):
    """`d_weight` and `d_bias` (programs, N) fp32 get the sums of this program's rows."""
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < N
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    weight_sum = tl.zeros((BLOCK,), tl.float32)
    bias_sum = tl.zeros((BLOCK,), tl.float32)
    for number in range(program, rows, tl.num_programs(0)):
        row = tl.full((), number, tl.int64)
        kept = _kept(hashes, columns, row, at, inside, DROPPED)
        incoming = tl.load(grad + row * N + at, mask=inside, other=0.0).to(tl.float32)
        if AFTER:
            incoming = _dropped(incoming, kept, DROPPED, INVERSE_KEEP)
        values = tl.load(total + row * N + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row)
        normal = tl.where(inside, (values - tl.load(mean + row)) * scale, 0.0)
        weight_sum += incoming * normal
        bias_sum += incoming
        scaled = incoming * factor
        shift = tl.sum(scaled, 0) / N
        lean = tl.sum(scaled * normal, 0) / N
        result = (scaled - shift - normal * lean) * scale
        tl.store(d_x + row * N + at, result.to(d_x.dtype.element_ty), mask=inside)
        if d_y is not None:
            if not AFTER:
                result = _dropped(result, kept, DROPPED, INVERSE_KEEP)
            tl.store(d_y + row * N + at, result.to(d_y.dtype.element_ty), mask=inside)
    tl.store(d_weight + program * N + at, weight_sum, mask=inside)
    tl.store(d_bias + program * N + at, bias_sum, mask=inside)


@triton.jit
def _kept(hashes, columns, row, at, inside, DROPPED: tl.constexpr):
    """`keep_mask` of a row."""
    kept = inside
    if DROPPED is not None:
        bits = tl.load(hashes + row) * tl.load(columns + at, mask=inside, other=0)
        kept = (bits ^ (bits >> 15)) * _GOLDEN_32 >= DROPPED
    return kept


@triton.jit
def _dropped(values, kept, DROPPED: tl.constexpr, INVERSE_KEEP: tl.constexpr):
    if DROPPED is not None:
        values = tl.where(kept, values * INVERSE_KEEP, 0.0)
    return values
