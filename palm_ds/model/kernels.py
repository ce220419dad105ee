"""Chooses an implementation for each operation: the fastest that can run, or the one requested.

    operation         implementations, fastest first
    attention         tiles, triton, varlen, varlen_fa3, varlen_fa4, sdpa, plain      attention.py
    masked_lm_loss    chunked, liger, linear_cross_entropy, plain     masked_lm_loss.py
    layer_norm        triton, apex, torch                             fused_norm.py
    dropout           counter, plain                                  dropout.py
    compile           on, off                                         torch.compile of the layers

The last one of each runs everywhere and defines the result. `choose_kernels` probes them when a run
starts. A requested implementation that cannot run is an error; there is no silent fallback. Those
of dropout drop other numbers for the same seed, at the same rate; all others agree with the plain
one up to rounding. Masks of `counter` are the same on any number of processes, also those of
attention in `tiles`, `triton` and `plain`; the others take none.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from palm_ds.common.errors import UserError, first_line, suggest
from palm_ds.model.attention import choice as attention_choice
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.ops.dropout import DropoutKeys, add_dropout
from palm_ds.model.ops.fused_norm import Drop, FusedLayerNorm
from palm_ds.model.ops.implementation import Environment, Implementation

_TOLERANCE = 0.2  # half precision loses a hundredth, a broken kernel all


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
    if kernel == "triton":
        return FusedLayerNorm(size, eps=eps)
    return nn.LayerNorm(size, eps=eps)


def choose_kernels(
    requested: Mapping[str, str],
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    config: EncoderConfig,
    zero_stage: int = 0,
    fixed_shapes: bool = True,
    partial_tasks: Sequence[str] = (),
    states_read: bool = False,
    windows: bool = False,
    score_biases: bool = False,
    memories: bool = False,
) -> tuple[Kernels, list[str]]:
    """The requested or fastest implementation of each operation ("auto": the fastest), and one log
    line per operation. `fixed_shapes`: all batches have the same number of rows and length.
    `partial_tasks`: tasks with texts whose tokens do not all attend to one another. `states_read`:
    what layers compute inside is recorded (palm_ds/model/encoder/states.py). `windows`: layers
    attend within a window. `score_biases`: they add to the scores of attention.
    `memories`: they attend to vectors of earlier windows besides.

    Raises UserError for an unknown operation or implementation, and for one that cannot run here.
    """
    known = [field.name for field in fields(Kernels)]
    for name in requested:
        if name not in known:
            raise UserError(f'kernels: unknown operation "{name}"{suggest(name, known)}')
    environment = Environment(
        device=torch.device(device),
        dtype=dtype,
        config=config,
        zero_stage=zero_stage,
        fixed_shapes=fixed_shapes,
        partial_tasks=partial_tasks,
        states_read=states_read,
        windows=windows,
        score_biases=score_biases,
        memories=memories,
        layer_norm=requested.get("layer_norm", "auto"),
    )
    chosen, lines = {}, {}
    for name in ("dropout", "compile", *known):
        if name in chosen:
            continue
        chosen[name], reason = _choose(name, requested.get(name, "auto"), environment)
        lines[name] = f"{name}: {chosen[name]}{reason}"
        if name in ("dropout", "compile"):
            environment = replace(environment, **{name: chosen[name]})
    return Kernels(**chosen), [lines[name] for name in known]


def _choose(operation: str, requested: str, environment: Environment) -> tuple[str, str]:
    """The name of the chosen implementation and, in brackets, the reason."""
    implementations = {
        implementation.name: implementation for implementation in IMPLEMENTATIONS[operation]
    }
    if requested != "auto":
        if requested not in implementations:
            near = suggest(str(requested), [*implementations, "auto"])
            raise UserError(f'kernels: {operation}: no implementation "{requested}"{near}')
        if reason := implementations[requested].unavailable(environment):
            raise UserError(
                f'kernels: {operation}: "{requested}" cannot run here: {reason}; use "auto"'
            )
        return requested, _in_brackets(["requested"], implementations[requested], environment)
    reasons = []
    for each in implementations.values():
        if not (reason := each.not_preferred(environment) or each.unavailable(environment)):
            return each.name, _in_brackets(reasons, each, environment)
        reasons.append(f"{each.name}: {reason}")
    raise AssertionError(f"{operation}: the last implementation must run everywhere")


def _in_brackets(reasons: list[str], chosen: Implementation, environment: Environment) -> str:
    remark = chosen.remark(environment)
    reasons = [*reasons, remark] if remark else reasons
    return f" ({'; '.join(reasons)})" if reasons else ""


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


def _graph_break(environment: Environment) -> str | None:
    return 'compile: "on" fuses torch\'s' if environment.compile == "on" else None


def _fused_norm_unavailable(environment: Environment) -> str | None:
    """It is run once: the compiler may not work."""
    if environment.device.type != "cuda":
        return "needs CUDA"
    if reason := _graph_break(environment):
        return reason
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    try:
        error = _fused_norm_error(environment.device, environment.dtype)
    except Exception as failure:  # compilers and drivers raise many types and document none
        return f"does not run here ({first_line(failure)})"
    return None if error < _TOLERANCE else f"computes other numbers here than torch ({error:.2g})"


def _fused_norm_error(device: torch.device, dtype: torch.dtype) -> float:
    """The largest difference from torch's LayerNorm, of values and gradients near 1."""
    norm = FusedLayerNorm(48, device=device, dtype=dtype)
    x, y = torch.arange(960.0, device=device).mul(0.7).sin().to(dtype).view(2, 10, 48)
    columns = torch.ones(48, dtype=torch.int32, device=device)
    keys = DropoutKeys(torch.arange(10, device=device), columns)
    results = []
    for fused in (True, False):
        leaf = y.clone().requires_grad_()
        with torch.enable_grad():
            drop = Drop(0.5, keys)
            out = norm(x, leaf, drop) if fused else norm(add_dropout(x, leaf, drop.rate, keys))
            results.append([out.detach(), *torch.autograd.grad(out, leaf, x)])
    return max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))


def _apex_unavailable(environment: Environment) -> str | None:
    if environment.device.type != "cuda":
        return "needs CUDA"
    if reason := _graph_break(environment):
        return reason
    if importlib.util.find_spec("apex") is None:
        return "NVIDIA apex is not installed"
    if importlib.util.find_spec("fused_layer_norm_cuda") is None:
        return "this apex has no compiled fused_layer_norm_cuda (build NVIDIA apex from source)"
    return None


def _counter_not_preferred(environment: Environment) -> str | None:
    """On GPUs its masks of attention weights are for the kernels of `triton`."""
    if environment.device.type == "cpu" or not environment.config.attention_dropout:
        return None
    with_counter = replace(environment, dropout="counter")
    reason = attention_choice.unavailable("triton", with_counter)
    return f'attention: "triton" {reason}' if reason else None


def _compile_unavailable(environment: Environment) -> str | None:
    """Compiles a small function and its gradient, since an installed compiler may still not
    work."""
    if environment.zero_stage == 3:
        return "ZeRO 3 gathers weights inside the layers"
    if environment.states_read:
        return "a teacher's hidden states, attention, relations or embeddings are learned"
    x = torch.zeros(8, 8, dtype=environment.dtype, device=environment.device, requires_grad=True)
    try:
        function = torch.compile(_elementwise, fullgraph=True, dynamic=False)
        with torch.enable_grad():
            function(x).sum().backward()
    except Exception as error:  # torch raises many types and documents none
        return f"torch.compile does not work here ({first_line(error)})"
    return None


def _elementwise(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(F.gelu(x) + x, x.shape[-1:])


def _compile_not_preferred(environment: Environment) -> str | None:
    if environment.device.type == "cpu":
        return "slower on CPUs; on request"
    if environment.layer_norm in ("triton", "apex"):
        return f'cannot take layer_norm: "{environment.layer_norm}"'
    return None if environment.fixed_shapes else "batches differ in length; on request"


IMPLEMENTATIONS: dict[str, tuple[Implementation, ...]] = {
    "attention": (
        Implementation("tiles", attention_choice.tiles_unavailable),
        *(
            Implementation(
                name,
                partial(attention_choice.unavailable, name),
                partial(attention_choice.not_preferred, name),
            )
            for name in attention_choice.FOR_GPUS
        ),
        Implementation("sdpa", attention_choice.sdpa_unavailable, remark=attention_choice.dense),
        Implementation("plain", remark=attention_choice.dense),
    ),
    "masked_lm_loss": (
        Implementation("chunked"),
        Implementation("liger", _liger_unavailable),
        Implementation("linear_cross_entropy", _linear_cross_entropy_unavailable),
        Implementation("plain"),
    ),
    "layer_norm": (
        Implementation("triton", _fused_norm_unavailable),
        Implementation("apex", _apex_unavailable),
        Implementation("torch"),
    ),
    "dropout": (
        Implementation("counter", not_preferred=_counter_not_preferred),
        Implementation("plain"),
    ),
    "compile": (
        Implementation("on", _compile_unavailable, _compile_not_preferred),
        Implementation("off"),
    ),
}
