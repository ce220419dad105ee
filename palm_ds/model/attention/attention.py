"""Attention within the sequences of packed rows: one definition, and faster forms of it.

    triton       our own kernel, with the masks of `dropout: counter`
    varlen       torch's FlashAttention 2: half precision, compute capability 8.0 and above
    varlen_fa3, varlen_fa4   FlashAttention 3 and 4, where they are installed
    tiles        CPU: neighboring sequences joined up to 128 tokens, one tile at a time; where no
                 gradients are needed, equally long neighbors together; if there are few of them
                 and a row is at most 128 tokens long, replaced by sdpa
    sdpa         torch's scaled_dot_product_attention with a mask
    plain        the definition: softmax(Q K^T / sqrt(head size), within the sequence) V

`plan_attention` prepares what an implementation needs of a batch, once per forward for all layers.
`plain` and `sdpa` hold a mask of (length x length) per row; the others none. With dropout keys,
`triton`, `tiles` and `plain` drop the same weights; the others take none.

Texts whose tokens do not all attend to one another (palm_ds/model/inputs/visibility.py) go through
`triton`, `tiles`, `sdpa` and `plain`; `choose_kernels` leaves out the others. Windows take those
that are read from left to right, not those with queries, which stand far from what they attend to.

Relative positions that add to the scores (palm_ds/model/encoder/positions.py) go through `sdpa` and
`plain` alone.

A `window` is how many tokens a token attends to on each side.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from palm_ds.common.errors import UserError
from palm_ds.model.attention.dense import plain_attention, sdpa
from palm_ds.model.attention.plan import AttentionPlan
from palm_ds.model.attention.tiles import TILE, plan_equal_lengths, plan_tiles
from palm_ds.model.attention.varlen import plan_varlen
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.inputs.visibility import visible
from palm_ds.model.ops.dropout import DropoutKeys

NO_BIAS = "adds nothing to the scores, as this encoder's relative positions do"
_DENSE = {"plain": plain_attention, "sdpa": sdpa}


def plan_attention(
    batch: Batch, kernel: str, *, compiled: bool = False, keys: DropoutKeys | None = None
) -> AttentionPlan:
    """Padding counts as a sequence that attends to itself, so that no row of a softmax is empty.
    `compiled` means that the layers go through torch.compile."""
    plan = None
    if kernel == "tiles" and keys is None and not torch.is_grad_enabled():
        plan = plan_equal_lengths(batch, compiled=compiled)
        kernel = "sdpa" if batch.input_ids.shape[1] <= TILE else kernel  # faster there
    plan = plan or _plan(batch, kernel, compiled=compiled)
    return replace(plan, keys=keys, displaced=batch.displaced)


def attend(
    qkv: torch.Tensor,
    plan: AttentionPlan,
    *,
    num_heads: int,
    dropout: float = 0.0,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of every token over its sequence: (rows, length, 3 hidden) -> (..., hidden)."""
    if window is not None and plan.displaced:
        raise UserError(
            "windows of attention: a task has queries or masks, which stand far from what they "
            "attend to; use an encoder without windows"
        )
    if plan.bias is not None and plan.kernel not in _DENSE:
        raise UserError(
            f'kernels: attention: "{plan.kernel}" {NO_BIAS}; use "sdpa", "plain" or "auto"'
        )
    return plan.compute(qkv, plan, num_heads, dropout, window)


def _plan(batch: Batch, kernel: str, *, compiled: bool) -> AttentionPlan:
    """Without the dropout keys. An implementation that defines operators is imported here."""
    if kernel == "tiles":
        return plan_tiles(batch, compiled=compiled)
    if kernel == "triton":
        from palm_ds.model.attention.triton import plan_triton

        return plan_triton(batch)
    if kernel in _DENSE:
        ids = batch.sequence_ids
        mask = ids[:, :, None] == ids[:, None, :]
        if batch.visibility is not None:
            mask &= visible(batch.visibility)
        return AttentionPlan(kernel=kernel, compute=_DENSE[kernel], mask=mask[:, None])
    assert batch.visibility is None, "choose_kernels says so"
    return plan_varlen(batch, kernel, compiled=compiled)
