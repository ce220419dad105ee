"""A trained model with everything it needs to predict: many heads in few encoder passes.

    predictor = TrainedModel.open("runs/mine").predictor(["sentiment"])
    for each in predictor.passes:
        source = predictor.source(open_table("new.tsv", each.read))
        for chunk in predictor.predict(each, source):
            chunk.predictions["sentiment"][0]      # {"label": "good", "logits": ..., "probs": ...}

    rows ──chunks──> tokens ──> batches without padding ──encoder──> every head ──> predictions
    a spare core prepares batches ┘        one pass for all tasks that build the same input

Which rows share a batch depends on the rows alone, not on the number of processes or the tasks that
are asked for. No label is read.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from palm_ds.common.errors import UserError
from palm_ds.common.rng import keyed_generator
from palm_ds.data.reader import Table, TableSettings
from palm_ds.data.sources.table import TableSource
from palm_ds.data.stream.decode import Decoded, decoded, gathered
from palm_ds.data.stream.packing import even_parts, padded_length, rows_to_predict
from palm_ds.data.stream.task_group_dataset import (
    BuiltExample,
    BuiltRow,
    ExampleRef,
    TaskGroupDataset,
    collate_built,
    refs,
)
from palm_ds.data.stream.windows import LONGEST, DocumentDataset, DocumentWindows
from palm_ds.data.tasks.task import TableTask, Task
from palm_ds.data.tasks.text_generation import GenerationLimits, TextGenerator, generate_texts
from palm_ds.inference.model_tasks import input_task_of
from palm_ds.model.encoder.encoder import memory_shape
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.multi_task_model import Model
from palm_ds.text.tokenizer import Tokenizer
from palm_ds.train.evaluate.documents import held_out_documents
from palm_ds.train.recipe.recipe import Recipe

T = TypeVar("T")

CHUNK = 1024  # rows tokenized and packed together
_GENERATION_FACTOR = 4  # times as many tokens of sources in a batch as of other texts
_MIN_THREAD_ROWS = 8  # rows for which it is worth starting a thread


@dataclass(frozen=True, kw_only=True)
class EncoderPass:
    """Tasks that share one pass of the encoder: `input_task` builds the input of all of them."""

    input_task: TableTask
    tasks: tuple[TableTask, ...]
    task_id: int
    read: TableSettings


@dataclass(frozen=True, kw_only=True)
class PredictedChunk:
    """Rows of a table and their predictions."""

    rows: np.ndarray  # (n,) row numbers in the table
    predictions: Mapping[str, Sequence[dict[str, Any]]]
    """{task: one prediction per row}; empty if the task predicts nothing for a row."""
    cut: int
    """Rows whose texts were truncated."""


@dataclass(frozen=True, kw_only=True)
class _Work:
    """A batch and its examples."""

    source: TableSource
    built: Sequence[BuiltRow]
    batch: Batch | None
    cut: int
    last: bool
    """Whether it is the last of its chunk."""


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """A model on a device, the recipe that trained it, and the tasks to predict."""

    model: Model
    recipe: Recipe
    tokenizer: Tokenizer
    tasks: Mapping[str, TableTask]
    device: torch.device
    batch_tokens: int
    folder: Path
    """The folder or file of the weights."""

    @cached_property
    def passes(self) -> tuple[EncoderPass, ...]:
        """The fewest encoder passes that cover all tasks."""
        alike: dict[str, list[tuple[TableTask, TableTask]]] = {}
        for name, task in self.tasks.items():
            input_task = input_task_of(self.recipe, name).for_prediction()
            alike.setdefault(self._alike(input_task, task), []).append((input_task, task))
        return tuple(
            EncoderPass(
                input_task=members[0][0],
                tasks=tuple(task for _, task in members),
                task_id=self.recipe.task_ids[members[0][0].name],
                read=self.recipe.sources[members[0][0].source].read,
            )
            for members in alike.values()
        )

    def _alike(self, input_task: Task, task: Task) -> str:
        """A key that is equal for tasks that can share an encoder pass."""
        alone = task.name if task.edits_text else ""
        task_id = self.recipe.task_ids[input_task.name]
        return repr((input_task.input_key(), task_id, self.read_of(input_task), alone))

    def read_of(self, task: Task) -> TableSettings:
        """Settings with which training read the task's tables."""
        return self.recipe.sources[task.source].read

    def source(self, table: Table) -> TableSource:
        """All rows of a table."""
        return TableSource(table, np.arange(len(table)), self.tokenizer, ", ".join(table.names))

    def predict(
        self,
        each: EncoderPass,
        source: TableSource,
        *,
        some: Sequence[np.ndarray] | None = None,
        whole: bool = False,
    ) -> Iterator[PredictedChunk]:
        """Predictions of the tasks of a pass, for all chunks of the rows, or `some` of `chunks`,
        in that order. `whole`: with what only metrics read."""
        mine = [
            replace(source, numbers=rows) for rows in (chunks(source) if some is None else some)
        ]
        if any(task.predicts == "texts" for task in each.tasks):
            yield from (self._written(each, part) for part in mine)
            return
        tasks = {task.name: task for task in each.tasks}
        pieces: list[Decoded] = []
        documents = self.recipe.documents_read
        batches = self._windows(each, mine) if documents else self._batches(each, mine)
        several = sum(map(len, mine)) >= _MIN_THREAD_ROWS and _core_to_spare(self.device)
        several &= not documents  # a window remembers those before it
        for work in ahead(batches) if several else batches:
            if work.batch is not None:
                scores = self._scores(work.batch, tasks)
                pieces += decoded(work.built, scores, tasks, [work.source])
            if work.last:
                yield _chunk(work, pieces, tasks, whole)
                pieces = []

    def generating(self, settings: Mapping[str, Any]) -> Predictor:
        """The same with other settings for generation (`generate` of a generation task). Raises
        UserError if no task generates texts."""
        if not settings:
            return self
        tasks: dict[str, Any] = {
            name: task.with_decoding(settings)
            for name, task in self.tasks.items()
            if isinstance(task, TextGenerator)
        }
        if not tasks:
            raise UserError(f"generate: none of the tasks ({', '.join(self.tasks)}) writes texts")
        return replace(self, tasks={**self.tasks, **tasks})

    def limits(self, each: EncoderPass) -> GenerationLimits:
        """The limits for reading the sources of texts."""
        return GenerationLimits(
            length=self.recipe.length,
            segments=self.recipe.backbone_config.token_types,
            task_id=each.task_id,
        )

    def _written(self, each: EncoderPass, source: TableSource) -> PredictedChunk:
        """Texts for the rows of a source."""
        limits, texts, cut = self.limits(each), {}, 0
        for task in each.tasks:
            assert isinstance(task, TextGenerator), "other tasks build other examples"
            cut = task.cut_sources(source, limits)
            texts[task.name] = generate_texts(
                self.model,
                task,
                range(len(source)),
                source,
                limits,
                settings=task.decoding,
                batch_tokens=_GENERATION_FACTOR * self.batch_tokens,
            )
        return PredictedChunk(rows=source.numbers, predictions=texts, cut=cut)

    def examples(self, each: EncoderPass, source: TableSource) -> list[BuiltExample]:
        """The examples of all rows of a source, in order, for batches of the caller's making."""
        dataset = self._dataset(each, source, self.recipe.length)
        numbers = np.arange(len(each.input_task.items(source, dataset.max_length)))
        every = refs(0, numbers, dataset.layouts(numbers))
        return [_example(dataset, each.tasks, ref) for ref in every]

    def _scores(self, batch: Batch, tasks: Collection[str]) -> dict[str, torch.Tensor]:
        with torch.inference_mode():
            return self.model.scores(batch.to(self.device), tasks)

    def _batches(self, each: EncoderPass, sources: Sequence[TableSource]) -> Iterator[_Work]:
        for source in sources:
            dataset = self._dataset(each, source, self.recipe.length)
            if not (many := len(each.input_task.items(source, dataset.max_length))):
                yield _nothing(source)
                continue
            numbers = np.arange(many)
            layouts = dataset.layouts(numbers)
            every = refs(0, numbers, layouts)
            cut = each.input_task.cut_rows(source, dataset.max_length)
            lengths, attention = layouts["length"], self.model.backbone.kernels.attention
            order = np.argsort(-lengths, kind="stable")
            parts = even_parts(lengths[order], self.batch_tokens)
            for number, part in enumerate(parts):
                built = [
                    [_example(dataset, each.tasks, every[n]) for n in order[part][row]]
                    for row in rows_to_predict(lengths[order[part]], attention)
                ]
                yield _Work(
                    source=source,
                    built=built,
                    batch=self._collated(dataset, built),
                    cut=cut,
                    last=number + 1 == len(parts),
                )

    def _windows(self, each: EncoderPass, sources: Sequence[TableSource]) -> Iterator[_Work]:
        """The windows of documents. Each has to go through the model before the next."""
        length, documents = self.recipe.length, self.recipe.documents_read
        assert documents, "its encoder has memories"
        shape = memory_shape(self.recipe.backbone_config)
        windows = DocumentWindows.of(documents, length, shape[1])
        tasks = {task.name: task for task in (each.input_task, *each.tasks)}
        slots = max(self.batch_tokens // length, 1)
        for source in sources:
            whole = replace(self._dataset(each, source, LONGEST), tasks=tuple(tasks.values()))
            dataset = DocumentDataset.of(whole, windows)
            read = held_out_documents([dataset], 0, length, self._pad, shape)
            for built, batch in read.batches(0, 1, min(slots, max(len(source), 1))):
                yield _Work(source=source, built=built, batch=batch, cut=0, last=False)
            yield _nothing(source)

    def _dataset(self, each: EncoderPass, source: TableSource, length: int) -> TaskGroupDataset:
        return TaskGroupDataset(
            name=each.input_task.name,
            tasks=(each.input_task,),
            task_id=each.task_id,
            source=source,
            seed=0,
            max_length=length,
            fixed=True,
            segments=self.recipe.backbone_config.token_types,
        )

    def _collated(self, dataset: TaskGroupDataset, built: Sequence[BuiltRow]) -> Batch:
        longest = max(sum(len(each.example) for each in row) for row in built)
        return collate_built([dataset], built, padded_length(longest, self.device), self._pad)

    @cached_property
    def _pad(self) -> int:
        return self.tokenizer.vocabulary.pad


def _example(dataset: TaskGroupDataset, tasks: Sequence[Task], ref: ExampleRef) -> BuiltExample:
    """Like `TaskGroupDataset.example`, but labeled only by the tasks to predict: others might mask
    tokens."""
    rng = keyed_generator(dataset.key, ref.number)
    example = dataset.tasks[0].example(ref.layout, dataset.source, rng)
    for task in tasks:
        task.label(example, dataset.source, keyed_generator(dataset.key, ref.number))
    np.minimum(example.token_type_ids, dataset.segments - 1, out=example.token_type_ids)
    return BuiltExample(ref, example)


def _nothing(source: TableSource) -> _Work:
    """The end of a chunk."""
    return _Work(source=source, built=[], batch=None, cut=0, last=True)


def _chunk(
    work: _Work, pieces: list[Decoded], tasks: Mapping[str, TableTask], whole: bool
) -> PredictedChunk:
    """`whole`: with what only metrics read."""
    found = {name: made for name, (_, made) in gathered(pieces, tasks, [work.source]).items()}
    rows = range(len(work.source))
    predictions = {name: [found.get(name, {}).get(i, {}) for i in rows] for name in tasks}
    if not whole:
        predictions = {name: [*map(tasks[name].shown, x)] for name, x in predictions.items()}
    return PredictedChunk(rows=work.source.numbers, predictions=predictions, cut=work.cut)


def chunks(source: TableSource) -> list[np.ndarray]:
    """The row numbers of each chunk."""
    return np.split(source.numbers, range(CHUNK, len(source), CHUNK))


def ahead(values: Iterator[T]) -> Iterator[T]:
    """The same values; a thread prepares the next one while one is used."""

    def take() -> list[T]:
        return list(islice(values, 1))

    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(take)
        while taken := coming.result():
            coming = pool.submit(take)
            yield from taken


def _core_to_spare(device: torch.device) -> bool:
    """Whether a thread can prepare batches without slowing down those that compute on the CPU."""
    return device.type != "cpu" or (os.cpu_count() or 1) > torch.get_num_threads()
