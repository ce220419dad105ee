"""Chooses an implementation for each operation: the fastest that can run, or the one requested.

    operation         implementations, fastest first
    attention         varlen, tiles, sdpa, plain                      attention.py
    masked_lm_loss    chunked, liger, linear_cross_entropy, plain     masked_lm_loss.py
    layer_norm        apex, torch
    dropout           counter, plain                                  dropout.py
    compile           on, off                                         torch.compile of the layers

The last one of each runs everywhere and defines the result. `choose_kernels` probes them when a run
starts. A requested implementation that cannot run is an error; there is no silent fallback. Those
of dropout drop other numbers for the same seed, at the same rate; all others agree with the plain
one up to rounding. Masks of `counter` are the same on any number of processes, also those of
attention in `tiles` and `plain`; `sdpa` takes none.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from palm_ds.common.errors import UserError, suggest
from palm_ds.model.config import EncoderConfig


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The implementation of each operation. The defaults run everywhere and define the result."""

    attention: str = "plain"
    masked_lm_loss: str = "plain"
    layer_norm: str = "torch"
    dropout: str = "plain"
    compile: str = "off"


def layer_norm(size: int, eps: float, kernel: str) -> nn.Module:
    """A LayerNorm over `size` values, with `weight` and `bias`."""
    if kernel == "apex":
        return importlib.import_module("apex.normalization").FusedLayerNorm(size, eps=eps)
    return nn.LayerNorm(size, eps=eps)


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What the choice depends on."""

    device: torch.device
    dtype: torch.dtype
    config: EncoderConfig
    dropout: str = "plain"
    """The implementation of dropout, which is chosen first."""


@dataclass(frozen=True)
class Implementation:
    """One implementation of an operation. `unavailable` returns why it cannot run here,
    `not_preferred` why it is not chosen by default; None means no objection."""

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
    """The requested or fastest implementation of each operation ("auto": the fastest), and one log
    line per operation.

    Raises UserError for an unknown operation or implementation, and for one that cannot run here.
    """
    known = [field.name for field in fields(Kernels)]
    for name in requested:
        if name not in known:
            raise UserError(f'kernels: unknown operation "{name}"{suggest(name, known)}')
    environment = Environment(device=torch.device(device), dtype=dtype, config=config)
    dropout, _ = _choose("dropout", requested.get("dropout", "auto"), environment)
    environment = replace(environment, dropout=dropout)
    chosen, lines = {}, []
    for name in known:
        chosen[name], reason = _choose(name, requested.get(name, "auto"), environment)
        lines.append(f"{name}: {chosen[name]}{reason}")
    return Kernels(**chosen), lines


def _choose(operation: str, requested: str, environment: Environment) -> tuple[str, str]:
    """The name of the chosen implementation and, in brackets, the reason."""
    implementations = {each.name: each for each in IMPLEMENTATIONS[operation]}
    if requested != "auto":
        if requested not in implementations:
            near = suggest(str(requested), [*implementations, "auto"])
            raise UserError(f'kernels: {operation}: no implementation "{requested}"{near}')
        if reason := implementations[requested].unavailable(environment):
            raise UserError(
                f'kernels: {operation}: "{requested}" cannot run here: {reason}; use "auto"'
            )
        return requested, " (requested)"
    reasons = []
    for each in implementations.values():
        if not (reason := each.not_preferred(environment) or each.unavailable(environment)):
            return each.name, f" ({'; '.join(reasons)})" if reasons else ""
        reasons.append(f"{each.name}: {reason}")
    raise AssertionError(f"{operation}: the last implementation must run everywhere")


def _varlen_unavailable(environment: Environment) -> str | None:
    if environment.device.type != "cuda":
        return "needs CUDA"
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen"
    if environment.dtype not in (torch.float16, torch.bfloat16):
        return "needs fp16 or bf16"
    if torch.cuda.get_device_capability(environment.device) < (8, 0):
        return "needs compute capability 8.0"
    if environment.config.attention_dropout:
        rate = environment.config.attention_dropout
        return f"does not support dropout; attention_dropout is {rate}"
    return None


def _sdpa_unavailable(environment: Environment) -> str | None:
    if environment.dropout == "plain" or not environment.config.attention_dropout:
        return None
    rate = environment.config.attention_dropout
    return f'does not take the masks of dropout: "counter"; attention_dropout is {rate}'


def _liger_unavailable(environment: Environment) -> str | None:
    if environment.device.type != "cuda":
        return "needs CUDA"
    if importlib.util.find_spec("liger_kernel") is None:
        return "liger-kernel is not installed"
    return _underflows_in_fp16(environment)


def _linear_cross_entropy_unavailable(environment: Environment) -> str | None:
    if not hasattr(F, "linear_cross_entropy"):
        return f"needs torch 2.13, this is {torch.__version__}"
    return _underflows_in_fp16(environment)


def _underflows_in_fp16(environment: Environment) -> str | None:
    """A gradient computed in the forward pass is computed before fp16's loss is scaled."""
    return "in fp16 its gradient would underflow" if environment.dtype == torch.float16 else None


def _apex_unavailable(environment: Environment) -> str | None:
    if environment.device.type != "cuda":
        return "needs CUDA"
    if importlib.util.find_spec("apex") is None:
        return "NVIDIA apex is not installed"
    if importlib.util.find_spec("fused_layer_norm_cuda") is None:
        return "this apex has no compiled fused_layer_norm_cuda (build NVIDIA apex from source)"
    return None


def _cpu_only(environment: Environment) -> str | None:
    return None if environment.device.type == "cpu" else "for CPUs only"


def _slower_on_gpus(environment: Environment) -> str | None:
    return None if environment.device.type == "cpu" else "slower than the GPU's own; on request"


def _compile_unavailable(environment: Environment) -> str | None:
    """Compiles a tiny function, since an installed compiler may still not work."""
    try:
        torch.compile(lambda x: x.exp() + 1)(torch.zeros(8, device=environment.device))
    except Exception as error:  # torch raises many types and documents none
        return f"torch.compile does not work here ({str(error).strip().splitlines()[0]})"
    return None


IMPLEMENTATIONS: dict[str, tuple[Implementation, ...]] = {
    "attention": (
        Implementation("varlen", _varlen_unavailable),
        Implementation("tiles", _cpu_only),
        Implementation("sdpa", _sdpa_unavailable),
        Implementation("plain"),
    ),
    "masked_lm_loss": (
        Implementation("chunked", _underflows_in_fp16),
        Implementation("liger", _liger_unavailable),
        Implementation("linear_cross_entropy", _linear_cross_entropy_unavailable),
        Implementation("plain"),
    ),
    "layer_norm": (Implementation("apex", _apex_unavailable), Implementation("torch")),
    "dropout": (Implementation("counter", not_preferred=_slower_on_gpus), Implementation("plain")),
    "compile": (
        Implementation("on", _compile_unavailable, lambda _: "takes a minute; on request"),
        Implementation("off"),
    ),
}
