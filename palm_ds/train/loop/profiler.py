"""A trace of some steps of a run, by torch's profiler (`--profile N`).

The first steps of the process are not traced, since they compile and allocate. A trace is a file
for https://ui.perfetto.dev and, in the log, a table of the operations that took most time. Training
computes the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
from pydantic import Field
from torch.profiler import ProfilerActivity

from palm_ds.common.settings import Settings
from palm_ds.train.loop.loop import EventHandler, Loop

_WARM_UP = 3
"""Steps that are not traced; torch prepares its tracing in the last of them."""
_MAX_STEPS = 100
"""Steps; no viewer opens a trace of more."""
_ENDS = ("stopped", "nonfinite", "patience")
"""Events after which no step follows; the last step of the curriculum is another end."""
_ROWS, _NAME = 15, 60
"""Rows of the table, and characters of a name."""


@dataclass(frozen=True, kw_only=True)
class ProfileSettings(Settings):
    """Settings for tracing steps. Raises UserError."""

    steps: Annotated[int, Field(ge=1, le=_MAX_STEPS)]
    memory: bool = False
    """Every allocation too."""
    all_ranks: bool = False
    """A trace of each process, not of rank 0 alone."""

    def path_of(self, name: str) -> str:
        return "--profile"


class DeviceKind(Protocol):
    """torch's DeviceType."""

    name: str


class TracedOp(Protocol):
    """An operation, or a kernel of the GPU, in torch's averages; times in microseconds, without
    those of its callees."""

    key: str
    count: int
    device_type: DeviceKind
    is_user_annotation: bool
    self_cpu_time_total: float
    self_device_time_total: float


def attach_profiler(loop: Loop, settings: ProfileSettings | None) -> None:
    """Trace steps of the loop, if there is anything to trace."""
    if settings and (settings.all_ranks or loop.engine.rank == 0):
        profiler = StepProfiler(loop, settings, loop.on_event)
        loop.on_event = profiler


@dataclass
class StepProfiler:
    """An event handler that traces steps and passes the events on."""

    loop: Loop
    settings: ProfileSettings
    then: EventHandler
    _profile: torch.profiler.profile | None = None
    _traced: list[int] = field(default_factory=list)
    """Numbers of the steps in the trace, from 1."""
    _seen: int = 0

    def __call__(self, name: str, facts: Mapping[str, Any]) -> None:
        if name == "begin":
            self._start()
        elif name == "step" and self._profile:
            self._step(self._profile, facts["step"])
        elif name in _ENDS:
            self._end()
        self.then(name, facts)

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self.loop.engine.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(
                skip_first=_WARM_UP - 1, wait=0, warmup=1, active=self.settings.steps, repeat=1
            ),
            on_trace_ready=self._write,
            record_shapes=True,
            profile_memory=self.settings.memory,
        )
        self._profile.start()

    def _step(self, profile: torch.profiler.profile, done: int) -> None:
        self._seen += 1
        if self._seen > _WARM_UP:
            self._traced.append(done)
        last = done == self.loop.recipe.curriculum.steps
        if last or len(self._traced) == self.settings.steps:
            self._end()
        else:
            profile.step()

    def _end(self) -> None:
        """Write what was traced, perhaps fewer steps than wanted."""
        if not self._profile:
            return
        profile, self._profile = self._profile, None
        self.loop.untimed(profile.stop)
        if not self._traced:
            self._event(f"nothing was traced: the run ends within its first {_WARM_UP} steps")

    def _write(self, profile: torch.profiler.profile) -> None:
        """Write the trace and log its table."""
        engine, (first, last) = self.loop.engine, (self._traced[0], self._traced[-1])
        engine.beat()
        name = f"steps_{first:08}-{last:08}_rank_{engine.rank:05}.json.gz"
        path = self.loop.run.folder / "profile" / name
        problem = _written(path, profile.export_chrome_trace)
        rows = table(profile.key_averages(), len(self._traced))
        where = f"not written: {problem}" if problem else f"{path} (open it in ui.perfetto.dev)"
        self._event("\n".join([f"steps {first} to {last}: {where}", *rows]))
        engine.beat()

    def _event(self, message: str) -> None:
        self.loop.saver.event("profile", f"profile: {message}")


def _written(path: Path, export: Callable[[str], None]) -> str:
    """Write a trace, complete or not at all. Returns why it could not be, or nothing."""
    part = path.with_name(f".{path.name}")
    try:
        path.parent.mkdir(exist_ok=True)
        export(str(part))
        os.replace(part, path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        return error.strerror or str(error)
    return ""


def table(ops: Sequence[TracedOp], steps: int) -> list[str]:
    """The kernels that took most time of the GPU; where there is none, the operations that took
    most time of the CPU, without what they call."""
    kernels = [op for op in ops if op.device_type.name != "CPU" and not op.is_user_annotation]
    times = {op.key: op.self_device_time_total for op in kernels}
    if not kernels:
        times = {op.key: op.self_cpu_time_total for op in ops if not _is_step(op)}
    count = {op.key: op.count for op in ops}
    total = sum(times.values()) or 1.0
    lines = [f"{'share':>7}{'GPU' if kernels else 'CPU':>7} ms/step{'calls/step':>12}  operation"]
    for key in sorted(times, key=lambda key: -times[key])[:_ROWS]:
        share, milliseconds = 100 * times[key] / total, times[key] / 1000 / steps
        lines.append(f"{share:6.1f}%{milliseconds:15.3f}{count[key] / steps:12.1f}  {key[:_NAME]}")
    return lines


def _is_step(op: TracedOp) -> bool:
    return op.key.startswith("ProfilerStep")
