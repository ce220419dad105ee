"""A model as the server holds it: all its heads, its tokenizer, and a copy on each device.

    open_served("runs/mine", ...)      a run of `palm-ds finetune`: its tasks, and embeddings
    open_served("models/minilm", ...)  a checkpoint of any format: embeddings

Both also predict masked words, if the model has that head.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from palm_ds.common.errors import UserError
from palm_ds.data.tasks.task import TableTask
from palm_ds.inference.embedder import Embedder, EmbeddingSettings, make_embedder, splade_head
from palm_ds.inference.fill_mask import Filler
from palm_ds.inference.model_tasks import asked_tasks
from palm_ds.inference.predictor import EncoderPass, Predictor
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.model.heads.heads import MaskedLMHead, predicts_tokens
from palm_ds.model.multi_task_model import Model, prepare_to_predict
from palm_ds.model.pooling import POOLINGS, SPLADE
from palm_ds.serve.forward import with_vector_heads
from palm_ds.text.tokenizer import Tokenizer
from palm_ds.weights.formats.contents import CheckpointContents
from palm_ds.weights.formats.runnable import has_pooler


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Settings for opening a server's models."""

    devices: Sequence[torch.device] = (torch.device("cpu"),)
    precision: str = "fp32"
    embedding: EmbeddingSettings = field(default_factory=EmbeddingSettings)
    """How texts are embedded, where a request does not say."""
    batch_tokens: int = 0
    """Tokens of a forward pass; 0 chooses for the device."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model that is ready to compute."""

    name: str
    path: Path
    """As given to the server."""
    replicas: Sequence[Model]
    """One for each device."""
    devices: Sequence[torch.device]
    embedder: Embedder
    """The encoder with its tokenizer and settings."""
    task_ids: Mapping[str, int]
    """{task: its row of the task embedding}, if the encoder has one."""
    poolings: Sequence[str]
    """How it can pool."""
    predictor: Predictor | None = None
    """The tasks on rows, if it has any."""
    filler: Filler | None = None
    """The masked-LM head, if it has one."""
    batch_tokens: int

    @property
    def tokenizer(self) -> Tokenizer:
        return self.embedder.tokenizer

    @property
    def tasks(self) -> Mapping[str, TableTask]:
        return self.predictor.tasks if self.predictor else {}

    @cached_property
    def passes(self) -> Mapping[str, EncoderPass]:
        """{task: how its input is built}"""
        if self.predictor is None:
            return {}
        alone = [replace(self.predictor, tasks={n: t}) for n, t in self.predictor.tasks.items()]
        return {next(iter(each.tasks)): each.passes[0] for each in alone}

    def kind_of(self, task: str) -> str:
        """A task's kind, as in a recipe."""
        assert self.predictor is not None
        return str(self.predictor.recipe.tasks[task].get("kind", task))


def open_served(path: Path, name: str, options: ModelOptions) -> ServedModel:
    """Open a run folder, or a checkpoint of any format, with all that it can do. Raises
    UserError."""
    how = {"precision": options.precision, "batch_tokens": options.batch_tokens}
    opened = TrainedModel.open(path, device=options.devices[0], **how)
    opened.check_reads_texts()
    tasks = _tasks_on_rows(opened)
    predictor = opened.predictor(tasks) if tasks else None
    model = predictor.model if predictor else opened.words()
    words = _splade_words(model, opened.contents)
    embedder = make_embedder(
        opened.contents,
        model.backbone,
        opened.text_tokenizer,
        options.embedding,
        device=opened.device,
        batch_tokens=opened.tokens,
        words=words,
    )
    poolings = [*POOLINGS, *["pooler"] * has_pooler(opened.contents), *[SPLADE] * bool(words)]
    first = with_vector_heads(model, poolings, words)
    return ServedModel(
        name=name,
        path=path,
        replicas=[first, *(_copied(first, device, opened.dtype) for device in options.devices[1:])],
        devices=options.devices,
        embedder=embedder,
        task_ids=_task_ids(opened.contents),
        poolings=poolings,
        predictor=predictor,
        filler=_filler(first, embedder, opened),
        batch_tokens=opened.tokens,
    )


def _splade_words(model: Model, contents: CheckpointContents) -> MaskedLMHead | None:
    """The masked-LM head that sparse vectors are read from, if the model has it."""
    if not contents.masked_lm_heads or splade_head(contents) not in model.heads:
        return None
    head = model.heads[splade_head(contents)]
    return head if isinstance(head, MaskedLMHead) else None


def _copied(model: Model, device: torch.device, dtype: torch.dtype) -> Model:
    return prepare_to_predict(copy.deepcopy(model), device, dtype)


def _tasks_on_rows(opened: TrainedModel) -> list[str]:
    """The tasks of a model that predict something for a row as it is (those that mask tokens do
    not); none for a checkpoint without a recipe."""
    try:
        asked = asked_tasks(opened.recipe, (), opened.path)
    except UserError:
        return []
    return [name for name in asked if not asked[name].edits_text]


def _task_ids(contents: CheckpointContents) -> Mapping[str, int]:
    return contents.task_ids if contents.config.task_types else {}


def _filler(model: Model, embedder: Embedder, opened: TrainedModel) -> Filler | None:
    """The masked-LM head of the exported task, else of the first that has one."""
    heads = model.head_of.items()
    words = [task for task, head in heads if _predicts_words(model.heads[head])]
    if not words:
        return None
    exported = opened.contents.export_task
    task = exported if exported in words else words[0]
    task_id = _task_ids(opened.contents).get(task, 0)
    reading = opened.reading(task, model.head_of[task])
    return Filler(model, embedder.tokenizer, embedder.folder, task, task_id, reading)


def _predicts_words(head: nn.Module) -> bool:
    return isinstance(head, MaskedLMHead) and predicts_tokens(head)


def names_of(paths: Sequence[str]) -> dict[str, Path]:
    """{name: path} of what was given as PATH or NAME=PATH. A path's name is its last part that is
    not weights, hf or best. Raises UserError for a name given twice."""
    by_name: dict[str, Path] = {}
    for text in paths:
        name, separator, rest = text.partition("=")
        path = Path(rest) if separator else Path(text)
        if not separator:
            parts = path.absolute().parts
            name = next(
                (part for part in reversed(parts) if part not in ("weights", "hf", "best")), "model"
            )
        if not name or name in by_name:
            raise UserError(f"{text}: another model is named {name!r}; give one as NAME=PATH")
        by_name[name] = path
    return by_name
