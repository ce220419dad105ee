"""Learning rates per parameter, frozen parameters, parameters frozen in some steps, and EMA, all in
one run: for each of several (stage:precision), and in plain torch. Runs called
stage:precision:fgm have adversarial token embeddings instead.

Each run that is `whole` is saved after SAVED steps in its own folder and continues; then each is
resumed by a new engine from the checkpoint of its source.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from palm_ds.engine import Engine
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.multi_task_model import Model
from palm_ds.runtime.optimizer.optimizer import OptimizerConfig
from palm_ds.runtime.optimizer.param_groups import param_groups
from tests.distributed.tiny import LR, REPORTS, ROWS, make_engine, make_model, share

STEPS, SAVED = 6, 4
FROZEN = ("backbone.word.weight", "backbone.layers.0.attention_norm.*")
LR_SCALES = {"heads.*": 2.0, "heads.order.*": 10.0}
REST = {1: ("backbone.layers.1.*",), 3: ("heads.words.*",), 5: ("backbone.layers.1.*", "heads.*")}
"""What rests in which step."""
FREEZABLE = ("backbone.layers.1.*", "heads.words.*", "heads.*")
OPTIMIZER = OptimizerConfig(
    lr=LR, clip=0.5, weight_decay=0.1, layer_decay=0.5, freeze=FROZEN, ema=0.8
)
ATTACK = OptimizerConfig(lr=LR, clip=0.5, weight_decay=0.1, fgm=0.7)


class Other(Model):
    """Starts with other weights, so that anything not restored becomes visible."""

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter)


def build(run: str, kind: type[Model] = Model) -> Engine:
    stage, precision, *fgm = run.split(":")
    # With that loss scale fp16 skips no step.
    settings: dict[str, Any] = dict(
        scale_power=8, optimizer=OPTIMIZER, lr_scales=LR_SCALES, freezable=FREEZABLE
    )
    if fgm:
        settings = dict(scale_power=8, optimizer=ATTACK, freezable=FREEZABLE)
    return make_engine(int(stage), precision, 8, kind=kind, **settings)


def train(engine: Engine, steps: range) -> list[float]:
    losses = []
    for step in steps:
        batches = share(step, engine.rank, engine.world, engine.micro_rows)
        result = engine.step(batches, LR * (step + 1), step, frozen=REST.get(step, ()))
        sums = engine.reduce(result.loss_sums)
        losses.append(sum(sums[task] / max(result.counts[task], 1) for task in sums))
    return losses


def flat(state: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    return {name: tensor.double().flatten().tolist() for name, tensor in state.items()}


def held_out(engine: Engine) -> float:
    loss = 0.0
    for batch in share(99, engine.rank, engine.world, engine.micro_rows):
        outputs = engine.evaluate(batch)
        loss += engine.reduce({"x": sum(output.loss_sum for output in outputs.values())})["x"]
    return loss


def seen(engine: Engine) -> dict[str, Any]:
    """Weights, averages, the loss with each; the original weights are back after the averages."""
    model: dict[str, Any] = dict(engine._engine.module.named_parameters())
    kept = {n: getattr(p, "ds_tensor", p).detach().clone() for n, p in model.items()}
    weights, loss = engine.full_state_dict(), held_out(engine)
    with engine.ema_weights():
        averages, averaged = engine.full_state_dict(), held_out(engine)
    again = engine.full_state_dict()
    back = all(torch.equal(weights[name], again[name]) for name in weights)
    back &= all(torch.equal(kept[n], getattr(p, "ds_tensor", p)) for n, p in model.items())
    return {
        "weights": flat(weights),
        "averages": flat(averages),
        "held out": [loss, averaged, held_out(engine)],
        "back": back,
    }


def by_hand() -> dict[str, Any]:
    """One group per parameter, explicit scales, no gradient for frozen parameters."""
    model = make_model()
    frozen = {"backbone.word.weight"}
    frozen |= {f"backbone.layers.0.attention_norm.{part}" for part in ("weight", "bias")}
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    moving = {name: p for name, p in model.named_parameters() if name not in frozen}
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    groups = []
    for name, p in moving.items():
        factor = 0.5**3  # embeddings, 2 layers
        if name.startswith("backbone.layers."):
            factor = {"0": 0.25, "1": 0.5}[name.split(".")[2]]
        elif name.startswith("backbone.pooler."):
            factor = 1.0
        elif name.startswith("heads."):
            factor = 10.0 if name.startswith("heads.order.") else 2.0
        decay = 0.1 if name.startswith("backbone.") and p.ndim == 2 else 0.0
        groups.append({"params": [p], "weight_decay": decay, "lr_scale": factor})
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    losses = []
    for step in range(STEPS):
        (batch,) = share(step, 0, 1, ROWS)
        model.zero_grad()
        losses.append(backward(model, batch))
        starts = tuple(pattern.removesuffix("*") for pattern in REST.get(step, ()))
        for name, p in model.named_parameters():
            if name in frozen or (starts and name.startswith(starts)):
                p.grad = None
        torch.nn.utils.clip_grad_norm_(moving.values(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = LR * (step + 1) * group["lr_scale"]
        optimizer.step()
        for name, p in moving.items():
            average[name] = 0.8 * average[name] + 0.2 * p.detach()
    weights = flat({name: p.detach() for name, p in model.named_parameters()})
    first = flat({name: tensor for name, tensor in first.items() if name in frozen})
    return {"losses": losses, "weights": weights, "averages": flat(average), "first": first}


def backward(model: Model, batch: Batch) -> float:
    total = torch.zeros(())
    for task, output in model(batch).items():
        count = len(batch.labels[task][0]) if task in batch.labels else 1
        total = total + output.loss_sum / count
    total.backward()
    return total.item()


def attacked_by_hand() -> dict[str, Any]:
    model = make_model()
    groups = param_groups(model, 0.1)
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=ATTACK.betas, eps=ATTACK.eps)
    seen: list[torch.Tensor] = []
    change = torch.zeros(())

    def hook(_module: Any, _inputs: Any, vectors: torch.Tensor) -> torch.Tensor:
        vectors.retain_grad()
        seen.append(vectors)
        return vectors + change

    model.backbone.word.register_forward_hook(hook)
    losses = []
    for step in range(STEPS):
        (batch,) = share(step, 0, 1, ROWS)
        model.zero_grad()
        change = torch.zeros(())
        losses.append(backward(model, batch))
        gradient = seen[-1].grad
        assert gradient is not None
        change = torch.zeros_like(gradient)
        for text in range(len(gradient)):  # one in each row, and padding, which has no gradient
            if gradient[text].norm() > 0:
                change[text] = ATTACK.fgm * gradient[text] / gradient[text].norm()
        backward(model, batch)
        starts = tuple(pattern.removesuffix("*") for pattern in REST.get(step, ()))
        for name, p in model.named_parameters():
            if starts and name.startswith(starts):
                p.grad = None
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = LR * (step + 1)
        optimizer.step()
    weights = flat({name: p.detach() for name, p in model.named_parameters()})
    return {"losses": losses, "weights": weights, "averages": weights, "first": {}}


def curves(folder: str, sources: dict[str, str], whole: bool = False) -> dict[str, Any]:
    """`sources`: {run: the run whose checkpoint it resumes}."""
    # before ZeRO 3: it replaces F.linear
    results: dict[str, Any] = {}
    if REPORTS:
        results |= {"by hand": by_hand(), "attacked by hand": attacked_by_hand()}
    for run, source in sources.items():
        if whole:
            engine = build(run)
            losses = train(engine, range(SAVED))
            engine.save(Path(folder) / run, {"step": SAVED}, step=SAVED)
            losses += train(engine, range(SAVED, STEPS))
            results[run] = seen(engine) | {"losses": losses}
        engine = build(run, Other)
        loaded = engine.load(Path(folder) / source)
        assert loaded == {"step": SAVED}
        losses = train(engine, range(SAVED, STEPS))
        results[f"{run} after {source}"] = seen(engine) | {"losses": losses}
    return results
