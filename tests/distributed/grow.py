"""Train a model of two tasks and save it; extend it by a third task and train on; both in
plain torch, with the moments carried over by hand or without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from palm_ds.data.tasks.example import Example, collate
from palm_ds.engine import Engine, start
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.heads import ClassHead, MaskedLMHead
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.multi_task_model import Model
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.runtime.optimizer.param_groups import param_groups
from palm_ds.train.setup.extend import ModelSignature, warm_start
from tests.distributed.tiny import LENGTH, LR, OPTIMIZER, ROWS, WORDS

OLD = {"words": 0, "order": 1}
NEW = {"words": 0, "added": 1, "order": 2}  # the new task is between them, so rows move
SLOTS = {"old": 2, "new": 4}
BEFORE, AFTER = 4, 5


def make_model(which: str) -> Model:
    torch.manual_seed({"old": 0, "new": 1}[which])
    config = EncoderConfig(
        vocab_size=WORDS,
        hidden_size=33,  # no process count divides it
        num_layers=1,
        num_heads=3,
        max_positions=LENGTH,
        task_types=SLOTS[which],
        dropout=0.0,
        attention_dropout=0.0,
    )
    backbone = build_encoder(config)
    heads: dict[str, torch.nn.Module] = {
        "words": MaskedLMHead(backbone),
        "order": ClassHead(33, 3, pooled=True),
    }
    if which == "new":
        heads["added"] = ClassHead(33, 5)
    return Model(backbone, heads, {name: name for name in heads})


def share(step: int, rank: int, world: int, micro: int) -> list[Batch]:
    ids_of = OLD if step < BEFORE else NEW
    size = ROWS // world
    rows = []
    for number in range(rank * size, (rank + 1) * size):
        rng = np.random.default_rng([step, number])
        ids = rng.integers(5, WORDS, int(rng.integers(12, LENGTH)))
        nothing = np.zeros(len(ids), np.int64)
        example = Example(
            input_ids=ids,
            token_type_ids=nothing,
            source_offsets=np.arange(len(ids)),
            annotations={},
        )
        at = rng.choice(len(ids), int(rng.integers(1, 9)), replace=False)
        task = list(ids_of)[number % len(ids_of)]
        example.labels["words"] = at, ids[at].copy()
        if task == "order":
            example.labels["order"] = np.array([0]), ids[1:2] % 3
        if task == "added":
            example.labels["added"] = at, ids[at] % 5
        rows.append([(example, ids_of[task])])
    return [collate(rows[at : at + micro], length=LENGTH, pad=0) for at in range(0, size, micro)]


def signature(model: Model, ids: dict[str, int]) -> ModelSignature:
    """Of a model whose parameters are whole: before ZeRO 3 has them."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    config = model.backbone.config
    return ModelSignature(backbone=config, task_ids=ids, tokenizer="same", shapes=shapes)


def train(engine: Engine, steps: range) -> list[float]:
    losses = []
    for step in steps:
        batches = share(step, engine.rank, engine.world, engine.micro_rows)
        result = engine.step(batches, LR, step)
        sums = engine.reduce(result.loss_sums)
        losses.append(sum(sums[task] / max(result.counts[task], 1) for task in sums))
    return losses


def first_phase(stage: int, folder: Path) -> list[float]:
    model = make_model("old")
    old = signature(model, OLD)
    ds_config = make_ds_config({"zero_optimization": {"stage": stage}})
    engine = Engine(model, ds_config=ds_config, optimizer=OPTIMIZER, rows=ROWS, seed=1)
    losses = train(engine, range(BEFORE))
    state = {
        "step": BEFORE,
        "signature": old.record(),
        "consumed": {"a": 3, "b": 7},
    }
    engine.save(folder / "checkpoints", state, step=BEFORE)
    return losses


def second_phase(stage: int, folder: Path) -> list[Any]:
    ds_config = make_ds_config({"zero_optimization": {"stage": stage}})
    processes = start(ds_config)
    model = make_model("new")
    taken = warm_start(
        folder, model, signature(model, NEW), ["b", "c"], group=processes, warn=print
    )
    engine = Engine(
        model,
        ds_config=ds_config,
        optimizer=OPTIMIZER,
        rows=ROWS,
        seed=1,
        update_counts=taken.update_counts,
    )
    engine.warm_start(taken.found, grown=taken.grown, fresh=taken.new)
    middle = BEFORE + 2
    losses = train(engine, range(BEFORE, middle))
    # A run that extends another is resumed like any other, its parameters of two ages included.
    engine.save(folder / "extended", {"step": 2}, step=2)
    ages = sorted(set(engine_steps(folder / "extended" / "step_00000002")))
    train(engine, range(middle, middle + 1))
    engine.load(folder / "extended")
    losses += train(engine, range(middle, BEFORE + AFTER))
    return [losses, list(taken.new), dict(taken.consumed), ages]


def engine_steps(folder: Path) -> list[int]:
    import json

    return list(json.loads((folder / "manifest.json").read_text())["parameters"].values())


def plain(forget: bool = False) -> list[float]:
    old, new = make_model("old"), make_model("new")
    losses: list[float] = []
    before = run_plain(old, plain_optimizer(old), range(BEFORE), losses)
    optimizer = plain_optimizer(new)
    theirs = dict(old.named_parameters())
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            if name not in theirs:
                continue
            state = before.state[theirs[name]]
            if name == "backbone.task.weight":
                parameter[0], parameter[2] = theirs[name][0], theirs[name][1]
                moments = {k: torch.zeros_like(parameter) for k in ("exp_avg", "exp_avg_sq")}
                for kind, table in moments.items():
                    table[0], table[2] = state[kind][0], state[kind][1]
            else:
                parameter.copy_(theirs[name])
                moments = {k: state[k].clone() for k in ("exp_avg", "exp_avg_sq")}
            if not forget:
                optimizer.state[parameter] = {"step": state["step"].clone(), **moments}
    run_plain(new, optimizer, range(BEFORE, BEFORE + AFTER), losses)
    return losses


def plain_optimizer(model: Model) -> torch.optim.AdamW:
    groups = param_groups(model, OPTIMIZER.weight_decay)
    return torch.optim.AdamW(groups, lr=LR, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)


def run_plain(
    model: Model, optimizer: torch.optim.AdamW, steps: range, losses: list[float]
) -> torch.optim.AdamW:
    for step in steps:
        (batch,) = share(step, 0, 1, ROWS)
        optimizer.zero_grad()
        outputs = model(batch)
        total = torch.stack([o.loss_sum / len(batch.labels[t][0]) for t, o in outputs.items()])
        total.sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip)
        optimizer.step()
        losses.append(total.sum().item())
    return optimizer


def first(folder: str, stages: list[int]) -> dict[int, list[float]]:
    return {stage: first_phase(stage, Path(folder) / str(stage)) for stage in stages}


def second(folder: str, stages: list[int]) -> dict[int, list[Any]]:
    return {stage: second_phase(stage, Path(folder) / str(stage)) for stage in stages}
