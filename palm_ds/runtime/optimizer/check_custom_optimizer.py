"""Checks a custom optimizer before training.

    optimizer: {kind: my_module.Lion, lr: 1.0e-4, options: {betas: [0.9, 0.99]}}

A run requires more of an optimizer than torch does: learning rate and weight decay come with its
groups, ZeRO passes it flat partitions instead of parameters, and a checkpoint stores, for each
parameter, only tensors of its shape and its update count. A few steps on small tensors show whether
a class works with that; a violation would otherwise be a wrong loss curve without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from palm_ds.common.errors import UserError, named_line
from palm_ds.common.plugins import check_options, import_class
from palm_ds.runtime.optimizer.state import OptimizerStateSpec

_SHAPES = ((6, 4), (5,))
_CUT = 11  # where the flat values are split in two
_STEPS = 6
_LR, _DECAY = 0.01, 0.1
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # a checkpoint stores them in fp32
_RESERVED = ("weight", "average")  # other kinds of values in a checkpoint

Tensors = list[torch.Tensor]


class _CountsUpdates(torch.optim.Optimizer):
    """Counts the updates of each tensor in its state, for classes that do not."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    state = self.state[tensor]
                    state["step"] = state.get("step", 0) + 1


def checked_optimizer_class(
    kind: str, options: Mapping[str, Any], *, decays: bool, zero_stage: int
) -> tuple[type[torch.optim.Optimizer], OptimizerStateSpec]:
    """The class named `module.Class` in a recipe, extended to count its updates if it does not, and
    its per-tensor state.

    `decays`: the recipe has a weight decay. Raises UserError, with the reason, if the class cannot
    be used.
    """
    where = "optimizer.kind"
    base = torch.optim.Optimizer
    optimizer_class: type[torch.optim.Optimizer] = import_class(kind, base, where)
    taken = ("lr", "weight_decay")
    check_options(
        optimizer_class, options, "optimizer.options", base=base, reserved=taken, allow_extra=True
    )
    try:
        counts = "step" in _Trial(optimizer_class, options).run(range(1)).states[0]
        cls = (
            optimizer_class
            if counts
            else type(optimizer_class.__name__, (_CountsUpdates, optimizer_class), {})
        )
        kept = _check(_Trial(cls, options), decays=decays, zero_stage=zero_stage)
    except _RefusedError as error:
        raise UserError(f"{where}: {kind}: {error}") from None
    except Exception as error:  # user code may raise anything
        raise UserError(f"{where}: {kind}: fails in a trial: {named_line(error)}") from error
    return cls, kept


class _RefusedError(Exception):
    """The reason why a class cannot be used."""


@dataclass(frozen=True)
class _TrialResult:
    """Weights and optimizer states after some steps."""

    tensors: Tensors
    states: list[dict[str, Any]]

    def __sub__(self, other: _TrialResult) -> float:
        """The largest relative difference between the weights."""
        pairs = zip(self.tensors, other.tensors, strict=True)
        return max(float(((a - b).abs() / (a.abs() + b.abs() + 1e-3)).max()) for a, b in pairs)


@dataclass(frozen=True)
class _Trial:
    """Runs an optimizer on fixed pseudo-random weights and gradients."""

    cls: type[torch.optim.Optimizer]
    options: Mapping[str, Any]

    def run(
        self,
        steps: range,
        *,
        lr: float = _LR,
        decay: float = 0.0,
        partition: Callable[[Tensors], Tensors] = lambda tensors: tensors,
        initial: Tensors | None = None,
        states: Sequence[dict[str, Any]] = (),
    ) -> _TrialResult:
        """Steps from new weights, or from `initial` ones and their `states`. `partition` maps the
        tensors to those that replace them in the groups, as ZeRO does."""
        whole: Tensors = [torch.nn.Parameter(each.clone()) for each in initial or _random(0)]
        make: Any = self.cls
        optimizer = make([{"params": whole, "weight_decay": decay}], lr=1.0, **self.options)
        if optimizer.state:
            raise _RefusedError("creates its state in its constructor; create it in the first step")
        tensors = [torch.nn.Parameter(each.detach().clone()) for each in partition(whole)]
        (group,) = optimizer.param_groups
        group["params"], group["lr"] = tensors, lr
        for tensor, state in zip(tensors, states, strict=bool(states)):
            optimizer.state[tensor] = state
        for step in steps:
            for tensor, gradient in zip(tensors, partition(_random(step + 1)), strict=True):
                tensor.grad = gradient.clone()
            optimizer.step()
        return _TrialResult(
            [x.detach() for x in tensors], [dict(optimizer.state[x]) for x in tensors]
        )


def _random(seed: int) -> Tensors:
    """Numbers of very different magnitudes, which reveal updates that are not element-wise."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [torch.randint(-3, 2, shape, generator=generator) for shape in _SHAPES]
    return [torch.randn(size.shape, generator=generator) * 10.0**size for size in sizes]


def _check(trial: _Trial, *, decays: bool, zero_stage: int) -> OptimizerStateSpec:
    whole = trial.run(range(_STEPS), decay=_DECAY)
    if not all(tensor.isfinite().all() for tensor in whole.tensors):
        raise _RefusedError("in a trial, its weights are not finite after a few steps")
    if whole - trial.run(range(0)) == 0:
        raise _RefusedError("in a trial, its steps change nothing")
    if whole - trial.run(range(_STEPS), decay=_DECAY, lr=2 * _LR) == 0:
        raise _RefusedError('ignores the learning rate; read group["lr"] in each step')
    if decays and whole - trial.run(range(_STEPS)) == 0:
        raise _RefusedError(
            'ignores group["weight_decay"]; read it, or set optimizer.weight_decay to 0'
        )
    kept = _state_spec(whole)
    if kept != _state_spec(trial.run(range(1))):
        raise _RefusedError("the keys of its state change after the first step; keep them the same")
    for done in (1, 3):
        if _resumed(trial, kept, done) - whole:
            raise _RefusedError(
                "does not resume exactly from its `state`; keep everything it remembers there, in "
                "tensors of the parameter's shape"
            )
    if zero_stage:
        for decay in (0.0, _DECAY):
            _check_partitions(trial, decay, zero_stage)
    zeros = [kept.entry(tensor) for tensor in whole.tensors]
    same = trial.run(range(_STEPS), decay=_DECAY, states=zeros) - whole == 0
    return OptimizerStateSpec(moments=kept.moments, step=kept.step, from_zero=same)


def _resumed(trial: _Trial, kept: OptimizerStateSpec, done: int) -> _TrialResult:
    """Stops after `done` steps and resumes from what a checkpoint stores."""
    before = trial.run(range(done), decay=_DECAY)
    states = []
    for tensor, old in zip(before.tensors, before.states, strict=True):
        state = kept.entry(tensor)
        for name in kept.moments:
            state[name].copy_(old[name])
        state["step"] += done
        states.append(state)
    steps = range(done, _STEPS)
    return trial.run(steps, decay=_DECAY, initial=before.tensors, states=states)


def _state_spec(ran: _TrialResult) -> OptimizerStateSpec:
    """The per-tensor state. Raises _RefusedError for anything a checkpoint cannot store."""
    states = []
    for tensor, state in zip(ran.tensors, ran.states, strict=True):
        moments = {
            name: _dtype(name, value, tensor)
            for name, value in state.items()
            if name != "step" and value is not None
        }
        step = state["step"]
        if torch.is_tensor(step) and step.numel() != 1:
            raise _RefusedError("its state 'step' is not an update count; use another name for it")
        states.append((moments, torch.zeros_like(step) if torch.is_tensor(step) else 0))
    (moments, step), *others = states
    if any(other[0] != moments for other in others):
        raise _RefusedError("the keys of its state differ between matrices and vectors")
    return OptimizerStateSpec(moments=moments, step=step)


def _dtype(name: object, value: object, tensor: torch.Tensor) -> torch.dtype:
    if not torch.is_tensor(value) or value.shape != tensor.shape:
        what = f"of shape {tuple(value.shape)}" if torch.is_tensor(value) else repr(value)
        raise _RefusedError(
            f"its state {name!r} of a parameter is {what}; a checkpoint stores tensors of the "
            "parameter's shape, and `step`, the update count"
        )
    if value.dtype not in _DTYPES:
        raise _RefusedError(
            f"its state {name!r} is {value.dtype}; use float32, bfloat16 or float16"
        )
    if not isinstance(name, str) or "/" in name or name in _RESERVED:
        raise _RefusedError(f"its state {name!r} needs another name (text without /)")
    return value.dtype


def _check_partitions(trial: _Trial, decay: float, zero_stage: int) -> None:
    """Under ZeRO, each process updates a range of the concatenated values and has no others."""
    whole = trial.run(range(_STEPS), decay=decay)
    expected = torch.cat([tensor.flatten() for tensor in whole.tensors])
    for inside in (slice(None, _CUT), slice(_CUT, None)):

        def cut(tensors: Tensors, inside: slice = inside) -> Tensors:
            return [torch.cat([tensor.detach().flatten() for tensor in tensors])[inside]]

        part = trial.run(range(_STEPS), decay=decay, partition=cut)
        if not part - _TrialResult([expected[inside]], []) <= 1e-4:  # also true for NaN
            raise _RefusedError(
                f"the update of a value depends on others, but ZeRO {zero_stage} cuts parameters "
                "into flat partitions; use zero_optimization.stage 0"
            )
