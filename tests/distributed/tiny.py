"""A small model with two tasks, rows with uneven labels, and a plain torch loop to compare with.

The modules of this folder import it; it knows nothing of processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from palm_ds.common.rng import derive_key
from palm_ds.data.tasks.example import Example, collate
from palm_ds.engine import Engine
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.heads import ClassHead, MaskedLMHead
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.inputs.visibility import multi_flow
from palm_ds.model.kernels import Kernels
from palm_ds.model.multi_task_model import Model
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.runtime.optimizer.optimizer import OptimizerConfig
from palm_ds.runtime.optimizer.param_groups import param_groups
from palm_ds.runtime.step.gradient_accumulation import StepResult

ROWS, LENGTH, WORDS, SEED = 16, 32, 101, 1
LR = 1e-3
OPTIMIZER = OptimizerConfig(lr=LR, weight_decay=0.01, clip=1.0)
REPORTS = os.environ.get("RANK", "0") == "0"
"""Whether the results of this process are written: the others need no plain loop."""


def make_model(dropout: float = 0.0, kind: type[Model] = Model) -> Model:
    torch.manual_seed(0)
    config = EncoderConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        max_positions=LENGTH,
        dropout=dropout,
        attention_dropout=dropout,
    )
    backbone = build_encoder(config, Kernels(attention="tiles", dropout="counter"))
    heads = {
        "words": MaskedLMHead(backbone),
        "order": ClassHead(32, 3, pooled=True, dropout=dropout),
        "later": ClassHead(32, 2),  # its task has not started: no labels
    }
    return kind(backbone, heads, {name: name for name in heads})


def make_engine(
    stage: int,
    precision: str = "fp32",
    micro: int = 4,
    dropout: float = 0.0,
    kind: type[Model] = Model,
    rows: int = ROWS,
    scale_power: int = 16,
    **more: Any,
) -> Engine:
    """`precision`: fp32, bf16 or fp16 (whose loss scale begins at 2 ** `scale_power`), with
    "-offload" behind it: optimizer state on the host. `more` goes to the engine."""
    precision, _, offload = precision.partition("-")
    values: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    if offload:
        values["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    values["train_micro_batch_size_per_gpu"] = micro
    if precision != "fp32":
        values[precision] = {"enabled": True}
    if precision == "fp16":  # this CPU is slow in it, not wrong
        from deepspeed.accelerator import get_accelerator

        get_accelerator().is_fp16_supported = lambda: True
        values["fp16"]["initial_scale_power"] = scale_power
    model = make_model(dropout, kind)
    ds_config = make_ds_config(values)
    more = {"optimizer": OPTIMIZER} | more
    return Engine(model, ds_config=ds_config, rows=rows, seed=SEED, **more)


def row(step: int, number: int, tasks: Sequence[str] = ("words", "order")) -> Example:
    """One text with 1 to 8 masked words; about half have the other label, but not in early rows
    of a step, so that processes and micro-batches differ. One in four has queries, which the other
    tokens do not see."""
    rng = np.random.default_rng([step, number])
    size = int(rng.integers(12, LENGTH))
    ids = rng.integers(5, WORDS, size)
    nothing, third = np.zeros(size, np.int64), size // 3
    flows = multi_flow(size - 2 * third, third, [np.arange(third)])
    example = Example(
        input_ids=ids,
        token_type_ids=nothing,
        source_offsets=np.arange(size),
        annotations={},
        visibility=flows if number % 4 == 3 else None,
    )
    at = rng.choice(size, int(rng.integers(1, 9)), replace=False)
    if "words" in tasks:
        example.labels["words"] = (at, ids[at].copy())
    if "order" in tasks and (tasks == ("order",) or (number > 5 and rng.random() < 0.6)):
        example.labels["order"] = (np.array([0]), np.array([int(ids[1]) % 3]))
    return example


def share(step: int, rank: int, world: int, micro: int, rows: int = ROWS) -> list[Batch]:
    """The micro-batches of one process: consecutive rows of the step, each batch as long as its
    longest row."""
    size, out = rows // world, []
    for first in range(rank * size, (rank + 1) * size, micro):
        some = [row(step, n) for n in range(first, first + micro)]
        batch = collate([[(each, 0)] for each in some], length=max(map(len, some)), pad=0)
        out.append(replace(batch, first_row=first))
    return out


def train(
    engine: Engine,
    steps: range,
    rows: int = ROWS,
    after: Callable[[StepResult], None] = lambda result: None,
) -> list[float]:
    """The loss of each step, over all processes. `after` is called with the result of each."""
    losses = []
    for step in steps:
        batches = share(step, engine.rank, engine.world, engine.micro_rows, rows)
        result = engine.step(batches, LR, step)
        after(result)
        sums = engine.reduce(result.loss_sums)
        losses.append(sum(sums[task] / max(result.counts[task], 1) for task in sums))
    return losses


def plain_loop(steps: range, means: int = 1, dropout: float = 0.0) -> list[float]:
    """The same in plain torch, one batch per step. `means` > 1: the loss as the average over the
    means of that many micro-batches instead."""
    model = make_model(dropout)
    groups = param_groups(model, OPTIMIZER.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        total = torch.zeros(())
        for batch in share(step, 0, 1, ROWS // means):
            key = derive_key(SEED, "dropout", step) >> 1
            outputs = model(replace(batch, dropout_key=key))
            for task, output in outputs.items():
                count = len(batch.labels[task][0]) if task in batch.labels else 1
                total = total + output.loss_sum / count / means
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip)
        optimizer.step()
        losses.append(total.item())
    return losses
