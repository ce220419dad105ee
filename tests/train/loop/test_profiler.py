"""Traces of chosen steps: a file that viewers open, a table, nothing before and after."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]

from palm_ds.common.errors import UserError
from palm_ds.train.loop.loop import Loop
from palm_ds.train.loop.profiler import ProfileSettings, TracedOp, attach_profiler, table


class Played:
    """A loop of steps that multiply a matrix."""

    def __init__(self, folder: Path, steps: int, rank: int = 0):
        self.seen: list[str] = []
        self.messages: list[str] = []
        self.recipe = SimpleNamespace(curriculum=SimpleNamespace(steps=steps))
        self.run = SimpleNamespace(folder=folder)
        self.engine = SimpleNamespace(
            rank=rank, device=torch.device("cpu"), beat=lambda: self.seen.append("beat")
        )
        self.saver = SimpleNamespace(event=lambda name, message: self.messages.append(message))
        self.on_event = lambda name, facts: self.seen.append(name)

    def untimed(self, work: Any) -> None:
        work()

    def go(self, first: int, last: int, *, ends: str = "") -> None:
        self.on_event("begin", {"step": first})
        for step in range(first, last):
            torch.ones(50, 50) @ torch.ones(50, 50)
            self.on_event("step", {"step": step + 1})
        if ends:
            self.on_event(ends, {})


def traced(loop: Played, **settings: Any) -> Played:
    attach_profiler(cast(Loop, loop), ProfileSettings(**settings))
    return loop


def steps_of(path: Path) -> int:
    """The steps in a trace."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)
    names = {event["name"] for event in events if "ProfilerStep#" in str(event.get("name"))}
    return len(names)


def test_a_resumed_run_traces_from_its_fourth_step_on(tmp_path: Path) -> None:
    loop = traced(Played(tmp_path, 100), steps=2)
    loop.go(40, 50)
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "steps_00000044-00000045_rank_00000.json.gz" and steps_of(path) == 2
    (message,) = loop.messages
    assert message.startswith(f"profile: steps 44 to 45: {path} (open it in ui.perfetto.dev)\n")
    assert "  aten::mm" in message and "CPU ms/step" in message and "ProfilerStep" not in message
    assert loop.seen.count("step") == 10 and "beat" in loop.seen


@pytest.mark.parametrize(
    ("steps", "last", "ends"), [(5, 5, ""), (9, 5, "stopped"), (9, 5, "patience")]
)
def test_a_run_that_ends_first_has_a_shorter_trace(tmp_path, steps, last, ends) -> None:
    loop = traced(Played(tmp_path, steps), steps=7)
    loop.go(0, last, ends=ends)
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name.startswith("steps_00000004-00000005_")
    assert steps_of(path) == (3 if ends else 2)  # torch had started another one


def test_a_run_that_ends_in_the_first_steps_says_so(tmp_path: Path) -> None:
    loop = traced(Played(tmp_path, 12), steps=1)
    loop.go(10, 12)
    assert loop.messages == ["profile: nothing was traced: the run ends within its first 3 steps"]
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_only_if_asked(tmp_path: Path) -> None:
    traced(Played(tmp_path, 9, rank=3), steps=1).go(0, 9)
    assert list(tmp_path.iterdir()) == []
    traced(Played(tmp_path, 9, rank=3), steps=1, all_ranks=True, memory=True).go(0, 9)
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "steps_00000004-00000004_rank_00003.json.gz" and steps_of(path) == 1


def test_a_full_disk_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("")
    loop = traced(Played(tmp_path, 9), steps=1)
    loop.go(0, 9)
    assert loop.messages[0].startswith("profile: steps 4 to 4: not written: ")
    assert "  aten::mm" in loop.messages[0]


@pytest.mark.parametrize("steps", [0, -2, 101])
def test_a_number_that_makes_no_sense(steps: int) -> None:
    with pytest.raises(
        UserError, match=f"^--profile: expected (1 or more|at most 100), got {steps}$"
    ):
        ProfileSettings(steps=steps)


def op(key: str, device: DeviceType, cpu: float, gpu: float, note: bool = False) -> TracedOp:
    found = SimpleNamespace(key=key, count=4, device_type=device, is_user_annotation=note)
    found.self_cpu_time_total, found.self_device_time_total = cpu, gpu
    return cast(TracedOp, found)


def test_on_a_gpu_the_table_has_its_kernels_once() -> None:
    """torch counts the time of a kernel for the operation that launched it, too."""
    ops = [
        op("aten::mm", DeviceType.CPU, 5000.0, 3000.0),
        op("gemm" * 40, DeviceType.CUDA, 0.0, 3000.0),
        op("softmax", DeviceType.CUDA, 0.0, 1000.0),
        op("ProfilerStep#4", DeviceType.CUDA, 0.0, 9000.0, note=True),
    ]
    head, first, second = table(ops, 2)
    assert head.split() == ["share", "GPU", "ms/step", "calls/step", "operation"]
    assert first.split() == ["75.0%", "1.500", "2.0", ("gemm" * 40)[:60]]
    assert second.split() == ["25.0%", "0.500", "2.0", "softmax"]
