"""Attention by itself: form by form, and which blocks our own kernel is fastest with.

Rows hold one long text each (`full`) or texts of all lengths (`mixed`). TFLOP/s count what
attention within the texts needs: 4 operations for each pair of tokens and channel, and 10 in the
backward pass.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.gpu_parts.context import Context, Row, seconds_of
from palm_ds.model.attention import triton as attention_triton
from palm_ds.model.attention.attention import attend, plan_attention
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.inputs.batch import Batch, PackedText
from palm_ds.model.kernels import IMPLEMENTATIONS
from palm_ds.model.ops.dropout import dropout_keys
from palm_ds.model.ops.implementation import Environment, Implementation
from palm_ds.runtime.device.torch_settings import DTYPES

TOKENS = 65_536
REPEATS = 5
BLOCKS = ((64, 32), (64, 64), (64, 128), (128, 32), (128, 64), (128, 128))
WARPS_AND_STAGES = ((4, 2), (8, 2), (4, 3))


def alone(context: Context) -> None:
    for heads in (2,) if context.toy else (12, 6):  # 64 or 128 channels each
        for length in (64,) if context.toy else (512, 128, 2048, 8192):
            for filling in ("full", "mixed"):
                case = _Case(context, heads, length, filling)
                for form, dropout in _forms(case):
                    names = dict(head_size=case.size, length=length, rows=filling, form=form)
                    rate = 0.1 if dropout else 0.0
                    context.measure(
                        lambda c=case, f=form, r=rate: c.measure(f, r),
                        needs=2,
                        **names,
                        dropout=rate,
                    )
    if not context.toy and context.device.type == "cuda":
        _blocks(context)


def _forms(case: _Case) -> Iterator[tuple[str, str | None]]:
    """(form, the kind of dropout or None); forms that cannot run are left out."""
    for each in IMPLEMENTATIONS["attention"]:
        if not case.objection(each, 0.0, "counter"):
            yield each.name, None
        for dropout in ("plain", "counter"):
            if not case.objection(each, 0.1, dropout):
                yield each.name, dropout
                break


class _Case:
    """Rows of one length, with a fixed number of tokens in all."""

    def __init__(self, context: Context, heads: int, length: int, filling: str):
        self.context, self.heads = context, heads
        self.size = (32 if context.toy else 768) // heads
        self.dtype = DTYPES[context.precision]
        rows = (128 if context.toy else TOKENS) // length
        self.batch = _batch(rows, length, filling).to(context.device)
        shape = (rows, length, 3 * heads * self.size)
        self.qkv = torch.randn(shape, device=context.device, dtype=self.dtype, requires_grad=True)
        self.grad = torch.randn_like(self.qkv[..., : heads * self.size])
        self.pairs = float((self.batch.cu_seqlens.diff().double() ** 2).sum())

    def objection(self, each: Implementation, rate: float, dropout: str) -> str | None:
        config = EncoderConfig(
            vocab_size=8,
            hidden_size=self.heads * self.size,
            num_heads=self.heads,
            attention_dropout=rate,
        )
        device, dtype = self.context.device, self.dtype
        return each.unavailable(
            Environment(device=device, dtype=dtype, config=config, dropout=dropout)
        )

    def measure(self, form: str, rate: float) -> Row:
        own = form in ("varlen", "sdpa")
        keys = None if own or not rate else dropout_keys(self.batch, self.qkv.shape[1])
        plan = plan_attention(self.batch, form, keys=keys)
        forward = lambda: attend(self.qkv, plan, num_heads=self.heads, dropout=rate)  # noqa: E731
        out = forward()
        backward = lambda: torch.autograd.grad(out, self.qkv, self.grad, retain_graph=True)  # noqa: E731
        work = self.heads * self.size * self.pairs
        times = {"forward": self._seconds(forward), "backward": self._seconds(backward)}
        found: Row = {f"{name}_ms": round(1e3 * each, 3) for name, each in times.items()}
        found["forward_tflops"] = round(4e-12 * work / times["forward"], 1)
        found["backward_tflops"] = round(10e-12 * work / times["backward"], 1)
        return found

    def _seconds(self, call: Callable[[], object]) -> float:
        repeats = 1 if self.context.toy else REPEATS
        seconds_of(call, self.context.device)
        return statistics.median(seconds_of(call, self.context.device) for _ in range(repeats))


def _batch(rows: int, length: int, filling: str) -> Batch:
    rng = np.random.default_rng(length)
    return Batch.from_rows(
        [[_text(size) for size in _sizes(rng, length, filling)] for _ in range(rows)],
        length=length,
        pad=0,
    )


def _sizes(rng: np.random.Generator, length: int, filling: str) -> Iterator[int]:
    left = length
    while left:
        size = left if filling == "full" else min(int(rng.integers(1, length)), left)
        left -= size
        yield size


def _text(size: int) -> PackedText:
    return PackedText(input_ids=np.zeros(size, np.int64), token_type_ids=np.zeros(size, np.int64))


def _blocks(context: Context) -> None:
    """Our kernel with other blocks than it chooses, in the forward and the backward pass."""
    for heads in (12, 6):
        case = _Case(context, heads, 512, "mixed")
        for rows, columns in BLOCKS:
            for warps, stages in WARPS_AND_STAGES:
                blocks = attention_triton._Blocks(
                    rows=rows, columns=columns, warps=warps, stages=stages
                )
                names = dict(head_size=case.size, length=512, rows="mixed", form="triton")
                with patch.object(attention_triton, "_blocks", lambda *_, b=blocks, **__: b):
                    context.measure(
                        lambda c=case: c.measure("triton", 0.1),
                        needs=8,
                        **names,
                        dropout=0.1,
                        blocks=f"{rows} x {columns}, {warps} warps, {stages} stages",
                    )
