"""Runs with custom optimizers (tests/helpers/own_optimizer.py) and a hand-written loop.

Each run (name, kind, stage, first step, last step) goes from its first step to its last in its own
folder, from the checkpoint that is there, and saves after every second step; `kill` ends the
process by SIGKILL before that step.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

from palm_ds.common.errors import UserError
from palm_ds.engine import Engine
from palm_ds.runtime.optimizer.optimizer import OptimizerConfig
from tests.distributed.tiny import LR, ROWS, make_engine, make_model, share
from tests.helpers.own_optimizer import Lion

CLIP, DECAY = 0.5, 0.1
KINDS: dict[str, dict[str, Any]] = {
    "tests.helpers.own_optimizer.Lion": {"betas": [0.8, 0.95]},
    "torch.optim.SGD": {"momentum": 0.9, "dampening": 0.5, "nesterov": False},
}
REFUSED = {
    "tests.helpers.own_optimizer.OfWhole": 0.0,
    "tests.helpers.own_optimizer.Rows": DECAY,
    "tests.helpers.own_optimizer.NoDecay": DECAY,
    "torch.optim.Adagrad": DECAY,
}
"""With a weight decay."""
RATES = {"tests.helpers.own_optimizer.Lion": 0.3, "torch.optim.SGD": 100.0}
"""Times LR, so that both learn."""
STEPS = 8


def config(kind: str) -> OptimizerConfig:
    return OptimizerConfig(
        kind=kind,
        lr=LR,
        clip=CLIP,
        weight_decay=DECAY,
        layer_decay=0.9,
        ema=0.8,
        options=KINDS[kind],
    )


def by_hand() -> dict[str, list[float]]:
    return {kind: plain_loop(kind) for kind in KINDS}


def plain_loop(kind: str) -> list[float]:
    """Plain torch, one group per parameter."""
    model, groups = make_model(), []
    for name, p in model.named_parameters():
        factor = 0.9**3  # embeddings, 2 layers
        if name.startswith("backbone.layers."):
            factor = {"0": 0.81, "1": 0.9}[name.split(".")[2]]
        elif name.startswith(("backbone.pooler.", "heads.")):
            factor = 1.0
        decay = DECAY if name.startswith("backbone.") and p.ndim == 2 else 0.0
        rate = LR * factor * RATES[kind]
        groups.append({"params": [p], "weight_decay": decay, "lr": rate})
    cls: Any = Lion if kind.endswith("Lion") else torch.optim.SGD
    optimizer = cls(groups, lr=LR, **KINDS[kind])
    losses = []
    for step in range(STEPS):
        (batch,) = share(step, 0, 1, ROWS)
        optimizer.zero_grad()
        total = torch.zeros(())
        for task, output in model(batch).items():
            total = total + output.loss_sum / max(batch.count(task), 1)
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(total.item())
    return losses


def go(engine: Engine, folder: Path, steps: range, rate: float, kill: int) -> list[list[float]]:
    """Loss and norm of each step."""
    state = engine.load(folder)
    assert (state or {"step": 0})["step"] == steps.start, state
    found = []
    for step in steps:
        if step == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        batches = share(step, engine.rank, engine.world, engine.micro_rows)
        result = engine.step(batches, rate, step)
        sums = engine.reduce(result.loss_sums)
        loss = sum(sums[task] / max(result.counts[task], 1) for task in sums)
        found.append([loss, engine.grad_norm])
        if step % 2:
            engine.save(folder, {"step": step + 1}, step=step + 1)
    return found


def refused() -> dict[str, str]:
    """The errors for classes that do not work with ZeRO 2."""
    said = {}
    for kind, decay in REFUSED.items():
        try:
            make_engine(2, optimizer=OptimizerConfig(kind=kind, weight_decay=decay))
        except UserError as error:
            said[kind] = str(error)
    return said


def summed(state: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: tensor.double().sum().item() for name, tensor in state.items()}


def curves(
    folder: str, runs: list[tuple[str, str, int, int, int]], kill: int = -1
) -> dict[str, Any]:
    results = {}
    for name, kind, stage, first, last in runs:
        engine = make_engine(stage, micro=8, optimizer=config(kind))
        found = go(engine, Path(folder) / name, range(first, last), LR * RATES[kind], kill)
        weights = summed(engine.full_state_dict())
        with engine.ema_weights():
            averages = summed(engine.full_state_dict())
        results[name] = {"steps": found, "weights": weights, "averages": averages}
    return results
