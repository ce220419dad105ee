"""A step of one micro-batch needs no first pass; its gradients are those of the whole step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from palm_ds.runtime.processes.processes import Processes
from palm_ds.runtime.step.gradient_accumulation import MicroSteps

ONE_PROCESS = cast(
    Processes,
    SimpleNamespace(rank=0, world=1, device=torch.device("cpu"), gather_rows=lambda rows: [rows]),
)


@dataclass(frozen=True)
class Texts:
    """Texts of one task; `key` is the dropout's."""

    inputs: torch.Tensor
    key: int = 0

    @property
    def labels(self) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
        return {"found": (torch.arange(len(self.inputs)), torch.zeros(len(self.inputs)))}

    @property
    def groups(self) -> Mapping[str, torch.Tensor]:
        return {"found": torch.arange(len(self.inputs)) // 2}

    def to(self, device: torch.device) -> Texts:
        return self

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Texts:
        return self

    def with_dropout_key(self, key: int) -> Texts:
        return replace(self, key=key)


class Neighbors:
    """Each pair against all texts of the step."""

    def step_losses(
        self,
        vectors: torch.Tensor,
        targets: torch.Tensor,
        groups: torch.Tensor,
        progress: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = vectors[::2] @ vectors[1::2].T
        return nn.functional.cross_entropy(
            scores, torch.arange(len(scores)), reduction="none"
        ), torch.ones(len(scores))

    def dummy_target(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(1, device=device)


@dataclass
class Engine:
    """DeepSpeed's part: torch's dropout, and gradients that add up."""

    weight: torch.Tensor = field(
        default_factory=lambda: torch.linspace(-1, 1, 24).view(6, 4).requires_grad_()
    )
    passes: list[bool] = field(default_factory=list)
    """Whether each had a graph."""

    def __call__(self, batch: Texts) -> Any:
        self.passes.append(torch.is_grad_enabled())
        vectors = nn.functional.dropout(batch.inputs @ self.weight, 0.5)
        nothing = torch.zeros(())
        output = SimpleNamespace(scores=vectors, loss_sum=0.0 * vectors.sum(), correct=nothing)
        return {"found": output}

    def train(self) -> None: ...

    def step(self) -> None: ...

    def backward(self, loss: torch.Tensor, scale_wrt_gas: bool) -> None:
        loss.backward()


@pytest.mark.parametrize(("split", "passes"), [([8], [True]), ([4, 4], [False, False, True, True])])
def test_one_micro_batch_needs_one_pass(split: list[int], passes: list[bool]) -> None:
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
    engine = Engine()
    steps: MicroSteps[Texts] = MicroSteps(
        engine=engine,
        tasks=("found",),
        processes=ONE_PROCESS,
        seed=1,
        global_batch={"found": Neighbors()},
    )
    sums = steps.run([Texts(part) for part in inputs.split(split)], 5, {"found": 4}, {})
    assert engine.passes == passes

    found, engine.weight.grad = engine.weight.grad, None
    vectors = []
    for number, part in enumerate(inputs.split(split)):  # all texts in one graph, the same masks
        steps._repeat_draws(5, number)
        vectors.append(engine(Texts(part))["found"].scores)
    losses, _ = Neighbors().step_losses(torch.cat(vectors), torch.zeros(8), torch.arange(8) // 2)
    losses.mean().backward()
    torch.testing.assert_close(found, engine.weight.grad, rtol=1e-5, atol=1e-6)
    assert sums.loss["found"].item() == pytest.approx(losses.sum().item(), rel=1e-6)
