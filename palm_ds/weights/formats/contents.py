"""What a checkpoint holds, whoever wrote it, under our names.

    a reader:  path ──> Contents      (names, shapes, the encoder's numbers; no values yet)
    entry.read()  ──> one tensor      (in our orientation; so that a model is never there twice)

Nothing disappears: every tensor of the checkpoint is in `entries` (as the source of one) or in
`left`, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch

from palm_ds.model.config import EncoderConfig

OPTIMIZER = "optimizer state"
"""The reason why a moment, a count of updates or a learning rate stays behind."""


BUFFER, COPY = "a buffer", "a copy of "
"""Reasons that lose nothing: numbers that every model makes anew, a tied tensor's second name."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One of our tensors, and what of theirs it is made of."""

    theirs: tuple[str, ...]
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    """The values, in the checkpoint's own type and our orientation."""
    how: str = ""
    """What is done to theirs: `transposed`, `three in one`, ...; empty: nothing."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """A head that came along. `kind`: masked_words (heads.NAME.{dense,norm,bias}) or classes
    (heads.NAME.out, and heads.NAME.crf where there are transitions)."""

    kind: str
    classes: int = 0
    pooled: bool = True
    labels: tuple[str, ...] = ()
    """The classes' names, where they are known."""
    transitions: bool = False
    """Whether a CRF is over its classes (palm_ds/model/crf.py)."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """A checkpoint, opened."""

    path: Path
    format: str
    """For a person: `Hugging Face ErnieForMaskedLM`, `ERNIE, a file a variable`, ..."""
    config: EncoderConfig
    entries: Mapping[str, Entry]
    heads: Mapping[str, Head] = field(default_factory=dict)
    task_ids: Mapping[str, int] = field(default_factory=dict)
    head_of: Mapping[str, str] = field(default_factory=dict)
    """{task: the head it uses}; empty where the checkpoint knows of no tasks."""
    export_task: str = ""
    """The task whose row of the task embedding texts get that name no other."""
    left: Mapping[str, str] = field(default_factory=dict)
    """{their name: why it stays behind}: optimizer state, a copy of a tied one, no place here."""
    tokenizer: Path | None = None
    """A vocab.txt, tokenizer.json, sentencepiece model, or a folder with one of them."""
    notes: tuple[str, ...] = ()
    """What a person should know: an eps that was taken for granted, rows beyond the vocabulary."""


class SavesFiles(Protocol):
    """A tokenizer, as far as a folder of weights knows it."""

    def save(self, folder: Path) -> object: ...


def with_eps(contents: Contents, eps: float | None) -> Contents:
    """The checkpoint computed with this LayerNorm eps instead of its own; a note says so."""
    own = contents.config.layer_norm_eps
    if eps is None or eps == own:
        return contents
    note = f"LayerNorm eps {eps:g}, as asked; the checkpoint itself has {own:g}"
    return replace(
        contents, config=replace(contents.config, layer_norm_eps=eps), notes=(*contents.notes, note)
    )
