from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from palm_ds.common.rng import derive_key
from palm_ds.runtime.step.gradient_accumulation import DevicePrefetcher, MicroSteps

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@dataclass
class Cuda:
    """The part of torch.cuda that is used, writing down what happens on which stream."""

    log: list[str] = field(default_factory=list)
    now: str = "compute"

    def Stream(self, device: torch.device) -> Stream:  # noqa: N802
        self.log.append(f"stream on {device}")
        return Stream(self, "side")

    @contextmanager
    def stream(self, stream: Stream):
        self.now = stream.name
        yield
        self.now = "compute"

    def current_stream(self, device: torch.device) -> Stream:
        return Stream(self, self.now)


@dataclass
class Stream:
    cuda: Cuda
    name: str

    def record_event(self) -> str:
        return self.cuda.log[-1]

    def wait_event(self, event: str) -> None:
        self.cuda.log.append(f"{self.name} waits for {event}")


@dataclass
class Numbered:
    number: int
    cuda: Cuda

    def to(self, device: torch.device) -> Numbered:
        self.cuda.log.append(f"copy {self.number} on {self.cuda.now}")
        return self

    def map(self, change: Callable[[Any], Any]) -> Numbered:
        change(self)
        return self

    def record_stream(self, stream: Stream) -> None:
        self.cuda.log.append(f"{self.number} used by {stream.name}")


def test_the_next_batch_is_copied_while_one_is_computed_with() -> None:
    cuda = Cuda()
    ahead = DevicePrefetcher(GPU, cuda)
    for batch in ahead.copied(Numbered(number, cuda) for number in range(3)):
        cuda.log.append(f"run {batch.number}")
    list(ahead.copied([Numbered(3, cuda)]))
    assert cuda.log == [
        "stream on cuda:0",
        "copy 0 on side",
        "copy 1 on side",
        "compute waits for copy 0 on side",
        "0 used by compute",
        "run 0",
        "copy 2 on side",
        "compute waits for copy 1 on side",
        "1 used by compute",
        "run 1",
        "compute waits for copy 2 on side",
        "2 used by compute",
        "run 2",
        "copy 3 on side",
        "compute waits for copy 3 on side",
        "3 used by compute",
    ]
    assert list(ahead.copied([])) == []


def test_on_a_cpu_a_batch_is_moved_when_it_is_its_turn() -> None:
    cuda = Cuda()
    for batch in DevicePrefetcher(CPU, cuda).copied(Numbered(number, cuda) for number in range(2)):
        cuda.log.append(f"run {batch.number}")
    assert cuda.log == ["copy 0 on compute", "run 0", "copy 1 on compute", "run 1"]


def test_a_step_on_a_cpu_draws_as_torch_seeds_and_notes_nothing_for_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch.manual_seed formats the stack for each kind of device: a millisecond a step."""
    torch.manual_seed(derive_key(5, "dropout", 7, 1))
    wanted = torch.rand(3)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda _: pytest.fail("noted"))
    steps: Any = SimpleNamespace(seed=5, processes=SimpleNamespace(rank=1, device=CPU))
    MicroSteps._seed(steps, 7)
    assert torch.equal(torch.rand(3), wanted)
