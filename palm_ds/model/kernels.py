"""One plain torch form of each operation, which defines the result, and faster forms of it.

    operation    forms, fastest first
    attention    varlen, tiles, sdpa, plain             see attention.py
    word_loss    chunked, liger, linear_cross_entropy, plain     the masked words' summed loss
    layer_norm   apex, torch
    dropout      bits, plain                            x + dropout(y)
    compile      on, off                                torch.compile of the encoder's layers

`choose_kernels` probes them when a run starts. A form that was asked for by name and cannot run
here is an error; nothing falls back silently. The forms of dropout draw other random numbers for
the same seed, at the same rate; all else agrees with the plain form to rounding.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from palm_ds.common.errors import UserError, suggest
from palm_ds.model.config import EncoderConfig

_WORD_CHUNK = 128  # rows of a piece of the vocabulary product, on a CPU: the piece stays in cache
_STEPS = 1 << 16  # the drop rates that 16 random bits can state


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The form of each operation. The defaults run everywhere and define the result."""

    attention: str = "plain"
    word_loss: str = "plain"
    layer_norm: str = "torch"
    dropout: str = "plain"
    compile: str = "off"


# ---- dropout ----


def add_dropout(x: torch.Tensor, y: torch.Tensor, rate: float, form: str) -> torch.Tensor:
    """x + dropout(y). `rate` is 0 outside training."""
    if rate == 0.0:
        return x + y
    if form == "bits":
        return _AddDropped.apply(x, y, rate)  # type: ignore[return-value]
    return x + F.dropout(y, rate)


def keep_rate(rate: float) -> float:
    """The share that 16 bits keep at this rate: within 1e-5 of 1 - rate, and exact to scale by."""
    return 1 - round(rate * _STEPS) / _STEPS


def keep_mask(like: torch.Tensor, rate: float) -> torch.Tensor:
    """1 to keep, 0 to drop, in the shape and type of `like`. One draw of 64 bits serves 4 numbers:
    drawing is what dropout costs on a CPU (torch's own draws one at a time, in one thread)."""
    count = like.numel()
    draws = torch.empty((count + 3) // 4, dtype=torch.int64, device=like.device)
    bits = draws.random_(-(2**63), None).view(torch.int16)[:count].view(like.shape)
    dropped = round(rate * _STEPS) - _STEPS // 2  # int16 starts at -32768
    return torch.ge(
        bits, dropped, out=torch.empty_like(like, memory_format=torch.contiguous_format)
    )


class _AddDropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, y, rate):
        ctx.mask, ctx.scale = keep_mask(y, rate), 1 / keep_rate(rate)
        return torch.addcmul(x, y, ctx.mask, value=ctx.scale)

    @staticmethod
    def backward(ctx: Any, *grads):
        return grads[0], (grads[0] * ctx.mask).mul_(ctx.scale), None


# ---- the masked words' loss ----


def word_loss(
    rows: torch.Tensor, table: torch.Tensor, bias: torch.Tensor, targets: torch.Tensor, form: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy of rows @ table.T + bias in fp32, summed, and the number of right guesses.

    rows (n, hidden), table (words, hidden), bias (words,), targets (n,).
    """
    return _WORD_LOSS[form](rows, table, bias, targets)


def _plain_word_loss(rows, table, bias, targets):
    logits = F.linear(rows, table, bias)  # (n, words)
    loss = F.cross_entropy(logits.float(), targets, reduction="sum")
    return loss, (logits.detach().argmax(-1) == targets).sum()


def _chunked_word_loss(rows, table, bias, targets):
    fits = rows.device.type == "cpu" and rows.dtype == torch.float32
    return _ChunkedWordLoss.apply(rows, table, bias, targets, _WORD_CHUNK if fits else 4096)


class _ChunkedWordLoss(torch.autograd.Function):
    """Some rows at a time, with their gradient at once: the logits are made, turned into their
    gradient in place, multiplied and forgotten. backward() only scales."""

    @staticmethod
    def forward(ctx: Any, rows, table, bias, targets, chunk):
        wanted = any(ctx.needs_input_grad[:3])
        loss = torch.zeros((), dtype=torch.float32, device=rows.device)
        correct = torch.zeros((), dtype=torch.int64, device=rows.device)
        grads = [torch.zeros_like(x) for x in (rows, table, bias)] if wanted else []
        for at in range(0, len(rows), chunk):
            piece, target = rows[at : at + chunk], targets[at : at + chunk, None]
            logits = torch.addmm(bias, piece, table.t()).float()
            best, guess = logits.max(-1, keepdim=True)
            correct += (guess == target).sum()
            loss += (best - logits.gather(1, target)).sum()
            total = logits.sub_(best).exp_().sum(-1, keepdim=True)
            loss += total.log().sum()
            if wanted:
                logits.div_(total).scatter_add_(1, target, -torch.ones_like(total))
                error = logits.to(rows.dtype)  # softmax - one-hot, (chunk, words)
                grads[0][at : at + chunk] = error @ table
                grads[1].addmm_(error.t(), piece)
                grads[2].add_(logits.sum(0))
        ctx.save_for_backward(*grads)
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, *grads):
        to_rows, to_table, to_bias = (x * grads[0].to(x.dtype) for x in ctx.saved_tensors)
        return to_rows, to_table, to_bias, None, None


def _torch_word_loss(rows, table, bias, targets):
    loss = F.linear_cross_entropy(
        rows,
        table,
        targets,
        linear_bias=bias,
        reduction="sum",
        options=nn.LinearCrossEntropyOptions(),
    )
    return loss.float(), _right_guesses(rows, table, bias, targets)


def _liger_word_loss(rows, table, bias, targets):
    from liger_kernel.ops.fused_linear_cross_entropy import (  # type: ignore[import-not-found]
        LigerFusedLinearCrossEntropyFunction,
    )

    arguments = (None, -100, 0.0, 0.0, "sum")  # no class weights, no target ignored, no smoothing
    result = LigerFusedLinearCrossEntropyFunction.apply(rows, table, targets, bias, *arguments)
    loss = result[0] if isinstance(result, tuple) else result
    return loss.float(), _right_guesses(rows, table, bias, targets)


@torch.no_grad()
def _right_guesses(rows, table, bias, targets):
    """For forms that never show their logits: a product of its own, 4096 rows at a time."""
    pairs = zip(rows.split(4096), targets.split(4096), strict=True)
    return torch.stack([(F.linear(x, table, bias).argmax(-1) == y).sum() for x, y in pairs]).sum()


_WORD_LOSS = {
    "plain": _plain_word_loss,
    "chunked": _chunked_word_loss,
    "linear_cross_entropy": _torch_word_loss,
    "liger": _liger_word_loss,
}


# ---- layer norm ----


def layer_norm(width: int, eps: float, form: str) -> nn.Module:
    """A LayerNorm with `weight` and `bias`."""
    if form == "apex":
        return importlib.import_module("apex.normalization").FusedLayerNorm(width, eps=eps)
    return nn.LayerNorm(width, eps=eps)


# ---- choosing ----


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Where a run computes, as far as forms differ by it."""

    device: torch.device
    dtype: torch.dtype
    config: EncoderConfig


@dataclass(frozen=True)
class Implementation:
    """A form of an operation: why it cannot run in a setting, or only why it is not the first
    choice there; none: it can, it is."""

    name: str
    unavailable: Callable[[Environment], str | None] = lambda _: None
    not_preferred: Callable[[Environment], str | None] = lambda _: None


def choose_kernels(
    requested: Mapping[str, str],
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    config: EncoderConfig,
) -> tuple[Kernels, list[str]]:
    """The fastest form of each operation, or the one asked for ("auto": choose), and a line each.

    Raises UserError for an unknown operation or form, and for one that cannot run here.
    """
    known = [field.name for field in fields(Kernels)]
    for name in requested:
        if name not in known:
            raise UserError(f'kernels: unknown operation "{name}"{suggest(name, known)}')
    where = Environment(device=torch.device(device), dtype=dtype, config=config)
    chosen, lines = {}, []
    for name in known:
        chosen[name], why = _choose(name, requested.get(name, "auto"), where)
        lines.append(f"{name}: {chosen[name]}{why}")
    return Kernels(**chosen), lines


def _choose(name: str, wanted: str, where: Environment) -> tuple[str, str]:
    forms = {form.name: form for form in IMPLEMENTATIONS[name]}
    if wanted != "auto":
        if wanted not in forms:
            known = [*forms, "auto"]
            raise UserError(f'kernels: {name}: no form "{wanted}"{suggest(str(wanted), known)}')
        if reason := forms[wanted].unavailable(where):
            raise UserError(
                f'kernels: {name}: "{wanted}" cannot run here: {reason}; "auto" chooses'
            )
        return wanted, " (asked for)"
    reasons = []
    for form in forms.values():
        if not (reason := form.not_preferred(where) or form.unavailable(where)):
            return form.name, f" ({'; '.join(reasons)})" if reasons else ""
        reasons.append(f"{form.name}: {reason}")
    raise AssertionError(f"{name}: the last form runs everywhere")


def _varlen_missing(where: Environment) -> str | None:
    if where.device.type != "cuda":
        return "needs CUDA"
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen"
    if where.dtype not in (torch.float16, torch.bfloat16):
        return "needs fp16 or bf16"
    if torch.cuda.get_device_capability(where.device) < (8, 0):
        return "needs compute capability 8.0"
    if where.config.attention_dropout:
        return f"has no dropout inside; attention_dropout is {where.config.attention_dropout}"
    return None


def _liger_missing(where: Environment) -> str | None:
    if where.device.type != "cuda":
        return "needs CUDA"
    if importlib.util.find_spec("liger_kernel") is None:
        return "liger-kernel is not installed"
    return _early_gradient(where)


def _torch_word_loss_missing(where: Environment) -> str | None:
    if not hasattr(F, "linear_cross_entropy"):
        return f"torch {torch.__version__} has none, 2.13 does"
    return _early_gradient(where)


def _early_gradient(where: Environment) -> str | None:
    """A form that makes its gradient in the forward makes it before fp16's loss is scaled up."""
    return "in fp16 its gradient would underflow" if where.dtype == torch.float16 else None


def _apex_missing(where: Environment) -> str | None:
    if where.device.type != "cuda":
        return "needs CUDA"
    if importlib.util.find_spec("apex") is None:
        return "NVIDIA apex is not installed"
    if importlib.util.find_spec("fused_layer_norm_cuda") is None:
        return "this apex has no compiled fused_layer_norm_cuda (build NVIDIA apex from source)"
    return None


def _only_cpu(where: Environment) -> str | None:
    return None if where.device.type == "cpu" else "made for CPUs"


def _compile_missing(where: Environment) -> str | None:
    """Compiles a tiny function: a compiler that is there may still not work."""
    try:
        torch.compile(lambda x: x.exp() + 1)(torch.zeros(8, device=where.device))
    except Exception as error:  # torch raises many kinds, of which none is documented
        return f"torch.compile does not work here ({str(error).strip().splitlines()[0]})"
    return None


IMPLEMENTATIONS: dict[str, tuple[Implementation, ...]] = {
    "attention": (
        Implementation("varlen", _varlen_missing),
        Implementation("tiles", _only_cpu),
        Implementation("sdpa"),
        Implementation("plain"),
    ),
    "word_loss": (
        Implementation("chunked", _early_gradient),
        Implementation("liger", _liger_missing),
        Implementation("linear_cross_entropy", _torch_word_loss_missing),
        Implementation("plain"),
    ),
    "layer_norm": (Implementation("apex", _apex_missing), Implementation("torch")),
    "dropout": (Implementation("bits", _only_cpu), Implementation("plain")),
    "compile": (
        Implementation("on", _compile_missing, lambda _: "takes a minute; on request"),
        Implementation("off"),
    ),
}
