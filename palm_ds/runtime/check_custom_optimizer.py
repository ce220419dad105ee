"""An optimizer of one's own, tried before a run rests on it.

    optimizer: {kind: mine.Lion, lr: 1.0e-4, options: {betas: [0.9, 0.99]}}

A run asks more of an optimizer than torch does: rates and decay come with its groups, ZeRO gives it
flat pieces of parameters instead of parameters, and a checkpoint keeps, of each parameter, tensors
of its shape and the count of its updates, and nothing else. A few steps on a few numbers show
whether a class does with that. What it could not do would be a wrong curve and no error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from palm_ds.common.errors import UserError
from palm_ds.common.plugins import check_options, import_class

_SHAPES = ((6, 4), (5,))
_CUT = 11  # where the flat values are cut in two
_STEPS = 6
_RATE, _DECAY = 0.01, 0.1
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # a checkpoint holds them in fp32
_TAKEN = ("weight", "average")  # kinds of a checkpoint that are no optimizer's

Tensors = list[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class OptimizerStateSpec:
    """What an optimizer keeps of each tensor that it updates: tensors like it, `moments`, and in
    `step` how often it did."""

    moments: Mapping[str, torch.dtype]
    step: Any
    """The count as it begins, a number or a tensor of one."""
    from_zero: bool = True
    """The moments may begin as zeros."""

    def entry(self, tensor: torch.Tensor, device: torch.device | str = "cpu") -> dict[str, Any]:
        """The optimizer's `state` of a tensor with everything 0; a count that is a tensor lies on
        `device`."""
        counts = torch.is_tensor(self.step)
        entry: dict[str, Any] = {
            "step": torch.zeros_like(self.step, device=device) if counts else 0
        }
        for name, dtype in self.moments.items():
            entry[name] = torch.zeros_like(tensor, dtype=dtype, requires_grad=False)
        return entry


class Counting(torch.optim.Optimizer):
    """Counts the updates of each tensor in its state, for a class that does not."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    state = self.state[tensor]
                    state["step"] = state.get("step", 0) + 1


def checked_optimizer_class(
    kind: str, options: Mapping[str, Any], *, decays: bool, zero_stage: int
) -> tuple[type[torch.optim.Optimizer], OptimizerStateSpec]:
    """The class that a recipe calls `module.Class`, made to count its updates, and what it keeps.

    `decays`: the recipe has a weight decay. Raises UserError where the class cannot do what a run
    needs, with the reason.
    """
    where = "optimizer.kind"
    base = torch.optim.Optimizer
    found: type[torch.optim.Optimizer] = import_class(kind, base, where)
    taken = ("lr", "weight_decay")
    check_options(found, options, "optimizer.options", base=base, reserved=taken, allow_extra=True)
    try:
        counts = "step" in _Trial(found, options).run(range(1)).states[0]
        cls = found if counts else type(found.__name__, (Counting, found), {})
        kept = _checked(_Trial(cls, options), decays=decays, zero_stage=zero_stage)
    except _RefusedError as error:
        raise UserError(f"{where}: {kind}: {error}") from None
    except Exception as error:  # whatever a class of somebody's raises
        text = (str(error).splitlines() or [""])[0]
        raise UserError(f"{where}: {kind}: fails in a trial: {type(error).__name__}: {text}") from (
            error
        )
    return cls, kept


class _RefusedError(Exception):
    """Why."""


@dataclass(frozen=True)
class _Ran:
    """Where some steps led."""

    tensors: Tensors
    states: list[dict[str, Any]]

    def __sub__(self, other: _Ran) -> float:
        """The largest difference, each beside the size of the numbers."""
        pairs = zip(self.tensors, other.tensors, strict=True)
        return max(float(((a - b).abs() / (a.abs() + b.abs() + 1e-3)).max()) for a, b in pairs)


@dataclass(frozen=True)
class _Trial:
    """Steps of an optimizer on drawn weights and gradients, always the same."""

    cls: type[torch.optim.Optimizer]
    options: Mapping[str, Any]

    def run(
        self,
        steps: range,
        *,
        rate: float = _RATE,
        decay: float = 0.0,
        shaped: Callable[[Tensors], Tensors] = lambda tensors: tensors,
        begin: Tensors | None = None,
        states: Sequence[dict[str, Any]] = (),
    ) -> _Ran:
        """Of new tensors, or of those to `begin` with, whose `states` are given. `shaped` makes of
        them what stands in the groups in their place, as ZeRO does."""
        whole = [torch.nn.Parameter(each.clone()) for each in begin or _draw(0)]
        make: Any = self.cls
        optimizer = make([{"params": whole, "weight_decay": decay}], lr=1.0, **self.options)
        if optimizer.state:
            raise _RefusedError("makes its state in its constructor; make it in the first step")
        tensors = [torch.nn.Parameter(each.detach().clone()) for each in shaped(whole)]  # type: ignore[arg-type]
        (group,) = optimizer.param_groups
        group["params"], group["lr"] = tensors, rate
        for tensor, state in zip(tensors, states, strict=bool(states)):
            optimizer.state[tensor] = state
        for step in steps:
            for tensor, gradient in zip(tensors, shaped(_draw(step + 1)), strict=True):
                tensor.grad = gradient.clone()
            optimizer.step()
        return _Ran([x.detach() for x in tensors], [dict(optimizer.state[x]) for x in tensors])


def _draw(step: int) -> Tensors:
    """Numbers of very different sizes, so that what is not done element by element shows."""
    generator = torch.Generator().manual_seed(step)
    sizes = [torch.randint(-3, 2, shape, generator=generator) for shape in _SHAPES]
    return [torch.randn(size.shape, generator=generator) * 10.0**size for size in sizes]


def _checked(trial: _Trial, *, decays: bool, zero_stage: int) -> OptimizerStateSpec:
    whole = trial.run(range(_STEPS), decay=_DECAY)
    if not all(tensor.isfinite().all() for tensor in whole.tensors):
        raise _RefusedError("in a trial its weights are not finite after a few steps")
    if whole - trial.run(range(0)) == 0:
        raise _RefusedError("in a trial its steps change nothing")
    if whole - trial.run(range(_STEPS), decay=_DECAY, rate=2 * _RATE) == 0:
        raise _RefusedError('it does not read the learning rate, group["lr"], in its steps')
    if decays and whole - trial.run(range(_STEPS)) == 0:
        raise _RefusedError(
            'it does not read group["weight_decay"]; set optimizer.weight_decay to 0, or let it'
        )
    kept = _state_spec(whole)
    if kept != _state_spec(trial.run(range(1))):
        raise _RefusedError("its state has other names after some steps than after the first")
    for done in (1, 3):
        if _resumed(trial, kept, done) - whole:
            raise _RefusedError(
                "does not go on as if it had not stopped from `state` alone; keep what it "
                "remembers there, in tensors of the parameter's shape"
            )
    if zero_stage:
        for decay in (0.0, _DECAY):
            _check_pieces(trial, decay, zero_stage)
    zeros = [kept.entry(tensor) for tensor in whole.tensors]
    same = trial.run(range(_STEPS), decay=_DECAY, states=zeros) - whole == 0
    return OptimizerStateSpec(moments=kept.moments, step=kept.step, from_zero=same)


def _resumed(trial: _Trial, kept: OptimizerStateSpec, done: int) -> _Ran:
    """Stopped after some steps, and gone on from what a checkpoint holds."""
    before = trial.run(range(done), decay=_DECAY)
    states = []
    for tensor, old in zip(before.tensors, before.states, strict=True):
        state = kept.entry(tensor)
        for name in kept.moments:
            state[name].copy_(old[name])
        state["step"] += done
        states.append(state)
    steps = range(done, _STEPS)
    return trial.run(steps, decay=_DECAY, begin=before.tensors, states=states)


def _state_spec(ran: _Ran) -> OptimizerStateSpec:
    """What its states hold. Raises _RefusedError for what a checkpoint has no place for."""
    found = []
    for tensor, state in zip(ran.tensors, ran.states, strict=True):
        moments = {
            name: _dtype(name, value, tensor)
            for name, value in state.items()
            if name != "step" and value is not None
        }
        step = state["step"]
        if torch.is_tensor(step) and step.numel() != 1:
            raise _RefusedError("its state 'step' is not the count of its updates")
        found.append((moments, torch.zeros_like(step) if torch.is_tensor(step) else 0))
    (moments, step), *others = found
    if any(other[0] != moments for other in others):
        raise _RefusedError("it keeps other states of matrices than of vectors")
    return OptimizerStateSpec(moments=moments, step=step)


def _dtype(name: Any, value: Any, tensor: torch.Tensor) -> torch.dtype:
    if not torch.is_tensor(value) or value.shape != tensor.shape:
        what = f"of shape {tuple(value.shape)}" if torch.is_tensor(value) else repr(value)
        raise _RefusedError(
            f"its state {name!r} of a parameter is {what}; a checkpoint keeps tensors of the "
            "parameter's shape, and `step`, the count of its updates"
        )
    if value.dtype not in _DTYPES:
        raise _RefusedError(
            f"its state {name!r} is {value.dtype}; use float32, bfloat16 or float16"
        )
    if not isinstance(name, str) or "/" in name or name in _TAKEN:
        raise _RefusedError(f"its state {name!r} needs another name")
    return value.dtype


def _check_pieces(trial: _Trial, decay: float, zero_stage: int) -> None:
    """Each process of ZeRO has a piece of all values laid end to end, and nothing of the rest."""
    whole = trial.run(range(_STEPS), decay=decay)
    wanted = torch.cat([each.flatten() for each in whole.tensors])
    for inside in (slice(None, _CUT), slice(_CUT, None)):

        def cut(tensors: Tensors, inside: slice = inside) -> Tensors:
            return [torch.cat([each.detach().flatten() for each in tensors])[inside]]

        piece = trial.run(range(_STEPS), decay=decay, shaped=cut)
        if not piece - _Ran([wanted[inside]], []) <= 1e-4:  # which NaN is neither
            raise _RefusedError(
                f"the step of a value depends on others, and ZeRO {zero_stage} cuts parameters "
                "into flat pieces; use zero_optimization.stage 0"
            )
