"""Losses and weights of tasks that compare dense and sparse vectors of a whole step, of a class and
RetroMAE, for every run (`stage:precision:micro`, with `:plain` for torch's own dropout), and a
plain torch loop that has all texts of a step in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from palm_ds.common.rng import derive_key
from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.tasks.example import Example, collate, join
from palm_ds.engine import Engine
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.embedding import ContrastiveHead, SimilarityHead, VectorSettings
from palm_ds.model.heads.heads import ClassHead
from palm_ds.model.heads.splade import FlopsRegularizer, SpladeHead
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import Kernels
from palm_ds.model.multi_task_model import Model
from palm_ds.pretrain.retromae import Retromae, RetromaeHead
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.runtime.optimizer.param_groups import param_groups
from tests.distributed.tiny import LENGTH, LR, OPTIMIZER, REPORTS, SEED, WORDS

ROWS, STEPS = 16, 4
RETROMAE = Retromae(name="retromae", source="text")


def make_model(dropout: str) -> Model:
    torch.manual_seed(0)
    config = EncoderConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        max_positions=LENGTH,
        dropout=0.1,
        attention_dropout=0.1 if dropout == "counter" else 0.0,
    )
    backbone = build_encoder(config, Kernels(attention="tiles", dropout=dropout))
    heads = {
        "order": ClassHead(32, 3),
        "found": ContrastiveHead(
            VectorSettings(matryoshka={8: 0.5}),
            margin=0.1,
            distillation="kl",
            distillation_share=0.3,
        ),
        "sparse": SpladeHead(
            backbone,
            ContrastiveHead(VectorSettings(similarity="dot"), temperature=1.0),
            FlopsRegularizer(queries=0.3, documents=0.2, warmup=0.5),
        ),
        "alike": SimilarityHead(VectorSettings(pooling="cls")),
        "retromae": RetromaeHead(backbone),
    }
    return Model(backbone, heads, {name: name for name in heads})


def text(rng: np.random.Generator) -> Example:
    size = int(rng.integers(3, 8))
    ids, nothing = rng.integers(5, WORDS, size), np.zeros(size, np.int64)
    return Example(
        input_ids=ids, token_type_ids=nothing, source_offsets=np.arange(size), annotations={}
    )


def row(step: int, number: int) -> list[Example]:
    """A row has a query with its positive and up to one negative, or two texts of some similarity,
    or one text of a class and for RetroMAE; step 2 has no queries."""
    rng = np.random.default_rng([step, number])
    if number % 3 == 2:
        example = text(rng)
        if step:  # no such labels in the first step
            RETROMAE.label(example, cast("CorpusSource", None), rng)
        example.labels["order"] = np.array([0]), np.array([int(example.input_ids[0]) % 3])
        return [example]
    asks = number % 3 == 0 and step != 2
    example = join([text(rng) for _ in range(2 + asks * int(rng.integers(0, 2)))])
    first = np.cumsum([0, *example.sub_lengths[:-1]])
    if asks:
        roles = np.minimum(np.arange(len(first)), 2)
        names = rng.integers(0, 12, len(first))  # some texts occur twice
        bits = rng.normal(size=len(first)).astype(np.float32).view(np.int32)
        for task in ("found", "sparse"):
            example.labels[task] = first, np.stack([roles, names, bits.astype(np.int64)], 1)
            example.grouped_labels.add(task)
    else:
        example.labels["alike"] = first, np.repeat(rng.random(), 2)
        example.grouped_labels.add("alike")
    return [example]


def share(step: int, rank: int, world: int, micro: int) -> list[Batch]:
    size, out = ROWS // world, []
    for first in range(rank * size, (rank + 1) * size, micro):
        some = [[(each, 0) for each in row(step, n)] for n in range(first, first + micro)]
        out.append(replace(collate(some, length=LENGTH, pad=0), first_row=first))
    return out


def run(stage: int, precision: str, micro: int, dropout: str) -> dict[str, Any]:
    values: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    values["train_micro_batch_size_per_gpu"] = micro
    if precision == "bf16":
        values["bf16"] = {"enabled": True}
    engine = Engine(
        make_model(dropout),
        ds_config=make_ds_config(values),
        optimizer=OPTIMIZER,
        rows=ROWS,
        seed=SEED,
    )
    losses = []
    for step in range(STEPS):
        batches = share(step, engine.rank, engine.world, engine.micro_rows)
        weights = {"alike": 0.5}
        result = engine.step(batches, LR, step, weights=weights, progress=step / STEPS)
        sums = engine.reduce(result.loss_sums)
        losses.append({task: sums[task] / max(result.counts[task], 1) for task in sums})
    state = engine.full_state_dict()
    engine.release()
    return {"losses": losses, "weights": summary(state)}


def summary(state: dict[str, torch.Tensor]) -> dict[str, Sequence[float]]:
    shown = ("layers.1", "word", "retromae", "sparse")
    names = [name for name in state if any(part in name for part in shown)]
    return {name: state[name].flatten()[::7].tolist() for name in names}


def plain_loop(dropout: str) -> dict[str, Any]:
    """Torch's own dropout draws what the only micro-batch of a step would."""
    model = make_model(dropout)
    groups = param_groups(model, OPTIMIZER.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        (batch,) = share(step, 0, 1, ROWS)
        torch.manual_seed(derive_key(SEED, "dropout", step, 0, 0))
        outputs = model(replace(batch, dropout_key=derive_key(SEED, "dropout", step) >> 1))
        total, each = torch.zeros(()), {}
        for task, output in outputs.items():
            mean = output.loss_sum / max(batch.count(task), 1)
            if task in batch.groups:
                head: Any = model.heads[task]
                targets = batch.labels[task][1], batch.groups[task], step / STEPS
                mean = head.step_losses(output.scores, *targets).losses.mean()
            each[task] = mean.item()
            total = total + mean * (0.5 if task == "alike" else 1)
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip)
        optimizer.step()
        losses.append(each)
    return {"losses": losses, "weights": summary(model.state_dict())}


def losses(runs: list[str], reference: bool = False) -> dict[str, Any]:
    # Before ZeRO 3, which replaces F.linear everywhere.
    ways = ("counter", "plain") if REPORTS and reference else ()
    results: dict[str, Any] = {name: plain_loop(name) for name in ways}
    for name in runs:
        stage, precision, micro, *dropout = name.split(":")
        results[name] = run(int(stage), precision, int(micro), (dropout or ["counter"])[0])
    return {**results, "world": torch.distributed.get_world_size()}
