"""Losses of each kind of encoder but BERT, under ZeRO stages and accumulation.

Each run is kind:stage:micro; kind:stage:micro:resumed saves half-way and resumes in another engine.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from palm_ds.common.rng import derive_key
from palm_ds.engine import Engine
from palm_ds.model.encoder.encoder import build_encoder, encoder_class
from palm_ds.model.heads.heads import ClassHead, MaskedLMHead
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import Kernels
from palm_ds.model.multi_task_model import Model
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.runtime.optimizer.param_groups import param_groups
from tests.distributed.tiny import LENGTH, LR, OPTIMIZER, REPORTS, ROWS, SEED, WORDS, share
from tests.helpers.small_encoders import TRANSFORMERS, small_transformer
from tests.helpers.word_encoders import config


def make_model(kind: str) -> Model:
    torch.manual_seed(0)
    sizes = dict(vocab_size=WORDS, hidden_size=32, max_positions=LENGTH + 2, dropout=0.1)
    if kind in TRANSFORMERS:
        numbers = small_transformer(kind, **sizes, attention_dropout=0.1, init_range=0.02)
    else:
        numbers = config(kind, embedding_size=24, **sizes)
    attention = "plain" if encoder_class(numbers).adds_to_scores(numbers) else "tiles"
    backbone = build_encoder(numbers, Kernels(attention=attention, dropout="counter"))
    heads = {"words": MaskedLMHead(backbone), "order": ClassHead(32, 3, pooled=True)}
    return Model(backbone, heads, {name: name for name in heads})


def whole_texts(step: int, rank: int, world: int, micro: int) -> list[Batch]:
    """The rows of tiny.py, whose tokens all see one another here."""
    return [replace(batch, visibility=None) for batch in share(step, rank, world, micro)]


def train(engine: Engine, steps: range) -> list[float]:
    """The loss of each step, over all processes."""
    losses = []
    for step in steps:
        batches = whole_texts(step, engine.rank, engine.world, engine.micro_rows)
        result = engine.step(batches, LR, step)
        sums = engine.reduce(result.loss_sums)
        losses.append(sum(sums[task] / max(result.counts[task], 1) for task in sums))
    return losses


def plain_loop(kind: str, steps: range) -> list[float]:
    """The same in plain torch, one batch per step."""
    model, losses = make_model(kind), []
    groups = param_groups(model, OPTIMIZER.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    for step in steps:
        (batch,) = whole_texts(step, 0, 1, ROWS)
        key = derive_key(SEED, "dropout", step) >> 1
        outputs = model(replace(batch, dropout_key=key)).items()
        total = sum(out.loss_sum / max(batch.count(task), 1) for task, out in outputs)
        assert isinstance(total, torch.Tensor)
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip)
        optimizer.step()
        losses.append(total.item())
    return losses


def make_engine(kind: str, stage: str, micro: str) -> Engine:
    values = {"zero_optimization": {"stage": int(stage)}}
    values["train_micro_batch_size_per_gpu"] = int(micro)
    ds_config = make_ds_config(values)
    model = make_model(kind)
    return Engine(model, ds_config=ds_config, rows=ROWS, seed=SEED, optimizer=OPTIMIZER)


def losses(runs: list[str], folder: str, steps: int) -> dict[str, list[float]]:
    numbers, half = range(steps), steps // 2
    kinds = {run.split(":")[0] for run in runs} if REPORTS else ()
    # before ZeRO 3: it replaces F.linear
    results = {kind: plain_loop(kind, numbers) for kind in kinds}
    for run in runs:
        kind, stage, micro, *resumed = run.split(":")
        engine = make_engine(kind, stage, micro)
        if not resumed:
            results[run] = train(engine, numbers)
            continue
        place = Path(folder) / run
        first = train(engine, numbers[:half])
        engine.save(place, {"step": half}, step=half)
        engine = make_engine(kind, stage, micro)
        loaded = engine.load(place)
        assert loaded == {"step": half}
        results[run] = first + train(engine, numbers[half:])
    return results
