"""Losses of encoders of texts and images under ZeRO stages and accumulation.

Each run is kind:stage:micro. Tasks are those of pretraining, or those that are fine-tuned.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
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
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import Kernels
from palm_ds.model.multi_task_model import Model
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.runtime.optimizer.param_groups import param_groups
from palm_ds.tasks.cross_modal_contrast import CrossModalContrast
from palm_ds.tasks.generation import Generation
from palm_ds.tasks.image_text_matching import ImageTextMatching
from palm_ds.tasks.masked_regions import MaskedRegions
from palm_ds.tasks.masked_words import MaskedWords
from palm_ds.tasks.multi_label import MultiLabel
from palm_ds.tasks.multiple_choice import MultipleChoice
from palm_ds.tasks.referring_expressions import ReferringExpressions
from tests.distributed.tiny import LR, OPTIMIZER, REPORTS, SEED
from tests.helpers.small_images import COLUMNS, PICTURE, UNIMO, VIL, asked_rows, image_rows
from tests.helpers.text_tables import dataset_of, make_task, small_tokenizer, source_of

ROWS, LENGTH = 8, 26
KINDS: dict[str, dict[str, Any]] = {"unimo": UNIMO, "ernie_vil": VIL}


def pretraining() -> list[TaskGroupDataset]:
    """A group of masked regions and words, and pairs that may match."""
    with TemporaryDirectory() as folder:
        source = source_of(Path(folder), image_rows(64), columns=COLUMNS)
    regions = make_task(MaskedRegions, "regions", max_tags=0).resolved(source)
    words = make_task(MaskedWords, "words", texts=["text_a"])
    match = make_task(ImageTextMatching, "match", max_tags=0).resolved(source)
    return [
        dataset_of(source, regions, words, max_length=LENGTH),
        dataset_of(source, match, max_length=LENGTH),
    ]


def fine_tuning(kind: str) -> list[TaskGroupDataset]:
    """Answers, choices, regions that texts are about, texts that find their images, captions."""
    beside = {"images": True}
    tasks: list[tuple[Any, dict[str, Any], dict[str, str]]] = [
        (MultiLabel, beside, {"label": "worth"}),
        (MultipleChoice, beside, {"label": "right"}),
        (ReferringExpressions, {}, {"box": "place"}),
        (CrossModalContrast, {}, {"text_a": "text_a"}),
    ]
    if kind == "unimo":
        values = {"max_target": 8, "decoder": "next_token", "end": "mask", **beside}
        tasks.append((Generation, values, {"target": "target"}))
    rows, made = asked_rows(32), []
    with TemporaryDirectory() as folder:
        for number, (task, values, columns) in enumerate(tasks):
            source = source_of(Path(folder), rows, columns={**PICTURE, **columns})
            built = make_task(task, f"task {number}", **values).resolved(source)
            made.append(dataset_of(source, built, max_length=LENGTH))
    return made


class Data:
    """The rows of all steps, of all groups in turn."""

    def __init__(self, kind: str, what: str) -> None:
        self.datasets = fine_tuning(kind) if what == "fine_tuning" else pretraining()
        self.tasks = [task for dataset in self.datasets for task in dataset.tasks]
        turns = zip_longest(*map(_rows, range(len(self.datasets)), self.datasets))
        self.rows = [row for turn in turns for row in turn if row is not None]

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
        total = torch.stack([_mean(model, batch, task, x) for task, x in outputs]).sum()
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip)
        optimizer.step()
        losses.append(total.item())
    return losses


def _mean(model: Model, batch: Batch, task: str, output: Any) -> torch.Tensor:
    """The loss of a task, also of one that compares the texts of a whole step."""
    head: Any = model.labeled[task]
    if head.global_batch and batch.count(task):
        of_step = head.step_losses(output.scores, batch.labels[task][1], batch.groups[task])
        return of_step.losses.mean()
    return output.loss_sum / max(batch.count(task), 1)


def losses(runs: list[str], steps: int, what: str = "pretraining") -> dict[str, list[float]]:
    by_kind = {kind: Data(kind, what) for kind in {run.split(":")[0] for run in runs}}
    # before ZeRO 3: it replaces F.linear
    results = {kind: plain_loop(kind, by_kind[kind], steps) for kind in by_kind if REPORTS}
    for run in runs:
        kind, stage, micro = run.split(":")
        data = by_kind[kind]
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
