"""Dropout whose masks follow from where a number is, not from what was drawn before it.

    (seed, step) ──> key of a micro-batch (`Batch.dropout_key`)
    key, row of the step, position in the row ──> hash of a token ──layer, place──> its hash there
    hash of the token x hash of the column, mixed ──> 32 bits: keep or drop

A column is a channel, or the position that a token attends to. So any number of processes, any ZeRO
stage, micro-batch and padding gives the same masks, on any device; a layer that is recomputed gets
its masks again, and a resumed run needs no random state. This is the kernel `counter`. `plain` is
torch's dropout, which draws from the generator of a process: the same rate, but other masks for
every layout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from palm_ds.model.inputs.batch import Batch

_RANGE = 1 << 32  # the drop rates that 32 bits can express
_CHUNK = 1 << 16  # numbers whose bits fit a CPU's cache
_ROW_STRIDE = 1 << 32  # more than the positions of a row
# splitmix64's constants (Steele, Lea and Flood 2014) and 2^32 / golden ratio, as signed integers
GOLDEN_64, MIX_FIRST, MIX_SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685
GOLDEN_32 = -1640531535


@dataclass(frozen=True)
class DropoutKeys:
    """Keys that the masks of a micro-batch, of a layer or of a place in it are computed from."""

    tokens: torch.Tensor
    """(rows, length) or another shape, int64: a hash of each token."""
    columns: torch.Tensor
    """(most,) int32, odd: a hash of each column that a mask may have."""

    def site(self, number: int | torch.Tensor) -> DropoutKeys:
        """The keys of a layer, or of a place in one."""
        return replace(self, tokens=mix_bits(self.tokens + number))

    def sites(self, numbers: range) -> list[DropoutKeys]:
        """`site` of each number, computed together: a few kernels instead of a few for each."""
        each = torch.arange(numbers.start, numbers.stop, device=self.tokens.device)
        keys = self.site(each.view(-1, *[1] * self.tokens.dim()))
        return [replace(self, tokens=own) for own in keys.tokens.unbind()]

    def of_heads(self, heads: int) -> DropoutKeys:
        """Keys for each attention head: tokens (heads, rows * length)."""
        numbers = torch.arange(heads, device=self.tokens.device)[:, None]
        return replace(self, tokens=self.tokens.flatten()).site(numbers)

    def select(self, positions: torch.Tensor) -> DropoutKeys:
        """The keys at flat positions (n,)."""
        return replace(self, tokens=self.tokens.flatten().index_select(0, positions))

    def mask(self, like: torch.Tensor, rate: float) -> torch.Tensor:
        """1 to keep and 0 to drop, in the shape (of tokens, columns) and dtype of `like`."""
        columns = self.columns[: like.shape[-1]]
        return keep_mask(odd_bits(self.tokens.flatten()), columns, rate, like.dtype).view_as(like)


def dropout_keys(batch: Batch, columns: int) -> DropoutKeys:
    """The keys of a micro-batch, for masks of at most `columns` columns. Without a `dropout_key`
    they are drawn from torch's generator."""
    key, device = batch.dropout_key, batch.input_ids.device
    if key is None:
        key = int(torch.randint(2**63 - 1, ()))
    rows, length = batch.input_ids.shape
    numbers = torch.arange(batch.first_row, batch.first_row + rows, device=device) * _ROW_STRIDE
    tokens = mix_bits((numbers[:, None] + torch.arange(length, device=device)) * GOLDEN_64 + key)
    each = torch.arange(1, columns + 1, device=device) * -_ROW_STRIDE
    return DropoutKeys(tokens, odd_bits(mix_bits(each * GOLDEN_64 + key)))


def table_keys(batch: Batch, keys: DropoutKeys, rows: int) -> DropoutKeys:
    """The keys of a table of the model with this many rows, which all micro-batches of a step
    share. `keys`: those of the micro-batch."""
    key, device = batch.dropout_key, batch.input_ids.device
    if key is None:
        key = int(torch.randint(2**63 - 1, ()))
    numbers = -1 - torch.arange(rows, device=device)  # those of tokens are not negative
    return replace(keys, tokens=mix_bits(numbers * GOLDEN_64 + key))


def dropout(x: torch.Tensor, rate: float, keys: DropoutKeys | None) -> torch.Tensor:
    """Dropout of (..., columns). `rate` is 0 outside training; without keys, torch draws."""
    if rate == 0.0:
        return x
    if keys is None:
        return F.dropout(x, rate)
    return x * keys.mask(x, rate).mul_(1 / keep_rate(rate))


def add_dropout(
    x: torch.Tensor, y: torch.Tensor, rate: float, keys: DropoutKeys | None
) -> torch.Tensor:
    """x + dropout(y), likewise."""
    if rate == 0.0:
        return x + y
    if keys is None:
        return x + F.dropout(y, rate)
    if torch.compiler.is_compiling():  # the mask is computed again for the backward pass
        return x + y * keys.mask(y, rate) * (1 / keep_rate(rate))
    return _AddDropout.apply(x, y, keys.mask(y, rate), 1 / keep_rate(rate))


def keep_rate(rate: float) -> float:
    """The share that 32 bits keep at this drop rate: the exact value to rescale by."""
    return 1 - round(rate * _RANGE) / _RANGE


def drop_threshold(rate: float) -> int:
    """Random int32 below this are dropped."""
    return round(rate * _RANGE) - _RANGE // 2  # int32 starts at -2^31


def keep_mask(
    rows: torch.Tensor, columns: torch.Tensor, rate: float, dtype: torch.dtype
) -> torch.Tensor:
    """A mask (rows, columns) of 1 to keep and 0 to drop, from odd random int32 of each row and
    column. Mixing their product leaves no pattern of a product."""
    dropped = drop_threshold(rate)
    if rows.device.type != "cpu" or torch.compiler.is_compiling():
        return torch.ge(element_bits(rows, columns), dropped).to(dtype)
    out = torch.empty(len(rows), len(columns), dtype=dtype)
    chunk = max(_CHUNK // max(len(columns), 1), 1)
    for part, target in zip(rows.split(chunk), out.split(chunk), strict=True):
        torch.ge(element_bits(part, columns), dropped, out=target)
    return out


def odd_bits(hashes: torch.Tensor) -> torch.Tensor:
    """The lower 32 bits of int64 hashes, as odd int32."""
    return hashes.to(torch.int32) | 1


def element_bits(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """32 random bits (rows, columns)."""
    bits = rows[:, None] * columns
    return bits.bitwise_xor_(bits >> 15).mul_(GOLDEN_32)


def mix_bits(x: torch.Tensor) -> torch.Tensor:
    """The finalizer of splitmix64, as `palm_ds.common.rng` has it: a bijection of 64-bit words."""
    x = (x ^ _shifted(x, 30)) * MIX_FIRST
    x = (x ^ _shifted(x, 27)) * MIX_SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x >> bits with zeros from the left; torch repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


class _AddDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, y, mask, scale):
        ctx.save_for_backward(mask)  # not an attribute, which would outlive a recomputed layer
        ctx.scale = scale
        return torch.addcmul(x, y, mask, value=scale)

    @staticmethod
    def backward(ctx: Any, *grads):
        (mask,) = ctx.saved_tensors
        return grads[0], (grads[0] * mask).mul_(ctx.scale), None, None
