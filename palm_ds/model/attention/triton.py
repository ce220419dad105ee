"""Attention over packed rows by our own Triton kernels: flash attention whose dropout masks are
those of `dropout: counter`, computed where they are needed. No mask is in memory, windows cost what
they hold, and the same numbers come out on every run. Texts whose tokens do not all attend to one
another cost as much as others of their length.

The kernels (`attention_triton_kernels`) are imported where they are first launched, since that
needs triton. The operators are opaque to torch.compile: a layer with them compiles as one graph.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import torch

from palm_ds.model.attention.plan import AttentionPlan
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.ops.dropout import drop_threshold, keep_rate

_Operator = TypeVar("_Operator")


def plan_triton(batch: Batch) -> AttentionPlan:
    visibility = None if batch.visibility is None else batch.visibility.flatten(1).contiguous()
    return AttentionPlan(
        kernel="triton",
        compute=triton_attention,
        bounds=sequence_bounds(batch),
        visibility=visibility,
    )


def sequence_bounds(batch: Batch) -> torch.Tensor:
    """(2, tokens) int32: where the sequence of each token begins and where it has ended."""
    at = torch.arange(batch.input_ids.numel(), device=batch.input_ids.device, dtype=torch.int32)
    ends = batch.cu_seqlens[1:]
    sequence = torch.searchsorted(ends, at, right=True)  # the first that ends later
    return torch.stack([batch.cu_seqlens[sequence], ends[sequence]])


def triton_attention(
    qkv: torch.Tensor, plan: AttentionPlan, num_heads: int, dropout: float, window: int | None
) -> torch.Tensor:
    assert not dropout or plan.keys is not None, "choose_kernels says so"
    rows, length, tripled = qkv.shape
    hashes = column_hashes = None
    if dropout and plan.keys is not None:
        hashes = plan.keys.tokens.flatten()
        column_hashes = plan.keys.columns[:length].repeat(rows)
    parts = qkv.reshape(rows * length, 3, num_heads, tripled // 3 // num_heads)
    arrays = plan.bounds, plan.visibility, hashes, column_hashes
    window = None if window is None else min(window, length)
    out, *_ = packed_forward(parts, *arrays, dropout, window)
    return out.view(rows, length, tripled // 3)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    parts, bounds, visibility, _, column_hashes, *ctx.options = inputs
    out, sums, row_hashes = output
    ctx.save_for_backward(parts, bounds, visibility, row_hashes, column_hashes, out, sums)


def _backward(ctx: Any, grad: torch.Tensor, *_: None) -> tuple[torch.Tensor | None, ...]:
    return packed_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.options), *[None] * 6


def _differentiable(operator: _Operator) -> _Operator:
    torch.library.register_autograd("palm_ds::packed_forward", _backward, setup_context=_save)
    return operator


@_differentiable
@torch.library.custom_op("palm_ds::packed_forward", mutates_args=())
def packed_forward(
    parts: torch.Tensor,
    bounds: torch.Tensor,
    visibility: torch.Tensor | None,
    hashes: torch.Tensor | None,
    column_hashes: torch.Tensor | None,
    dropout: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of query, key and value (tokens, 3, heads, head size): the output (tokens, heads, head size),
    and for the backward pass the log2 of the sums of its softmax, (heads, tokens) fp32, and the
    hashes of tokens for each head, (heads, tokens) int32, empty without dropout."""
    parts = parts.contiguous()
    out, sums, row_hashes = _outputs(parts, dropout)
    blocks = _blocks(parts, dropout, forward=True)
    with torch.cuda.device_of(parts):
        _kernels().forward_kernel[_grid(parts, blocks)](
            *(parts, bounds, visibility, hashes, column_hashes, out, sums, row_hashes),
            **_arguments(parts, dropout, window),
            **blocks.options(),
        )
    return out, sums, row_hashes


@packed_forward.register_fake
def _(parts, bounds, visibility, hashes, column_hashes, dropout, window):  # noqa: ANN001, ANN202
    return _outputs(parts, dropout)


def _outputs(
    parts: torch.Tensor, dropout: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, _, heads, size = parts.shape
    sums = parts.new_empty(heads, tokens, dtype=torch.float32)
    hashes = parts.new_empty(heads, tokens if dropout else 0, dtype=torch.int32)
    return parts.new_empty(tokens, heads, size), sums, hashes


@torch.library.custom_op("palm_ds::packed_backward", mutates_args=())
def packed_backward(
    grad: torch.Tensor,
    parts: torch.Tensor,
    bounds: torch.Tensor,
    visibility: torch.Tensor | None,
    row_hashes: torch.Tensor | None,
    column_hashes: torch.Tensor | None,
    out: torch.Tensor,
    sums: torch.Tensor,
    dropout: float,
    window: int | None,
) -> torch.Tensor:
    """The gradient of `parts`."""
    parts = parts.contiguous()
    products, d_parts = torch.empty_like(sums), torch.empty_like(parts)
    blocks = _blocks(parts, dropout, forward=False)
    arguments = {**_arguments(parts, dropout, window), **blocks.options()}
    ahead, grid = (parts, bounds, visibility, row_hashes, column_hashes), _grid(parts, blocks)
    behind, kernels = (sums, grad, products, d_parts), _kernels()
    with torch.cuda.device_of(parts):
        kernels.backward_query_kernel[grid](*ahead, out, *behind, **arguments)
        kernels.backward_key_kernel[grid](*ahead, *behind, **arguments)
    return d_parts


@packed_backward.register_fake
def _(grad, parts, *others):  # noqa: ANN001, ANN002, ANN202
    return torch.empty_like(parts, memory_format=torch.contiguous_format)


@dataclass(frozen=True, kw_only=True)
class _Blocks:
    """Block sizes of a kernel: fixed for a head size, a dtype, and whether there is dropout, since
    other blocks add up in another order."""

    rows: int
    columns: int
    warps: int
    stages: int

    def options(self) -> dict[str, int]:
        options = {"BLOCK_M": self.rows, "BLOCK_N": self.columns}
        return {**options, "num_warps": self.warps, "num_stages": self.stages}


def _blocks(parts: torch.Tensor, dropout: float, *, forward: bool) -> _Blocks:
    """Heads of 64: the fastest of sixteen on an H200 for rows of 512 with several texts
    (docs/speed.md). All fit the registers and the 99 KiB of shared memory of the smallest cards
    from compute capability 8.0 on."""
    if parts.dtype == torch.float32:
        return _Blocks(rows=32, columns=32, warps=8 if parts.shape[-1] > 64 else 4, stages=1)
    if parts.shape[-1] > 64:
        if forward:
            return _Blocks(rows=128, columns=64, warps=8, stages=2)
        return _Blocks(rows=64, columns=64, warps=8, stages=1)
    if forward:
        return _Blocks(rows=128 if dropout else 64, columns=64, warps=4, stages=3)
    if dropout:
        return _Blocks(rows=64, columns=32, warps=4, stages=3)
    return _Blocks(rows=64, columns=64, warps=4, stages=2)


def _kernels() -> ModuleType:
    return importlib.import_module("palm_ds.model.attention.triton_kernels")


def _grid(parts: torch.Tensor, blocks: _Blocks) -> tuple[int, int]:
    return -(-parts.shape[0] // blocks.rows), parts.shape[2]


def _arguments(
    parts: torch.Tensor, dropout: float, window: int | None
) -> dict[str, int | float | str | None]:
    """Arguments that the kernels share. fp32 is multiplied in TF32 where torch does, else in three
    products of TF32, which lose about as little as fp32: without tensor cores the blocks spill
    registers."""
    tokens, _, heads, size = parts.shape
    fast = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return {
        **{"tokens": tokens, "scale": size**-0.5},
        **{"HEADS": heads, "D": size, "BLOCK_D": max(16, 1 << (size - 1).bit_length())},
        "WINDOW": window,
        "DROPPED": drop_threshold(dropout) if dropout else None,
        "INVERSE_KEEP": 1 / keep_rate(dropout),
        "PRECISION": "tf32" if fast else "tf32x3",
    }
