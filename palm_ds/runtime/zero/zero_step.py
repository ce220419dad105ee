"""DeepSpeed's step counters and fp16 loss scale, and a step under ZeRO 1 or 2 in bf16 that does not
wait for the device.

DeepSpeed decides on the host whether a step is applied. It asks whether the gradients are finite,
whether their norm is, and that again for every parameter group: the host waits until the backward
pass has ended, and the device then waits for the host. In bf16 nothing on the host depends on the
answer (in fp16 the next loss scale does), so it stays on the device: the optimizer's kernels divide
the gradients by `grad_scale`, and leave all as it is if `found_inf` is not 0.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed as dist

from palm_ds.runtime.deepspeed.ds_config import DSConfig
from palm_ds.runtime.optimizer.state import total_norm
from palm_ds.runtime.optimizer.wrappers import takes_found_inf

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def count_skipped(engine: Any) -> int | torch.Tensor:
    """Steps that changed nothing; a tensor where only the device knows."""
    return engine.skipped_steps + getattr(engine.optimizer, "skipped", 0)


def read_counters(engine: Any, *, fp16: bool) -> dict[str, Any]:
    """{name: value} of a DeepSpeed engine, as JSON."""
    counters = {name: getattr(engine, name) for name in _COUNTERS}
    counters["skipped_steps"] = int(count_skipped(engine))
    if fp16 and (scaler := engine.optimizer.loss_scaler).dynamic:
        counters["scaler"] = {name: getattr(scaler, name) for name in _SCALER}
    return counters


def restore_counters(engine: Any, counters: Mapping[str, Any], *, fp16: bool) -> None:
    """Set what `read_counters` returned, perhaps in a run of another precision. A loss scale that
    the DeepSpeed file fixes stays."""
    for name in _COUNTERS:
        setattr(engine, name, counters[name])
    if hasattr(engine.optimizer, "skipped"):
        engine.optimizer.skipped = 0
    engine.micro_steps = counters["global_steps"] * engine.gradient_accumulation_steps()
    if fp16 and "scaler" in counters and engine.optimizer.loss_scaler.dynamic:
        for name, value in counters["scaler"].items():
            setattr(engine.optimizer.loss_scaler, name, value)


def set_accumulation(engine: Any, micro_steps: int) -> None:
    """Let DeepSpeed's next step have this many micro-steps. Call it between two steps."""
    if micro_steps == engine.gradient_accumulation_steps():
        return
    engine.set_train_batch_size(
        engine.train_micro_batch_size_per_gpu() * micro_steps * engine.dp_world_size
    )
    engine.micro_steps = engine.global_steps * micro_steps
    if hasattr(engine.optimizer, "gradient_accumulation_steps"):  # ZeRO's
        engine.optimizer.gradient_accumulation_steps = micro_steps


_CLIP_EPS = 1e-6


def set_up_skipping(zero: Any, ds_config: DSConfig) -> None:
    """Let DeepSpeed's ZeRO optimizer `zero` clip and skip on the device if all else allows it;
    `zero.skipped` counts the skipped steps. At the least fp16 loss scale it skips too, and does not
    raise: what a run does about such steps is `nonfinite`'s to say."""
    if ds_config.fp16:
        zero.loss_scaler.raise_error_at_min_scale = False
    if ds_config.precision != "bf16" or ds_config.stage not in (1, 2) or ds_config.offloads:
        return
    if not takes_found_inf(zero.optimizer):
        return
    zero.skipped = torch.zeros((), device=zero.device)
    zero.check_grad_overflow = False
    itself = weakref.proxy(zero)  # no cycle: its memory is free when it is released
    zero.scaled_global_norm = lambda: _measure(itself)
    zero.unscale_and_clip_grads = lambda gradients, norm: None  # the kernels divide


def _measure(zero: Any) -> torch.Tensor:
    """The global norm of the gradients. Tells the optimizer what to do about it."""
    gradients = [each for group in zero.averaged_gradients.values() for each in group]
    squares = total_norm(gradients, torch.float32).square().to(zero.device)
    dist.all_reduce(squares, group=zero.dp_process_group)
    norm = squares.sqrt()
    finite = norm.isfinite()
    scale = ((norm + _CLIP_EPS) / zero.clip_grad).clamp(min=1.0) if zero.clip_grad else 1.0
    zero.optimizer.found_inf = (~finite).float()
    zero.optimizer.grad_scale = torch.where(finite, scale, 1.0).float()
    zero.skipped = zero.skipped + zero.optimizer.found_inf
    return norm.float()
