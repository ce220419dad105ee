"""Conditions under which each implementation of attention can run, for `choose_kernels`.

On GPUs our own kernels come first: in a whole model on an H200 they were faster than torch's
FlashAttention 2 (docs/speed.md), and they compute the same bits in every run. `dropout: counter`
leaves only our own, as the others draw their own masks. FlashAttention 3 and 4 are beta versions,
so they run on request. A dense mask comes last: it costs memory and time in proportion to the
square of a row.

The trial runs an attention implementation once before a run relies on it: on this card, in this
dtype, for this head size, forward and backward, against the plain one in fp32.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch.nn import attention as flash

from palm_ds.common.errors import first_line
from palm_ds.model.attention.attention import NO_BIAS, attend, plan_attention
from palm_ds.model.inputs.batch import Batch, PackedText
from palm_ds.model.inputs.visibility import multi_flow
from palm_ds.model.ops.dropout import dropout_keys
from palm_ds.model.ops.implementation import Environment

_HALF_DTYPES = (torch.float16, torch.bfloat16)
_MAX_FLASH_HEAD_SIZE = 256
_MAX_TRITON_HEAD_SIZE = 128  # a block of larger heads does not fit the registers


def tiles_unavailable(environment: Environment) -> str | None:
    if environment.device.type != "cpu":
        return "for CPUs only"
    return NO_BIAS if environment.score_biases else None


def unavailable(name: str, environment: Environment) -> str | None:
    """Reason why an implementation for GPUs cannot run. It is run once, if nothing else objects."""
    if environment.device.type != "cuda":
        return "needs CUDA"
    if environment.score_biases:
        return NO_BIAS
    if reason := FOR_GPUS[name](environment):
        return reason
    from palm_ds.model.attention.choice import attention_failure

    return attention_failure(name, environment)


def not_preferred(name: str, _: Environment) -> str | None:
    return "a beta version; on request" if name in ("varlen_fa3", "varlen_fa4") else None


def draws_own_masks(environment: Environment) -> str | None:
    """The objection to an implementation whose dropout masks come from torch's generator."""
    if environment.dropout == "plain" or not environment.config.attention_dropout:
        return None
    rate = environment.config.attention_dropout
    return f'does not take the masks of dropout: "counter"; attention_dropout is {rate}'


def sdpa_unavailable(environment: Environment) -> str | None:
    if environment.memories:
        return "has no memories"
    return draws_own_masks(environment)


def dense(environment: Environment) -> str | None:
    """Note for the log on an implementation with a dense mask on a GPU."""
    return None if environment.device.type == "cpu" else "holds a mask of length x length per row"


def _hides_nothing(environment: Environment) -> str | None:
    """The objection to an implementation in which all tokens of a text attend to one another."""
    if not environment.partial_tasks:
        return None
    tasks = ", ".join(f"tasks.{name}" for name in environment.partial_tasks)
    return f"cannot hide tokens of a text from one another, which {tasks} needs"


def _varlen(environment: Environment) -> str | None:
    return (
        _hides_nothing(environment)
        or _needs_capability(environment, (8, 0))
        or _needs_half(environment)
        or _head_size(environment, most=_MAX_FLASH_HEAD_SIZE, multiple=8)
        or draws_own_masks(environment)
    )


def _flash_3(environment: Environment) -> str | None:
    if reason := _hides_nothing(environment):
        return reason
    if torch.cuda.get_device_capability(environment.device)[0] != 9:
        return "needs Hopper (compute capability 9.0)"
    return _from_registry(environment, "FA3", "flash_attn_interface")


def _flash_4(environment: Environment) -> str | None:
    if reason := _hides_nothing(environment):
        return reason
    if torch.cuda.get_device_capability(environment.device)[0] not in (9, 10):
        return "needs Hopper or Blackwell (compute capability 9.0 or 10.0)"
    return _from_registry(environment, "FA4", "flash_attn.cute")


def _from_registry(environment: Environment, name: str, package: str) -> str | None:
    if rate := environment.config.attention_dropout:
        return f"does not support dropout; attention_dropout is {rate}"
    if not hasattr(flash, "restore_flash_attention_impl"):
        return f"torch {torch.__version__} cannot choose among implementations of FlashAttention"
    if name not in flash.list_flash_attention_impls():
        return f"torch {torch.__version__} does not know {name}"
    if not _installed(package):
        return f"{package} is not installed"
    return _needs_half(environment) or _head_size(
        environment, most=_MAX_FLASH_HEAD_SIZE, multiple=8
    )


def _triton(environment: Environment) -> str | None:
    if not _installed("triton"):
        return "triton is not installed"
    if environment.config.attention_dropout and environment.dropout != "counter":
        return 'its masks are those of dropout: "counter"'
    if environment.dtype not in (*_HALF_DTYPES, torch.float32):
        return "needs fp32, fp16 or bf16"
    return _needs_capability(environment, (8, 0)) or _head_size(
        environment, most=_MAX_TRITON_HEAD_SIZE
    )


def _needs_capability(environment: Environment, least: tuple[int, int]) -> str | None:
    if torch.cuda.get_device_capability(environment.device) >= least:
        return None
    return f"needs compute capability {least[0]}.{least[1]}"


def _needs_half(environment: Environment) -> str | None:
    return None if environment.dtype in _HALF_DTYPES else "needs fp16 or bf16"


def _head_size(environment: Environment, *, most: int, multiple: int = 1) -> str | None:
    size = environment.config.hidden_size // environment.config.num_heads
    if size <= most and size % multiple == 0:
        return None
    multiples = f", a multiple of {multiple}" if multiple > 1 else ""
    return f"needs a head size of at most {most}{multiples}; it is {size}"


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False


FOR_GPUS: Mapping[str, Callable[[Environment], str | None]] = {
    "triton": _triton,
    "varlen": _varlen,
    "varlen_fa3": _flash_3,
    "varlen_fa4": _flash_4,
}
"""The implementations for GPUs in order of preference, and what may object to each."""


_ROWS = ([200, 1, 37], [3, 130])
_LENGTH = 256
_TOLERANCE = 0.05  # of the largest value; half precision loses a hundredth, a broken kernel all


def attention_failure(kernel: str, environment: Environment) -> str | None:
    """Reason why the implementation cannot be relied on here, if so. Random masks are compared only
    where both draw the same ones, with `dropout: counter`."""
    try:
        error = _largest_difference(kernel, environment)
    except Exception as failure:  # compilers and drivers raise many types and document none
        return f"does not run here ({first_line(failure)})"
    return None if error < _TOLERANCE else f"computes other numbers here than plain ({error:.2g})"


def _largest_difference(kernel: str, environment: Environment) -> float:
    """Over output and gradient, as a share of the largest number in each; NaN counts as 1."""
    device, dtype, config = environment.device, environment.dtype, environment.config
    batch = _batch(partial=bool(environment.partial_tasks)).to(device)
    shape = (len(_ROWS), _LENGTH, 3 * config.hidden_size)
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    keys = dropout_keys(batch, _LENGTH) if environment.dropout == "counter" else None
    rate = config.attention_dropout if keys is not None else 0.0
    results = []
    for form, qkv in (("plain", numbers.float()), (kernel, numbers)):
        with torch.enable_grad():
            qkv = qkv.clone().requires_grad_()
            plan = plan_attention(batch, form, keys=keys)
            out = attend(qkv, plan, num_heads=config.num_heads, dropout=rate)
            (grad,) = torch.autograd.grad(out.float().square().sum(), qkv)
        results.append((out.detach().float(), grad.float()))
    return max(_difference(*pair) for pair in zip(*results, strict=True))


def _difference(plain: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.nan_to_num((other - plain).abs().max() / plain.abs().max(), nan=1.0))


def _batch(*, partial: bool) -> Batch:
    """`partial`: the texts of the first row have a source, a target and queries."""
    rows = [
        [_text(size, partial=partial and r == 0) for size in row] for r, row in enumerate(_ROWS)
    ]
    batch = Batch.from_rows(rows, length=_LENGTH, pad=0)
    batch.dropout_key = 1
    return batch


def _text(size: int, *, partial: bool) -> PackedText:
    third = size // 3
    return PackedText(
        input_ids=np.zeros(size, np.int64),
        token_type_ids=np.zeros(size, np.int64),
        visibility=multi_flow(size - 2 * third, third, [np.arange(third)]) if partial else None,
    )
