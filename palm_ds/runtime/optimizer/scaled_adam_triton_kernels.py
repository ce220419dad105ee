"""The Triton kernels of `scaled_adam_triton`. Imported where a kernel is needed: it needs triton.

    measure    a block of values: moments, update (in place of the gradient), its two sums
    add_up     a parameter: the sums of its blocks, one after another in float64
    apply      a block of values: weight -= rate * factor of its parameter * update

A block belongs to one parameter. Nothing is added up by several programs at the same time: the
numbers do not depend on their order. A step with a true `found_inf` changes nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def measure_kernel(
    weight,
    gradient,
    mean,
    square,
    starts,
    ends,
    corrections,
    found_inf,
    grad_scale,
    sums,
    beta2,
    one_minus_beta1,
    one_minus_beta2,
    eps,
    decay,
    NORMS: tl.constexpr,
    GUARDED: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`corrections`: of the means of the gradient and, its root, of the square. `NORMS`: the
    squares of weights and update, for LAMB; otherwise what StableAdamW needs."""
    block = tl.program_id(0)
    start, end = tl.load(starts + block), tl.load(ends + block)
    scale = 1.0
    if GUARDED:
        end = tl.where(tl.load(found_inf) != 0, start, end)
        scale = 1.0 / tl.load(grad_scale)
    of_mean, of_root = tl.load(corrections), tl.load(corrections + 1)
    first = tl.zeros((BLOCK,), tl.float32)
    second = tl.zeros((BLOCK,), tl.float32)
    for offset in range(0, VALUES, BLOCK):
        i = start + offset + tl.arange(0, BLOCK)
        inside = i < end
        w = tl.load(weight + i, mask=inside, other=0.0)
        g = tl.load(gradient + i, mask=inside, other=0.0) * scale
        m = tl.load(mean + i, mask=inside, other=0.0)
        v = tl.load(square + i, mask=inside, other=0.0)
        m += one_minus_beta1 * (g - m)
        v = beta2 * v + one_minus_beta2 * g * g
        root = tl.sqrt(v) / of_root
        update = (m / of_mean) / (root + eps) + decay * w
        if NORMS:
            first += w * w
            second += tl.where(inside, update * update, 0.0)
        else:
            ratio = g / tl.maximum(root, eps)
            first += tl.where(inside, ratio * ratio, 0.0)
        tl.store(mean + i, m, mask=inside)
        tl.store(square + i, v, mask=inside)
        tl.store(gradient + i, update, mask=inside)
    tl.store(sums + 2 * block, tl.sum(first, 0))
    tl.store(sums + 2 * block + 1, tl.sum(second, 0))


@triton.jit
def add_up_kernel(parts, firsts, sums, BLOCK: tl.constexpr):
    """`firsts`: the first block of each parameter, and behind the last one's."""
    param = tl.program_id(0)
    begin, end = tl.load(firsts + param), tl.load(firsts + param + 1)
    first = tl.zeros((BLOCK,), tl.float64)
    second = tl.zeros((BLOCK,), tl.float64)
    for start in range(begin, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < end
        first += tl.load(parts + 2 * i, mask=inside, other=0.0).to(tl.float64)
        second += tl.load(parts + 2 * i + 1, mask=inside, other=0.0).to(tl.float64)
    tl.store(sums + 2 * param, tl.sum(first, 0))
    tl.store(sums + 2 * param + 1, tl.sum(second, 0))


@triton.jit
def apply_kernel(
    weight,
    update,
    starts,
    ends,
    owners,
    factors,
    found_inf,
    rate,
    GUARDED: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    start, end = tl.load(starts + block), tl.load(ends + block)
    if GUARDED:
        end = tl.where(tl.load(found_inf) != 0, start, end)
    scaled_rate = rate * tl.load(factors + tl.load(owners + block))
    for offset in range(0, VALUES, BLOCK):
        i = start + offset + tl.arange(0, BLOCK)
        inside = i < end
        w = tl.load(weight + i, mask=inside, other=0.0)
        u = tl.load(update + i, mask=inside, other=0.0)
        tl.store(weight + i, w - scaled_rate * u, mask=inside)
