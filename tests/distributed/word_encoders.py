"""Losses of encoders that are not transformers, under each ZeRO stage and accumulation."""

from __future__ import annotations

import dataclasses

import torch
from tiny import LENGTH, LR, OPTIMIZER, ROWS, SEED, WORDS, arguments, share, train, write

from palm_ds.common.rng import derive_key
from palm_ds.engine import Engine
from palm_ds.model.encoder import build_encoder
from palm_ds.model.heads import ClassHead, MaskedLMHead
from palm_ds.model.kernels import Kernels
from palm_ds.model.multi_task_model import Model
from palm_ds.runtime.ds_config import make_ds_config
from palm_ds.runtime.param_groups import param_groups
from palm_ds.runtime.processes import leave
from tests.helpers.word_encoders import config

STEPS = range(8)


def make_model(kind: str) -> Model:
    torch.manual_seed(0)
    sizes = dict(vocab_size=WORDS, hidden_size=32, max_positions=LENGTH, dropout=0.1)
    numbers = config(kind, embedding_size=24, **sizes)
    backbone = build_encoder(numbers, Kernels(dropout="counter"))
    heads = {"words": MaskedLMHead(backbone), "order": ClassHead(32, 3, pooled=True)}
    return Model(backbone, heads, {name: name for name in heads})


def plain_loop(kind: str) -> list[float]:
    """The same in plain torch, one batch per step."""
    model, losses = make_model(kind), []
    groups = param_groups(model, OPTIMIZER.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    for step in STEPS:
        (batch,) = share(step, 0, 1, ROWS)
        key = derive_key(SEED, "dropout", step) >> 1
        outputs = model(dataclasses.replace(batch, dropout_key=key)).items()
        total = sum(out.loss_sum / max(batch.count(task), 1) for task, out in outputs)
        assert isinstance(total, torch.Tensor)
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip)
        optimizer.step()
        losses.append(total.item())
    return losses


def main() -> None:
    options = arguments(runs="")
    runs = [run.split(":") for run in options.runs.split(",")]
    # before ZeRO 3: it replaces F.linear
    results = {kind: plain_loop(kind) for kind in {kind for kind, _, _ in runs}}
    engine = None
    for kind, stage, micro in runs:
        values = {"zero_optimization": {"stage": int(stage)}}
        values["train_micro_batch_size_per_gpu"] = int(micro)
        engine = Engine(
            make_model(kind),
            ds_config=make_ds_config(values),
            rows=ROWS,
            seed=SEED,
            optimizer=OPTIMIZER,
        )
        results[f"{kind}:{stage}:{micro}"] = train(engine, STEPS)
    assert engine is not None
    write(options.out, engine.rank, results)
    engine.close()
    leave(0)


if __name__ == "__main__":
    main()
