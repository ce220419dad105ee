"""The Triton kernels of `attention_triton`. Imported where a kernel is needed: it needs triton.

    forward    a block of queries: over the keys of its sequences, softmax and output block by block
    backward   a block of queries: its gradient; then a block of keys: its gradient and the value's

A block is neighboring tokens, whatever sequences they belong to; the keys from the start of its
first sequence to the end of its last are gone through, so short sequences share the work. Nothing
is added up by several programs: the numbers do not depend on their order.

Layouts: qkv (tokens, 3, heads, head size); out (tokens, heads, head size); row sums (heads, tokens)
fp32; bounds (2, tokens) int32, the start and end of each token's sequence; visibility None or
(2, tokens) int32, the order and limit of each token; hashes (tokens,) int64, row hashes
(heads, tokens) and column hashes (tokens,) int32, None without dropout. D is the head size, BLOCK_D
the power of two that it is padded to.
"""

from __future__ import annotations

import triton
import triton.language as tl

from palm_ds.model.ops import dropout

_FIRST = tl.constexpr(dropout.MIX_FIRST % 2**64)
_SECOND = tl.constexpr(dropout.MIX_SECOND % 2**64)
_GOLDEN_32 = tl.constexpr(dropout.GOLDEN_32)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def forward_kernel(
    qkv,
    bounds,
    visibility,
    hashes,
    column_hashes,
    out,
    sums,
    row_hashes,
    tokens,
    scale,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    DROPPED: tl.constexpr,
    INVERSE_KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """For the backward pass, `sums` gets the log2 of the sum of each row's exponentials, and
    `row_hashes` the hash of each token for this head."""
    head = tl.program_id(1)
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first, last, begin, end = _range(bounds, i, tokens, WINDOW)
    query = _load(qkv, i, tokens, head, 3 * HEADS, D, BLOCK_D)
    row_hash = i
    if DROPPED is not None:
        row_hash = _row_hash(hashes, i, tokens, head)
        tl.store(row_hashes + head * tokens + i, row_hash, mask=i < tokens)
    factor = scale * _LOG2_E
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(begin, end, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        key = _load(qkv, j, tokens, HEADS + head, 3 * HEADS, D, BLOCK_D)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        inside = (j[None, :] >= first[:, None]) & (j[None, :] < last[:, None])
        if visibility is not None:
            inside &= _visible(visibility, i[:, None], j[None, :], tokens)
        scores = tl.where(inside, scores, float("-inf"))
        risen = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(risen == float("-inf"), 0.0, risen * factor)  # no key of this row so far
        weights = tl.exp2(scores * factor - base[:, None])
        shrink = tl.exp2(highest * factor - base)
        total = total * shrink + tl.sum(weights, 1)
        if DROPPED is not None:
            column_hash = tl.load(column_hashes + j, mask=j < tokens, other=0)
            weights = tl.where(
                _kept(row_hash[:, None], column_hash[None, :], DROPPED), weights, 0.0
            )
        value = _load(qkv, j, tokens, 2 * HEADS + head, 3 * HEADS, D, BLOCK_D)
        acc *= shrink[:, None]
        acc = tl.dot(weights.to(value.dtype), value, acc, input_precision=PRECISION)
        highest = risen
    total = tl.where(i < tokens, total, 1.0)
    _store(out, acc * (INVERSE_KEEP / total)[:, None], i, tokens, head, HEADS, D, BLOCK_D)
    tl.store(sums + head * tokens + i, highest * factor + tl.log2(total), mask=i < tokens)


@triton.jit
def backward_query_kernel(
    qkv,
    bounds,
    visibility,
    row_hashes,
    column_hashes,
    out,
    sums,
    grad,
    products,
    d_qkv,
    tokens,
    scale,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    DROPPED: tl.constexpr,
    INVERSE_KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`products` gets output x gradient of each row, which the other kernel needs: the row sums of
    weights times their gradient (FlashAttention, Dao et al. 2022, appendix B.4)."""
    head = tl.program_id(1)
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first, last, begin, end = _range(bounds, i, tokens, WINDOW)
    query = _load(qkv, i, tokens, head, 3 * HEADS, D, BLOCK_D)
    grads = _load(grad, i, tokens, head, HEADS, D, BLOCK_D)
    outputs = _load(out, i, tokens, head, HEADS, D, BLOCK_D)
    row_hash = _hash(row_hashes + head * tokens, i, tokens, DROPPED)
    product = tl.sum(outputs.to(tl.float32) * grads.to(tl.float32), 1)
    tl.store(products + head * tokens + i, product, mask=i < tokens)
    log_sum = tl.load(sums + head * tokens + i, mask=i < tokens, other=0.0)
    d_query = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(begin, end, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        key = _load(qkv, j, tokens, HEADS + head, 3 * HEADS, D, BLOCK_D)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * (scale * _LOG2_E)
        inside = _inside(j[None, :], first[:, None], last[:, None])
        if visibility is not None:
            inside &= _visible(visibility, i[:, None], j[None, :], tokens)
        weights = tl.where(inside, tl.exp2(scores - log_sum[:, None]), 0.0)
        value = _load(qkv, j, tokens, 2 * HEADS + head, 3 * HEADS, D, BLOCK_D)
        d_weights = tl.dot(grads, tl.trans(value), input_precision=PRECISION)
        if DROPPED is not None:
            column_hash = _hash(column_hashes, j, tokens, DROPPED)
            kept = _kept(row_hash[:, None], column_hash[None, :], DROPPED)
            d_weights = tl.where(
                kept, d_weights * INVERSE_KEEP - product[:, None], -product[:, None]
            )
        else:
            d_weights -= product[:, None]
        d_scores = weights * d_weights
        d_query = tl.dot(d_scores.to(key.dtype), key, d_query, input_precision=PRECISION)
    _store(d_qkv, d_query * scale, i, tokens, head, 3 * HEADS, D, BLOCK_D)


@triton.jit
def backward_key_kernel(
    qkv,
    bounds,
    visibility,
    row_hashes,
    column_hashes,
    sums,
    grad,
    products,
    d_qkv,
    tokens,
    scale,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    DROPPED: tl.constexpr,
    INVERSE_KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """All blocks of scores are transposed here, (keys, queries). A key is attended to by tokens of
    the sequence that its own token attends to."""
    head = tl.program_id(1)
    j = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first, last, begin, end = _range(bounds, j, tokens, WINDOW)
    key = _load(qkv, j, tokens, HEADS + head, 3 * HEADS, D, BLOCK_D)
    value = _load(qkv, j, tokens, 2 * HEADS + head, 3 * HEADS, D, BLOCK_D)
    column_hash = _hash(column_hashes, j, tokens, DROPPED)
    d_key = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    d_value = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(begin, end, BLOCK_N):
        i = start + tl.arange(0, BLOCK_N)
        query = _load(qkv, i, tokens, head, 3 * HEADS, D, BLOCK_D)
        log_sum = tl.load(sums + head * tokens + i, mask=i < tokens, other=0.0)
        scores = tl.dot(key, tl.trans(query), input_precision=PRECISION) * (scale * _LOG2_E)
        inside = _inside(i[None, :], first[:, None], last[:, None])
        if visibility is not None:
            inside &= _visible(visibility, i[None, :], j[:, None], tokens)
        weights = tl.where(inside, tl.exp2(scores - log_sum[None, :]), 0.0)
        grads = _load(grad, i, tokens, head, HEADS, D, BLOCK_D)
        product = tl.load(products + head * tokens + i, mask=i < tokens, other=0.0)
        d_weights = tl.dot(value, tl.trans(grads), input_precision=PRECISION)
        dropped = weights
        if DROPPED is not None:
            row_hash = _hash(row_hashes + head * tokens, i, tokens, DROPPED)
            kept = _kept(row_hash[None, :], column_hash[:, None], DROPPED)
            dropped = tl.where(kept, weights, 0.0)
            d_weights = tl.where(
                kept, d_weights * INVERSE_KEEP - product[None, :], -product[None, :]
            )
        else:
            d_weights -= product[None, :]
        d_value = tl.dot(dropped.to(grads.dtype), grads, d_value, input_precision=PRECISION)
        d_scores = weights * d_weights
        d_key = tl.dot(d_scores.to(query.dtype), query, d_key, input_precision=PRECISION)
    _store(d_qkv, d_key * scale, j, tokens, HEADS + head, 3 * HEADS, D, BLOCK_D)
    _store(d_qkv, d_value * INVERSE_KEEP, j, tokens, 2 * HEADS + head, 3 * HEADS, D, BLOCK_D)


@triton.jit
def _range(bounds, i, tokens, WINDOW: tl.constexpr):
    """Range that each token attends to, [first, last), and the range of all of them, [begin,
    end)."""
    first = tl.load(bounds + i, mask=i < tokens, other=0)
    last = tl.load(bounds + tokens + i, mask=i < tokens, other=0)
    if WINDOW is not None:
        first = tl.maximum(first, i - WINDOW)
        last = tl.minimum(last, i + WINDOW + 1)
    begin = tl.min(tl.where(i < tokens, first, tokens), 0)
    return first, last, begin, tl.max(last, 0)


@triton.jit
def _inside(at, first, last):
    """first <= at < last, in one comparison. Anything for rows beyond the last token, which are not
    stored."""
    return (at - first).to(tl.uint32) < (last - first).to(tl.uint32)


@triton.jit
def _visible(visibility, i, j, tokens):
    """Whether the queries i attend to the keys j of their sequence."""
    order = tl.load(visibility + j, mask=j < tokens, other=0)
    limit = tl.load(visibility + tokens + i, mask=i < tokens, other=0)
    return (order <= limit) | (i == j)


@triton.jit
def _load(x, at, tokens, head, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The vectors of one head at the tokens `at`, (at, BLOCK_D), of x (tokens, HEADS, D)."""
    d = tl.arange(0, BLOCK_D)
    place = at.to(tl.int64)[:, None] * (HEADS * D) + head * D + d[None, :]
    return tl.load(x + place, mask=(at < tokens)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _store(x, block, at, tokens, head, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    place = at.to(tl.int64)[:, None] * (HEADS * D) + head * D + d[None, :]
    inside = (at < tokens)[:, None] & (d < D)[None, :]
    tl.store(x + place, block.to(x.dtype.element_ty), mask=inside)


# Dropout: `palm_ds.model.ops.dropout`, number for number -----


@triton.jit
def _row_hash(hashes, at, tokens, head):
    """The odd hash of each token for this head: `odd_bits(keys.of_heads(heads).tokens)`."""
    mixed = (tl.load(hashes + at, mask=at < tokens, other=0) + head).to(tl.uint64)
    mixed = (mixed ^ (mixed >> 30)) * _FIRST
    mixed = (mixed ^ (mixed >> 27)) * _SECOND
    return (mixed ^ (mixed >> 31)).to(tl.int32) | 1


@triton.jit
def _hash(hashes, at, tokens, DROPPED: tl.constexpr):
    hashed = at
    if DROPPED is not None:
        hashed = tl.load(hashes + at, mask=at < tokens, other=0)
    return hashed


@triton.jit
def _kept(rows, columns, DROPPED: tl.constexpr):
    """`keep_mask`."""
    bits = rows * columns
    return (bits ^ (bits >> 15)) * _GOLDEN_32 >= DROPPED
