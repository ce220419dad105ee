"""Losses over all texts of a step, without keeping their activations (GradCache: Gao et al. 2021,
"Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup").

    each micro-batch ──forward, no graph──> vectors ──gathered from all processes──> loss
    each micro-batch ──forward──> vectors · gradient of the loss ──backward──> gradients

Both passes of a micro-batch have the same dropout masks, so a process that has only one micro-batch
takes the vectors of its second pass and omits the first. Every process computes the loss of the
whole step from the same vectors in the same order, so neither the loss nor its gradient depends on
how the step is split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from palm_ds.runtime.processes.processes import Processes


class LabeledBatch(Protocol):
    """A micro-batch, as far as its labels are read here."""

    @property
    def labels(self) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]: ...

    @property
    def groups(self) -> Mapping[str, torch.Tensor]: ...


class HasScores(Protocol):
    """The output of a head, as far as it is read here."""

    @property
    def scores(self) -> Any: ...


B = TypeVar("B", bound=LabeledBatch)


class GlobalBatchLoss(Protocol):
    """A head, as far as its loss is computed here, which no parameters are part of
    (palm_ds/model/heads/embedding.py)."""

    def step_losses(
        self,
        vectors: torch.Tensor,
        targets: torch.Tensor,
        groups: torch.Tensor,
        progress: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses (examples,) of vectors (n, hidden), and whether each is predicted correctly.
        `progress`: the share of the run's steps that were done before; None: it is no training
        step."""
        ...

    def dummy_target(self, device: torch.device) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True)
class CachedGradients:
    """A task's loss in one step, for this process."""

    loss_sum: torch.Tensor
    """Of its own examples."""
    correct: torch.Tensor
    gradients: Sequence[torch.Tensor]
    """Of each micro-batch, (n, hidden): those of the summed loss of all processes."""

    def surrogate(self, number: int, vectors: torch.Tensor) -> torch.Tensor:
        """A scalar whose gradient with respect to the vectors of a micro-batch is the loss's."""
        return (vectors.float() * self.gradients[number]).sum()


class StepVectors(Generic[B]):
    """The vectors of a task in the micro-batches of a process."""

    def __init__(self, task: str, loss: GlobalBatchLoss):
        self.task, self.loss = task, loss
        self.vectors: list[torch.Tensor] = []
        self.targets: list[torch.Tensor] = []
        self.groups: list[torch.Tensor] = []

    def add(self, batch: B, vectors: torch.Tensor) -> None:
        """The next micro-batch; (0, hidden) vectors if it has no labels of the task."""
        nothing = self.loss.dummy_target(vectors.device)[:0]
        _, targets = batch.labels.get(self.task, (None, nothing))
        groups = batch.groups.get(self.task, nothing.new_zeros(0, dtype=torch.int64))
        self.vectors.append(vectors.detach())
        self.targets.append(targets)
        self.groups.append(groups)

    def finish(self, processes: Processes, progress: float | None) -> CachedGradients:
        """The loss over the vectors of all processes, as of `step_losses`. Collective; waits for
        the device."""
        own = consecutive(self.groups)
        vectors = processes.gather_rows(torch.cat(self.vectors))
        targets = processes.gather_rows(torch.cat(self.targets))
        numbers = processes.gather_rows(own)
        before = [int(part[-1]) + 1 if len(part) else 0 for part in numbers]
        first = sum(before[: processes.rank])
        every = torch.cat(vectors).requires_grad_()
        with torch.enable_grad():
            of_texts = torch.cat(targets), consecutive(numbers)
            losses, correct = self.loss.step_losses(every, *of_texts, progress)
            (gradient,) = torch.autograd.grad(losses.sum(), every)
        mine = gradient.split([len(part) for part in vectors])[processes.rank]
        examples = slice(first, first + before[processes.rank])
        return CachedGradients(
            loss_sum=losses[examples].detach().sum(),
            correct=correct[examples].detach().sum(),
            gradients=mine.split([len(vector) for vector in self.vectors]),
        )


class GradCache(Generic[B]):
    """The losses over a whole step, for one process: `add` its micro-batches, `finish`, and then
    `surrogate` of each. `progress` as in `step_losses`."""

    def __init__(
        self,
        losses: Mapping[str, GlobalBatchLoss],
        processes: Processes,
        progress: float | None = None,
    ):
        self._vectors = [StepVectors[B](task, loss) for task, loss in losses.items()]
        self._processes, self._progress = processes, progress
        self.cached: dict[str, CachedGradients] = {}

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._vectors)

    def add(self, batch: B, outputs: Mapping[str, HasScores]) -> None:
        """The next micro-batch."""
        for each in self._vectors:
            each.add(batch, outputs[each.task].scores)

    def finish(self) -> None:
        """Compute them. Collective; waits for the device."""
        parts = self._processes, self._progress
        self.cached = {each.task: each.finish(*parts) for each in self._vectors}

    def surrogate(
        self, number: int, outputs: Mapping[str, HasScores], scales: Mapping[str, float]
    ) -> torch.Tensor | float:
        """A scalar with the gradients of the scaled losses, for a micro-batch's second pass."""
        terms = (
            found.surrogate(number, outputs[task].scores) * scales[task]
            for task, found in self.cached.items()
        )
        return sum(terms)


def consecutive(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Groups that are numbered from 0 in each part, as one tensor numbered from 0."""
    return torch.cat(list(_renumbered(parts)))


def _renumbered(parts: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    first = 0
    for part in parts:
        yield part + first
        first += int(part[-1]) + 1 if len(part) else 0
