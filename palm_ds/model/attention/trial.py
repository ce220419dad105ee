"""Runs an attention implementation once before a run relies on it: on this card, in this dtype, for
this head size, forward and backward, against the plain one in fp32."""

from __future__ import annotations

import numpy as np
import torch

from palm_ds.model.attention.attention import attend, plan_attention
from palm_ds.model.inputs.batch import Batch, PackedText
from palm_ds.model.inputs.visibility import multi_flow
from palm_ds.model.ops.dropout import dropout_keys
from palm_ds.model.ops.implementation import Environment

_ROWS = ([200, 1, 37], [3, 130])
_LENGTH = 256
_TOLERANCE = 0.05  # of the largest value; half precision loses a hundredth, a broken kernel all


def attention_failure(kernel: str, environment: Environment) -> str | None:
    """Reason why the implementation cannot be relied on here, if so. Random masks are compared only
    where both draw the same ones, with `dropout: counter`."""
    try:
        error = _largest_difference(kernel, environment)
    except Exception as failure:  # compilers and drivers raise many types and document none
        return f"does not run here ({str(failure).strip().splitlines()[0] or type(failure)})"
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
