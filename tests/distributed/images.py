"""Losses of encoders of texts and images under ZeRO stages and accumulation.

Each run is kind:stage:micro.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from palm_ds.common.rng import derive_key
from palm_ds.data.stream.task_group_dataset import (
    TaskGroupDataset,
    build_examples,
    collate_built,
    held_out_rows,
)
from palm_ds.engine import Engine
from palm_ds.model.encoder.encoder import EncoderConfig, build_encoder
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import Kernels
from palm_ds.model.multi_task_model import Model
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.runtime.optimizer.param_groups import param_groups
from palm_ds.tasks.image_text_matching import ImageTextMatching
from palm_ds.tasks.masked_regions import MaskedRegions
from palm_ds.tasks.masked_words import MaskedWords
from tests.distributed.tiny import LR, OPTIMIZER, REPORTS, SEED
from tests.helpers.small_images import COLUMNS, UNIMO, VIL, image_rows
from tests.helpers.text_tables import dataset_of, make_task, small_tokenizer, source_of

ROWS, LENGTH = 8, 26
KINDS: dict[str, dict[str, Any]] = {"unimo": UNIMO, "ernie_vil": VIL}


class Data:
    """The rows of all steps: a group of masked regions and words, then pairs that may match."""

    def __init__(self) -> None:
        with TemporaryDirectory() as folder:
            source = source_of(Path(folder), image_rows(64), columns=COLUMNS)
        regions = make_task(MaskedRegions, "regions", max_tags=0).resolved(source)
        words = make_task(MaskedWords, "words", texts=["text_a"])
        match = make_task(ImageTextMatching, "match", max_tags=0).resolved(source)
        self.tasks = [regions, words, match]
        self.datasets = [
            dataset_of(source, regions, words, max_length=LENGTH),
            dataset_of(source, match, max_length=LENGTH),
        ]
        self.rows = [
            row for pair in zip(*map(_rows, (0, 1), self.datasets), strict=True) for row in pair
        ]

    def batches(self, step: int, rank: int, world: int, micro: int) -> list[Batch]:
        """A process's share of a step."""
        share = ROWS // world
        first = rank * share
        rows = build_examples(self.datasets, self.rows[step * ROWS + first :][:share])
        made = (
            (at, collate_built(self.datasets, rows[at : at + micro], LENGTH, 0))
            for at in range(0, share, micro)
        )
        return [replace(batch, first_row=first + at) for at, batch in made]


def _rows(number: int, dataset: TaskGroupDataset) -> list[Any]:
    return held_out_rows(dataset, number, dataset.num_items)


def make_model(kind: str, data: Data) -> Model:
    torch.manual_seed(0)
    sizes = {"vocab_size": small_tokenizer().size, "num_layers": 2, "num_heads": 2}
    config = EncoderConfig.from_dict({**sizes, **KINDS[kind], "task_types": 0})
    backbone = build_encoder(config, Kernels(attention="tiles", dropout="counter"))
    heads = {task.name: task.head(backbone) for task in data.tasks}
    return Model(backbone, heads, {name: name for name in heads})


def plain_loop(kind: str, data: Data, steps: int) -> list[float]:
    """In plain torch, one batch per step."""
    model, losses = make_model(kind, data), []
    groups = param_groups(model, OPTIMIZER.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    for step in range(steps):
        (batch,) = data.batches(step, 0, 1, ROWS)
        outputs = model(batch.with_dropout_key(derive_key(SEED, "dropout", step) >> 1)).items()
        total = torch.stack([x.loss_sum / max(batch.count(task), 1) for task, x in outputs]).sum()
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip)
        optimizer.step()
        losses.append(total.item())
    return losses


def losses(runs: list[str], steps: int) -> dict[str, list[float]]:
    data = Data()
    # before ZeRO 3: it replaces F.linear
    kinds = {run.split(":")[0] for run in runs} if REPORTS else ()
    results = {kind: plain_loop(kind, data, steps) for kind in kinds}
    for run in runs:
        kind, stage, micro = run.split(":")
        values = {
            "zero_optimization": {"stage": int(stage)},
            "train_micro_batch_size_per_gpu": int(micro),
        }
        model = make_model(kind, data)
        engine = Engine(
            model, ds_config=make_ds_config(values), rows=ROWS, seed=SEED, optimizer=OPTIMIZER
        )
        results[run] = []
        for step in range(steps):
            batches = data.batches(step, engine.rank, engine.world, engine.micro_rows)
            result = engine.step(batches, LR, step)
            sums = engine.reduce(result.loss_sums)
            mean = sum(sums[task] / max(result.counts[task], 1) for task in sums)
            results[run].append(mean)
    return results
