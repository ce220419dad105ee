"""The micro-batches of a step: forward, backward, and DeepSpeed's step after the last of them.

With an adversarial attack (FGM) each micro-batch makes two passes: as it is, and with perturbed
embeddings. If a task's loss is over the whole step, all micro-batches make two, unless a process
has only one (palm_ds/runtime/step/grad_cache.py).

The forward passes of a process are timed by themselves: a step takes equally long everywhere, since
each process waits for the slowest one in the backward pass; a forward pass waits for nobody (but
under ZeRO 3, which gathers weights in it).

Micro-batches are copied to the device while it computes:

    host      copy 0 | copy 1, run 0        | copy 2, run 1        | run 2
    side      [copy 0] [copy 1]               [copy 2]
    compute            [------ run 0 ------]  [------ run 1 ------]  [-- run 2 --]

The copies have a CUDA stream of their own, so they do not queue behind what the device computes.
The host memory must be pinned, or the host waits for each. On a CPU a batch stays where it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import torch

from palm_ds.common.rng import derive_key
from palm_ds.runtime.processes.processes import Processes
from palm_ds.runtime.step.grad_cache import GlobalBatchLoss, GradCache, LabeledBatch


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Sums of one step. Losses and correct predictions are this process's and stay on the device;
    `Engine.reduce` adds them up over all processes."""

    loss_sums: Mapping[str, torch.Tensor]
    correct: Mapping[str, torch.Tensor]
    counts: Mapping[str, int]
    """Labels of each task, over all processes."""
    tokens: int
    """Tokens without padding, over all processes."""
    stop: bool
    """Whether any process was asked to stop."""
    checkpoint_written: bool = False
    """Whether all processes had written a checkpoint in the background, before this step."""


class LossAndCorrect(Protocol):
    """Output of a head, as far as the engine reads it."""

    @property
    def loss_sum(self) -> torch.Tensor: ...

    @property
    def correct(self) -> torch.Tensor: ...


class LossSums:
    """Adds up losses and correct predictions on the device."""

    def __init__(self) -> None:
        self.loss: dict[str, torch.Tensor] = {}
        self.correct: dict[str, torch.Tensor] = {}

    def add(self, outputs: Mapping[str, LossAndCorrect]) -> None:
        """Add those of some tasks."""
        for task in outputs:
            loss, correct = outputs[task].loss_sum.detach(), outputs[task].correct.detach()
            self.loss[task] = self.loss[task] + loss if task in self.loss else loss
            self.correct[task] = self.correct[task] + correct if task in self.correct else correct


class ForwardTimer:
    """Adds up the time of what runs inside `measure()`, on the device if it has a clock."""

    def __init__(self, device: torch.device):
        self._events: list[tuple[Any, Any]] | None = [] if device.type == "cuda" else None
        self._seconds = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        if self._events is None:
            started = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - started
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        yield
        last.record()
        self._events.append((first, last))

    def take(self) -> float:
        """The seconds since the last call. Synchronizes with the device."""
        seconds, self._seconds = self._seconds, 0.0
        for first, last in self._events or ():
            last.synchronize()
            seconds += first.elapsed_time(last) / 1000
        if self._events:
            self._events.clear()
        return seconds


C = TypeVar("C", bound="Copyable")


class Copyable(Protocol):
    """A batch of tensors."""

    def to(self: C, device: torch.device) -> C: ...

    def map(self: C, change: Callable[[torch.Tensor], torch.Tensor]) -> C: ...


@dataclass
class DevicePrefetcher:
    """Copies batches to a device. `cuda` has the interface of torch.cuda."""

    device: torch.device
    cuda: Any = torch.cuda
    _side: torch.cuda.Stream | None = field(default=None, repr=False)

    def copied(self, batches: Iterable[C]) -> Iterator[C]:
        """The batches on the device. The copy of the next one starts before each is handed out."""
        if self.device.type != "cuda":
            yield from (batch.to(self.device) for batch in batches)
            return
        started = None
        for batch in batches:
            following = self._start(batch)
            if started:
                yield self._arrived(*started)
            started = following
        if started:
            yield self._arrived(*started)

    def _start(self, batch: C) -> tuple[C, torch.Event]:
        """The batch as it will be, and the event that says so."""
        side = self._side = self._side or self.cuda.Stream(self.device)
        with self.cuda.stream(side):
            batch = batch.to(self.device)
            return batch, side.record_event()

    def _arrived(self, batch: C, copied: torch.Event) -> C:
        """The batch for the current stream, which waits for it on the device. Its memory is the
        side stream's: it may be used again once the current stream has passed this place."""
        stream = self.cuda.current_stream(self.device)
        stream.wait_event(copied)

        def used(tensor: torch.Tensor) -> torch.Tensor:
            tensor.record_stream(stream)
            return tensor

        return batch.map(used)


B = TypeVar("B", bound="MicroBatch")
B_contra = TypeVar("B_contra", bound="MicroBatch", contravariant=True)


class MicroBatch(Copyable, LabeledBatch, Protocol):
    """A micro-batch, as far as it is handled here."""

    def with_dropout_key(self: B, key: int) -> B: ...


class Memories(Protocol[B_contra]):
    """Memories that slots have of documents, as `palm_ds.model.inputs.memory.SlotMemories`."""

    def begin(self, batches: Sequence[B_contra]) -> None: ...

    def keep(self, batch: B_contra) -> None: ...


class Attack(Protocol[B_contra]):
    """Perturbs the second pass of a micro-batch, as `palm_ds.model.fgm.FGM` does."""

    def begin(self, batch: B_contra) -> None: ...

    def attack(self) -> None: ...

    def restore(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class MicroSteps(Generic[B]):
    """Trains the micro-batches of one process."""

    engine: Any
    """DeepSpeed's."""
    tasks: tuple[str, ...]
    """Everything that has a loss."""
    processes: Processes
    seed: int
    attack: Attack[B] | None = None
    global_batch: Mapping[str, GlobalBatchLoss] = field(default_factory=dict)
    """The tasks whose loss is over the whole step."""
    teacher: Callable[[B, int], B] | None = None
    """Adds what teachers make of a micro-batch of a step."""
    memories: Memories[B] | None = None
    """What slots remember of documents."""

    @cached_property
    def timer(self) -> ForwardTimer:
        return ForwardTimer(self.processes.device)

    @cached_property
    def copies(self) -> DevicePrefetcher:
        return DevicePrefetcher(self.processes.device)

    def run(
        self,
        batches: Sequence[B],
        step: int,
        counts: Mapping[str, int],
        weights: Mapping[str, float],
        progress: float = 1.0,
    ) -> LossSums:
        """Train on them. `counts`: the labels of each task in the whole step, over all processes;
        `weights`: the weight of each task's loss (default 1); `progress`: the share of the run's
        steps that are done."""
        # What draws from torch's generator depends on (seed, step, rank) alone, so checkpoints need
        # no random state.
        self._seed(step)
        # The average of gradients over processes undoes the factor `world`.
        scales = {
            task: weights.get(task, 1.0) * self.processes.world / max(counts[task], 1)
            for task in self.tasks
        }
        sums = LossSums()
        self.engine.train()
        labeled = {task: loss for task, loss in self.global_batch.items() if counts[task]}
        whole = GradCache[B](labeled, self.processes, progress)
        if whole and len(batches) > 1:
            self._first_passes(batches, step, whole)
        if self.memories:
            self.memories.begin(batches)
        for number, batch in enumerate(self.copies.copied(batches)):
            if whole:
                self._repeat_draws(step, number)
            if self.teacher:
                batch = self.teacher(batch, step)
            sums.add(self._micro_step(batch, scales, step, number, whole))
            if self.memories:
                self.memories.keep(batch)
        sums.add(whole.cached)
        return sums

    def losses_again(self, batches: Sequence[B], tasks: Collection[str]) -> dict[str, torch.Tensor]:
        """The loss sums of micro-batches without dropout, attacks and teachers; `tasks`: those that
        have labels on some process. Trains nothing. Collective."""
        labeled = {task: loss for task, loss in self.global_batch.items() if task in tasks}
        sums, whole = LossSums(), GradCache[B](labeled, self.processes)
        self.engine.eval()
        try:
            with torch.no_grad():
                for batch in self.copies.copied(batches):
                    outputs = self.engine(batch)
                    sums.add(outputs)
                    whole.add(batch, outputs)
        finally:
            self.engine.train()
        whole.finish()
        sums.add(whole.cached)
        return {task: loss for task, loss in sums.loss.items() if task in tasks}

    def _first_passes(self, batches: Sequence[B], step: int, whole: GradCache[B]) -> None:
        """Compute the losses over all micro-batches of all processes. Collective."""
        for number, batch in enumerate(self.copies.copied(batches)):
            self._repeat_draws(step, number)
            with torch.no_grad(), self.timer.measure():
                outputs = self.engine(self._with_dropout(batch, step))
            whole.add(batch, outputs)
        whole.finish()

    def _repeat_draws(self, step: int, number: int) -> None:
        """Let both passes of a micro-batch draw the same from torch's generator: dropout that is
        not `counter` does."""
        self._seed(step, number)

    def _seed(self, step: int, *more: int) -> None:
        key = derive_key(self.seed, "dropout", step, self.processes.rank, *more)
        if self.processes.device.type == "cpu":
            # torch.manual_seed also formats the stack, for devices that may start later: up to 1 ms
            torch.default_generator.manual_seed(key)
        else:
            torch.manual_seed(key)

    def _micro_step(
        self,
        batch: B,
        scales: Mapping[str, float],
        step: int,
        number: int,
        whole: GradCache[B],
    ) -> dict[str, Any]:
        batch = self._with_dropout(batch, step)
        if not self.attack:
            return self._pass(batch, scales, number, whole)
        self.attack.begin(batch)
        outputs = self._pass(batch, scales, number, whole)
        self.attack.attack()
        self._pass(self._with_dropout(batch, step, "attack"), scales, number, whole)
        self.attack.restore()
        return outputs

    def _with_dropout(self, batch: B, step: int, *more: str) -> B:
        """The batch with its masks' key: the same on all processes."""
        return batch.with_dropout_key(derive_key(self.seed, "dropout", step, *more) >> 1)

    def _pass(
        self, batch: B, scales: Mapping[str, float], number: int, whole: GradCache[B]
    ) -> dict[str, Any]:
        with self.timer.measure():
            outputs = self.engine(batch)
        if whole and not whole.cached:  # the only micro-batch
            whole.add(batch, outputs)
            whole.finish()
        total = sum(outputs[task].loss_sum * scales[task] for task in self.tasks)
        total = total + whole.surrogate(number, outputs, scales)
        self.engine.backward(total, scale_wrt_gas=False)
        self.engine.step()
        return outputs
