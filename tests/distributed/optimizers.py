"""Losses and weights with LAMB, StableAdamW and Muon under each ZeRO stage and precision, and after
a resume.

A run is (name, kind, stage, precision, first step, last step). One that starts above 0 loads the
checkpoint of its name; the others save after their last step, and half way.
"""

from pathlib import Path
from typing import Any

from palm_ds.engine import Engine
from palm_ds.runtime.optimizer import muon
from palm_ds.runtime.optimizer.optimizer import OptimizerConfig
from tests.distributed.tiny import make_engine, share

RATES = {"adamw": 1e-3, "lamb": 1e-2, "stable_adamw": 3e-3, "muon": 3e-3}


def config(kind: str) -> OptimizerConfig:
    return OptimizerConfig(kind=kind, weight_decay=0.1, clip=0.5, layer_decay=0.9, ema=0.8)


def train(engine: Engine, steps: range, lr: float, folder: Path) -> list[float]:
    losses = []
    for step in steps:
        batches = share(step, engine.rank, engine.world, engine.micro_rows)
        frozen = ["backbone.layers.0.*"] if step == 2 else []
        result = engine.step(batches, lr, step, frozen=frozen)
        sums = engine.reduce(result.loss_sums)
        losses.append(sum(sums[task] / max(result.counts[task], 1) for task in sums))
        if not steps.start and step + 1 in (steps.stop, steps.stop // 2):
            engine.save(folder, {"step": step + 1}, step=step + 1)
    return losses


def summed(state: dict[str, Any]) -> dict[str, float]:
    return {name: tensor.double().sum().item() for name, tensor in state.items()}


def run(kind: str, stage: int, precision: str, steps: range, folder: Path) -> dict[str, Any]:
    freezable = ["backbone.layers.0.*"]
    more: dict[str, Any] = {"optimizer": config(kind), "freezable": freezable}
    engine = make_engine(stage, precision, micro=8, scale_power=8, **more)
    if steps.start:
        state = engine.load(folder, at_most=steps.start)
        assert state == {"step": steps.start}, state
    calls = _count_newton_schulz()
    losses = train(engine, steps, RATES[kind], folder)
    with engine.ema_weights():
        averages = summed(engine.full_state_dict())
    weights = summed(engine.full_state_dict())
    skipped = engine.skipped_steps
    found = {"losses": losses, "weights": weights, "averages": averages, "skipped": skipped}
    return found | {"newton_schulz": len(calls)}


ORTHOGONALIZE = muon.orthogonalize


def _count_newton_schulz() -> list[None]:
    calls: list[None] = []

    def counted(*positional: Any) -> Any:
        calls.append(None)
        return ORTHOGONALIZE(*positional)

    muon.orthogonalize = counted
    return calls


def curves(folder: str, runs: list[tuple[str, str, int, str, int, int]]) -> dict[str, Any]:
    results = {}
    for name, kind, stage, precision, first, last in runs:
        place = Path(folder) / name.split("@")[0]
        results[name] = run(kind, stage, precision, range(first, last), place)
    return results
