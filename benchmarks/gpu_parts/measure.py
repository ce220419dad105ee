"""How fast a training loop is, what it waits for, and what its time goes to."""

from __future__ import annotations

import gc
import statistics
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol
from unittest.mock import patch

import torch

from benchmarks.gpu_parts.context import Context, Row, seconds_of, synchronize
from benchmarks.gpu_parts.models import Setup
from palm_ds.model.inputs.batch import Batch
from palm_ds.runtime.device.memory import compile_count, take_memory_use

BLOCKS, LEAST_STEPS, MOST_WARM_UP = 3, 3, 12
TOP = 20


class TrainingLoop(Protocol):
    setup: Setup
    batches: list[Batch]

    def step(self, number: int) -> torch.Tensor: ...

    def close(self) -> None: ...


def speed(loop: TrainingLoop, context: Context, seconds: float = 3.0) -> Row:
    """Real tokens per second of a loop: the median of a few blocks of steps, after a warm-up."""
    device, tokens = context.device, mean(batch.real_tokens for batch in loop.batches)
    flops = mean(loop.setup.flops(batch.to("cpu")) for batch in loop.batches)
    compiled, began = compile_count(), time.perf_counter()
    done, one = warm_up(loop, device)
    warm = time.perf_counter() - began
    take_memory_use(device)
    gc.collect()
    gc.freeze()  # a run does not look through all objects either
    steps = LEAST_STEPS if context.toy else max(LEAST_STEPS, int(seconds / BLOCKS / one))
    waited = getattr(loop, "waited", None)
    rates, passed = [], 0.0
    for _ in range(BLOCKS):
        block = seconds_of(lambda first=done: run(loop, first, steps), device)
        rates.append(steps * tokens / block)
        done, passed = done + steps, passed + block
    gc.unfreeze()
    found = rate_row(statistics.median(rates), flops / tokens, loop.setup.precision, context)
    found |= {"spread": round((max(rates) - min(rates)) / statistics.median(rates), 3)}
    found |= {"warm_up_s": round(warm, 1), "compiled": compile_count() - compiled}
    if waited is not None:
        found["data_wait"] = round((getattr(loop, "waited", 0.0) - waited) / passed, 4)
    if used := take_memory_use(device):
        found |= {"memory_gb": round(used.allocated / 1e9, 2)}
        found |= {"reserved_gb": round(used.reserved / 1e9, 2)}
    return found | {"steps": done}


def mean(values: Any) -> float:
    return statistics.fmean(values)


def rate_row(rate: float, flops_per_token: float, precision: str, context: Context) -> Row:
    """Tokens per second as FLOP/s and as a share of the card's peak."""
    found: Row = {"tokens_per_s": round(rate), "tflops": round(rate * flops_per_token / 1e12, 3)}
    if peak := context.peak(precision):
        found["share_of_peak"] = round(rate * flops_per_token / peak, 4)
    return found


def warm_up(loop: TrainingLoop, device: torch.device) -> tuple[int, float]:
    """Steps until their time stays the same: (steps done, seconds of one)."""
    last = float("inf")
    for number in range(MOST_WARM_UP):
        one = seconds_of(lambda n=number: loop.step(n), device)
        if number >= 3 and abs(one - last) < 0.1 * last:
            return number + 1, one
        last = one
    return MOST_WARM_UP, last


def run(loop: TrainingLoop, first: int, steps: int) -> None:
    for number in range(first, first + steps):
        loop.step(number)


def host_time(loop: TrainingLoop, first: int, device: torch.device, steps: int = 4) -> Row:
    """How long the host takes to hand a step to an idle device, in milliseconds: all of it, and in
    the engine's calls of DeepSpeed. A step that takes no longer on the device waits for the
    host."""
    engine = getattr(getattr(loop, "engine", None), "_engine", None)
    found: dict[str, list[float]] = {}
    with ExitStack() as stack:
        for name in ("forward", "backward", "step") if engine is not None else ():
            timed = _timed(getattr(engine, name), found.setdefault(name, []))
            stack.enter_context(patch.object(engine, name, timed))
        for number in range(first, first + steps):
            synchronize(device)
            _timed(loop.step, found.setdefault("whole", []))(number)
    synchronize(device)
    return {f"host_{name}_ms": round(1e3 * statistics.median(x), 1) for name, x in found.items()}


def _timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        result = function(*arguments, **named)
        seconds.append(time.perf_counter() - began)
        return result

    return call


def synchronizations(loop: TrainingLoop, first: int, device: torch.device, steps: int = 4) -> Row:
    """How often a step waits for the device, and from which lines, as torch's debug mode sees
    it."""
    if device.type != "cuda":
        return {}
    synchronize(device)
    places: Counter[str] = Counter()

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "synchroniz" in str(message):
            places[_place()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run(loop, first, steps)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    lines = {place: count / steps for place, count in places.most_common(8)}
    return {"syncs_per_step": sum(places.values()) / steps, "sync_places": lines}


def _place() -> str:
    """The innermost lines outside this file that were running."""
    frames = [f for f in traceback.extract_stack()[:-2] if not f.filename.endswith("warnings.py")]
    inside = [f"{'/'.join(f.filename.split('/')[-2:])}:{f.lineno}" for f in frames[-3:]]
    return " > ".join(inside)


def profile(loop: TrainingLoop, first: int, device: torch.device, steps: int = 3) -> Row:
    """What the time of a step goes to: the kernels that take most, how long the device has nothing
    to do, and the calls of CUDA in which the host spends most of its time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    with torch_profile(activities=activities) as found:
        passed = seconds_of(lambda: run(loop, first, steps), device)
    events = [(each, _own_time(each, on_gpu)) for each in found.key_averages()]
    busy = sum(own for _, own in events)
    top = sorted(events, key=lambda pair: -pair[1])[:TOP]
    lines = [
        {
            "kernel": each.key[:120],
            "ms_per_step": round(own / 1e3 / steps, 4),
            "share": round(own / max(busy, 1e-9), 4),
            "calls_per_step": each.count / steps,
        }
        for each, own in top
        if own
    ]
    calls = [event for event, _ in events if event.key.startswith("cu")]
    host = {
        each.key: round(each.self_cpu_time_total / 1e3 / steps, 3)
        for each in sorted(calls, key=lambda event: -event.self_cpu_time_total)[:6]
    }
    idle = round(1 - busy / 1e6 / passed, 4)
    return {"step_ms": 1e3 * passed / steps, "idle_share": idle, "host": host, "kernels": lines}


def _own_time(event: Any, on_gpu: bool) -> float:
    """Microseconds of an entry itself; on GPUs, of kernels alone."""
    if not on_gpu:
        return float(event.self_cpu_time_total)
    kernel = "CUDA" in str(getattr(event, "device_type", ""))
    if getattr(event, "is_user_annotation", False):  # a range around kernels
        return 0.0
    return float(event.self_device_time_total) if kernel else 0.0


def with_room(make: Callable[[Setup], Row], setup: Setup) -> Row:
    """Tries with half the rows as long as the card's memory is too small."""
    while True:
        try:
            return make(setup) | {"rows": setup.rows}
        except torch.OutOfMemoryError:
            if setup.rows == 1:
                raise
        free_cached()
        setup = setup.changed(rows=max(setup.rows // 2, 1))


def free_cached() -> None:
    gc.collect()
    torch.cuda.empty_cache()
