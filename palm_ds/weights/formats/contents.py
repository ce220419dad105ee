"""An opened checkpoint of any format, under palm_ds's parameter names.

    a reader:  path ──> CheckpointContents   names, shapes and the encoder's config; no values yet
    entry.read()    ──> one tensor           in palm_ds's orientation, read on demand

Every tensor of the checkpoint is accounted for: it is the source of an entry, or it is in `skipped`
with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from palm_ds.common.errors import UserError
from palm_ds.common.messages import printable
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.heads.outputs import HeadOutputs
from palm_ds.model.pooling import TextPooling
from palm_ds.text.exported_tokenizer import TextPreparation
from palm_ds.text.tokenizer import Tokenizer, load_tokenizer

OPTIMIZER = "optimizer state"
"""Why moments, step counts and learning rates are skipped."""


class TrainingNote(str):
    """A remark that matters only to a training that starts from the checkpoint."""


NO_POOLER = TrainingNote("no pooler: tasks on whole texts would start with a newly initialized one")
_MAX_NAME_LENGTH = 1000
BUFFER, COPY, USUAL = "a buffer", "a copy of ", "says what is usual"
"""Lossless reasons: constants that every model recreates, the second name of a tied tensor, and
settings that programs have without them."""


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A palm_ds tensor and the source tensors that it is made of, read on demand."""

    source_names: tuple[str, ...]
    """Empty: a reader made it, and `transform` says of what."""
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    """Returns the values in the checkpoint's dtype and palm_ds's orientation."""
    transform: str = ""
    """How the source tensors are transformed: `transposed`, `three in one`, ...; may be empty."""


NEXT_SENTENCE_CLASSES = ("another text", "the next")
"""The classes of palm_ds's next-sentence task, in order; BERT's head has the opposite order."""
SENTENCE_ORDER_CLASSES = ("swapped", "in order")
"""The classes of palm_ds's task for the order of sentences."""


@dataclass(frozen=True, kw_only=True)
class HeadInfo:
    """A head in a checkpoint. `kind`: masked_words (heads.NAME.{dense,norm,bias}), replaced_tokens
    (heads.NAME.{dense,out}, in some architectures norm) or classes (heads.NAME.out, heads.NAME.crf
    if it has transitions, and heads.NAME.hidden if it has a hidden layer)."""

    kind: str
    classes: int = 0
    pooled: bool = True
    """Whether it reads whole texts: what the pooler makes of them or, if `outputs.averaged`, the
    means of their tokens."""
    transitions: bool = False
    """Whether a CRF is on top of it (palm_ds/model/heads/crf.py)."""
    hidden: int = 0
    """Width of its hidden layer."""
    outputs: HeadOutputs = HeadOutputs()
    task_id: int | None = None
    """The row of the task embedding that its texts had, if known."""

    @property
    def exported_classes(self) -> int:
        """Number of scores that other programs get."""
        return 1 if self.outputs.relevance else self.classes


@dataclass(frozen=True, kw_only=True)
class Extras:
    """Parts of a Hugging Face folder that are for other programs. palm_ds does not read them, but
    keeps them for a later export."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """Entries of config.json."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """{path in the folder: file} of sentence-transformers."""


@dataclass(frozen=True, kw_only=True)
class CheckpointContents:
    """An opened checkpoint."""

    path: Path
    format: str
    """Human-readable: `Hugging Face ErnieForMaskedLM`, `ERNIE, one file per variable`, ..."""
    config: EncoderConfig
    entries: Mapping[str, TensorEntry]
    heads: Mapping[str, HeadInfo] = field(default_factory=dict)
    task_ids: Mapping[str, int] = field(default_factory=dict)
    head_of: Mapping[str, str] = field(default_factory=dict)
    """{task: the head it uses}; empty if the checkpoint has no tasks."""
    export_task: str = ""
    """The default task: texts that name no task get its row of the task embedding."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """The resolved recipe of the run that wrote these weights, if it is stored with them, or in the
    folder of its run."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """{source name: why it is skipped}: optimizer state, copy of a tied tensor, unknown, ..."""
    tokenizer: Path | None = None
    """A vocab.txt, tokenizer.json or sentencepiece model, or a folder with one of them."""
    text_tokenizer: Path | None = None
    """If texts were simplified or lower-cased before they were tokenized: one that does so."""
    preparation: TextPreparation | None = None
    """The same where no such file is stored, as in the checkpoints of a run."""
    hashes: Mapping[str, str] = field(default_factory=dict)
    """{path in the folder: SHA-256} of the files that are compared with it, at the latest when a
    value is read; empty if the format states none."""
    extras: Extras = Extras()
    pooling: TextPooling | None = None
    """How its run trains texts to become vectors, if no files of `extras` state that."""
    origin: str = ""
    """Where it is from, if that is not its path: a repository of the hub and its revision."""
    notes: tuple[str, ...] = ()
    """Remarks for the user: an assumed eps, rows beyond the vocabulary, ..."""
    folder_notes: tuple[str, ...] = ()
    """Remarks on which weights of a folder these are. They have paths of this machine, so they stay
    out of files that are published."""

    @property
    def all_notes(self) -> tuple[str, ...]:
        return (*self.folder_notes, *self.notes)

    @property
    def notes_on_use(self) -> tuple[str, ...]:
        """Those that matter where nothing is trained from it."""
        return tuple(note for note in self.all_notes if not isinstance(note, TrainingNote))

    @property
    def task_id(self) -> int:
        """The row of the task embedding of `export_task`; 0 if unknown, or without one."""
        return self.task_ids.get(self.export_task, 0) if self.config.task_types else 0

    @property
    def masked_lm_heads(self) -> list[str]:
        """The names of the masked-LM heads, in the order of their tasks."""
        words = [name for name, head in self.heads.items() if head.kind == "masked_words"]
        of_tasks = dict.fromkeys(self.head_of.values())
        return [
            *(x for x in of_tasks if x in words),
            *(word for word in words if word not in of_tasks),
        ]


def check_names(path: Path, names: Iterable[str]) -> None:
    """Raises UserError for an unprintable tensor name: control characters would reach terminals and
    reports."""
    for name in names:
        if not name.isprintable() or len(name) > _MAX_NAME_LENGTH:
            raise UserError(f"{path}: a tensor name that cannot be shown: {printable(name[:80])}")


def read_tokenizer(contents: CheckpointContents) -> Tokenizer | None:
    """The tokenizer of a checkpoint's texts: if those of training were simplified or lower-cased
    before they were tokenized, it does so too. None if it has none. Raises UserError if it belongs
    to another model."""
    file = contents.text_tokenizer or contents.tokenizer
    if file is None:
        return None
    tokenizer = fitting_tokenizer(file, contents)
    return contents.preparation.applied_to(tokenizer) if contents.preparation else tokenizer


def fitting_tokenizer(file: Path, contents: CheckpointContents) -> Tokenizer:
    """A file's tokenizer. Raises UserError if it has tokens that the checkpoint has no rows for."""
    tokenizer = load_tokenizer(file)
    words = contents.entries["backbone.word.weight"].shape[0]
    if tokenizer.size > words:
        raise UserError(
            f"{file}: has {tokenizer.size:,} tokens, but the token embeddings of "
            f"{contents.path} have {words:,} rows; it belongs to another model"
        )
    return tokenizer


def with_eps(contents: CheckpointContents, eps: float | None) -> CheckpointContents:
    """The contents with this LayerNorm eps instead of the checkpoint's, and a note about it."""
    own = contents.config.layer_norm_eps
    if eps is None or eps == own:
        return contents
    note = f"LayerNorm eps {eps:g}, as requested; the checkpoint itself has {own:g}"
    return replace(
        contents, config=replace(contents.config, layer_norm_eps=eps), notes=(*contents.notes, note)
    )
