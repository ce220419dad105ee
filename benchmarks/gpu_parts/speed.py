"""(b) How fast pretraining is, form by form, and what holds it back."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.gpu_parts.context import Context, Row, seconds_of
from benchmarks.gpu_parts.measure import (
    TrainingLoop,
    host_time,
    profile,
    speed,
    synchronizations,
    with_room,
)
from benchmarks.gpu_parts.models import MODERN_WORDS, WORDS, BareLoop, EngineLoop, Setup
from palm_ds.model.kernels import IMPLEMENTATIONS
from palm_ds.model.ops.implementation import Implementation

GOALS = {("base", 512): 0.45, ("large", 512): 0.50}
"""The share of the card's bf16 peak to reach: packed rows of 512, dropout 0.1."""
ROOM = {"base": 65_536, "large": 32_768, "modernbert-base": 65_536}
"""Tokens of a micro-batch to begin with; halved while they do not fit."""


def ceilings(context: Context) -> None:
    """What the card does at most here: a copy, and products of large matrices of random numbers."""
    side = 256 if context.toy else 8192
    for precision in ("bf16", "fp16", "fp32"):
        if context.device.type == "cpu" and precision == "fp16":
            continue
        context.measure(lambda p=precision: _product(side, p, context), precision=precision)
    context.measure(lambda: _copy(side, context), copy=f"{side}x{side} fp32")


def _product(side: int, precision: str, context: Context) -> Row:
    from palm_ds.runtime.device.torch_settings import DTYPES

    a, b = (
        torch.randn(side, side, device=context.device, dtype=DTYPES[precision]) for _ in range(2)
    )
    rate = 2 * side**3 / _median(lambda: torch.mm(a, b), context)
    found: Row = {"tflops": round(rate / 1e12, 2)}
    if peak := context.peak(precision):
        found["share_of_peak"] = round(rate / peak, 4)
    return found


def _copy(side: int, context: Context) -> Row:
    source = torch.randn(side, side, device=context.device)
    target = torch.empty_like(source)
    seconds = _median(lambda: target.copy_(source), context)
    return {"gb_per_s": round(2 * source.nbytes / seconds / 1e9, 1)}


def _median(call: Callable[[], object], context: Context, repeats: int = 10) -> float:
    for _ in range(3):
        call()
    return statistics.median(seconds_of(call, context.device) for _ in range(repeats))


def goals(context: Context) -> None:
    """The goal: packed rows of 512, dropout 0.1, the kernels that a run chooses; then rows of 128.
    Where it is not met, the profile says what the time goes to."""
    for shape, length in (("base", 512),) if context.toy else (*GOALS, ("base", 128)):
        _goals(context, setup_of(context, shape=shape, length=length))


def modern(context: Context) -> None:
    """ModernBERT-base on packed rows of 1,024 and 8,192."""
    for length in (64,) if context.toy else (1024, 8192):
        _goals(
            context, setup_of(context, shape="modernbert-base", length=length), names=("engine",)
        )


def _goals(context: Context, setup: Setup, names: Sequence[str] = ("engine", "bare")) -> None:
    for name, make in loops(context):
        if name in names:
            context.measure(
                lambda m=make: with_room(lambda now: _goal(m, now, context), setup),
                needs=20,
                shape=setup.shape,
                loop=name,
                length=setup.length,
                dropout=setup.dropout,
            )


def _goal(make: MakeLoop, setup: Setup, context: Context) -> Row:
    loop = make(setup, context)
    try:
        found = speed(loop, context) | {"kernels": vars(loop.kernels).copy()}
        found["choice"] = setup.choice(context.device)[1]
        found |= synchronizations(loop, found["steps"], context.device)
        found |= host_time(loop, found["steps"] + 8, context.device)
        goal, share = GOALS.get((setup.shape, setup.length)), found.get("share_of_peak")
        if goal and share is not None:
            found |= {"goal": goal, "met": share >= goal}
        if not found.get("met"):
            found["profile"] = profile(loop, found["steps"] + 4, context.device)
    finally:
        loop.close()
    return found


MakeLoop = Callable[[Setup, Context], Any]


def loops(context: Context) -> Iterator[tuple[str, MakeLoop]]:
    """palm_ds as a run trains it, where DeepSpeed is installed, and its model in a plain loop."""
    if importlib.util.find_spec("deepspeed"):
        yield "engine", lambda setup, where: EngineLoop(setup, _batches(setup), where.device)
    else:
        context.add(loop="engine", skipped="DeepSpeed is not installed")
    yield "bare", lambda setup, where: BareLoop(setup, _batches(setup), where.device)


def _batches(setup: Setup) -> list[Any]:
    return setup.batches(4)


def setup_of(
    context: Context, *, shape: str, length: int, dropout: float = 0.1, **more: Any
) -> Setup:
    modern = shape.startswith("modernbert")
    words, rows = MODERN_WORDS if modern else WORDS, max(ROOM[shape] // length, 1)
    if context.toy:
        shape, words, rows = "modernbert-toy" if modern else "toy", 500, 2
    return Setup(
        shape=shape,
        length=min(length, 64) if context.toy else length,
        rows=rows,
        words=words,
        precision=context.precision,
        dropout=0.0 if modern else dropout,
        **more,
    )


def forms(context: Context) -> None:
    """Each implementation of each operation that can run, the others as a run chooses them, in a
    plain loop: base, rows of 512, with dropout and without."""
    for dropout in (0.1,) if context.toy else (0.1, 0.0):
        setup = setup_of(context, shape="base", length=512, dropout=dropout)
        names = {"length": setup.length, "dropout": dropout}
        bare(context, setup, operation="", form="as a run chooses", **names)
        for requested in _runnable(setup, context, skips=dropout == 0.1):
            (operation, form), *_ = requested
            bare(
                context, setup.changed(requested=requested), operation=operation, form=form, **names
            )


def _runnable(
    setup: Setup, context: Context, *, skips: bool
) -> Iterator[tuple[tuple[str, str], ...]]:
    """What to request of a run: each form, and where attention needs it the other dropout. Names
    the forms that cannot run, if `skips`."""
    chosen = vars(setup.kernels(context.device))
    for operation, choices in IMPLEMENTATIONS.items():
        dropouts = ("plain", "counter") if operation == "attention" else (chosen["dropout"],)
        for each in () if context.toy and operation == "compile" else choices:
            reasons = {name: _objection(each, setup, context, name) for name in dropouts}
            able = [("dropout", name) for name, reason in reasons.items() if not reason]
            if skips and not able:
                skipped = "; ".join(dict.fromkeys(filter(None, reasons.values())))
                context.add(operation=operation, form=each.name, skipped=skipped)
            if able and chosen[operation] != each.name:
                more = able[:1] if operation == "attention" else []
                if operation == "layer_norm":  # compiled layers do without it
                    more = [("compile", "off")]
                yield ((operation, each.name), *more)


def _objection(each: Implementation, setup: Setup, context: Context, dropout: str) -> str | None:
    return each.unavailable(setup.environment(context.device, dropout))


def bare(context: Context, setup: Setup, *, needs: float = 8, **names: Any) -> Row:
    """A row of the speed of a plain loop."""

    def measured(now: Setup) -> Row:
        loop: TrainingLoop = BareLoop(now, _batches(now), context.device)
        try:
            return speed(loop, context, seconds=1.5)
        finally:
            loop.close()

    return context.measure(lambda: with_room(measured, setup), needs=needs, **names)


def lengths(context: Context) -> None:
    """Base and large at every length, with dropout and without, as a run chooses its kernels; then
    each attention at the other lengths."""
    for length in (512,) if context.toy else (512, 128, 2048, 8192):
        for shape in ("base", "large"):
            for dropout in (0.1, 0.0):
                setup = setup_of(context, shape=shape, length=length, dropout=dropout)
                bare(context, setup, shape=shape, length=setup.length, dropout=dropout)
    for length in () if context.toy else (2048, 8192, 128):
        setup = setup_of(context, shape="base", length=length)
        names = {"shape": "base", "length": length, "dropout": setup.dropout}
        for requested in _runnable(setup, context, skips=False):
            if requested[0][0] == "attention":
                bare(context, setup.changed(requested=requested), **names, form=requested[0][1])


def optimizers(context: Context) -> None:
    """The time of a step that is not forward or backward: torch's fused AdamW by itself, then the
    engine with each optimizer on a step of one short row."""
    setup = setup_of(context, shape="base", length=128).changed(rows=1)
    context.measure(lambda: _adamw(setup, context), optimizer="adamw, torch fused, alone")
    if importlib.util.find_spec("deepspeed") is None:
        context.add(optimizer="engine", skipped="DeepSpeed is not installed")
        return
    from palm_ds.runtime.optimizer import optimizer as of_runs

    for kind in of_runs._KINDS:
        for stage in (0,) if context.toy else (1, 0, 2):
            context.measure(
                lambda k=kind, s=stage: _engine_step(setup, k, s, context),
                needs=6,
                optimizer=kind,
                stage=stage,
            )


def _adamw(setup: Setup, context: Context) -> Row:
    loop = BareLoop(setup.changed(precision="fp32"), _batches(setup), context.device)
    for weight in loop.weights:
        weight.grad = torch.randn_like(weight)
    count = sum(weight.numel() for weight in loop.weights)
    seconds = _median(loop.optimizer.step, context)
    loop.close()
    return {"step_ms": round(1e3 * seconds, 3), "parameters": count}


def _engine_step(setup: Setup, kind: str, stage: int, context: Context) -> Row:
    loop = EngineLoop(
        setup,
        _batches(setup),
        context.device,
        stage=stage,
        workers=0,
        optimizer={"kind": kind, "lr": 1e-4},
    )
    try:
        timer = _StepTimer(loop.engine._optimizer, context)
        numbers = iter(range(1000))
        seconds = _median(lambda: loop.step(next(numbers)), context)
        found = {"optimizer_ms": round(timer.median(), 3), "step_ms": round(1e3 * seconds, 3)}
    finally:
        loop.close()
    return found


class _StepTimer:
    """Times the steps of DeepSpeed's inner optimizer, all its calls of one training step."""

    def __init__(self, optimizer: Any, context: Context):
        self.device, self.marks = context.device, []
        self._step = optimizer.step
        optimizer.step = self

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            result = self._step(*arguments, **named)
            end.record()
            self.marks.append((begin, end))
            return result
        began = time.perf_counter()
        result = self._step(*arguments, **named)
        self.marks.append(1e3 * (time.perf_counter() - began))
        return result

    def median(self) -> float:
        """Milliseconds of a call."""
        each = [m if isinstance(m, float) else m[0].elapsed_time(m[1]) for m in self.marks]
        return statistics.median(each)
