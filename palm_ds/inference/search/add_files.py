"""Adds the texts of files to an index, a few thousand at a time.

    files ──rows──> those that are new or changed ──embedder──> index, committed ──> the next ones

Texts that are there already, with the same title and metadata, are not embedded again. After an
interruption the same files add what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.inference.embedder import CHUNK, Embedder
from palm_ds.inference.search.index import IndexEmbedding, SearchIndex, likeness, made_by
from palm_ds.inference.search.texts import TextColumns, read_texts
from palm_ds.weights.model_folder import fingerprint_of


@dataclass(kw_only=True)
class AddSummary:
    """Result of adding files."""

    added: int = 0
    replaced: int = 0
    """Texts of the same ids that were deleted."""
    unchanged: int = 0


def add_files(
    index: SearchIndex,
    embedder: Embedder,
    files: Sequence[str],
    columns: TextColumns,
    done: Callable[[int, int | None], None] = lambda rows, of: None,
) -> AddSummary:
    """Add the texts of files; `done(rows, None)` reports the progress. Raises UserError; what was
    committed before stays."""
    summary, rows = AddSummary(), 0
    found = (text for _, text in read_texts(files, columns))
    while texts := list(islice(found, CHUNK)):
        known = index.store.unchanged(texts)
        new = [text for text, same in zip(texts, known, strict=True) if not same]
        if new:
            added = index.add(new, embedder.vectors([text.passage for text in new]))
            summary.added += added.added
            summary.replaced += added.replaced
        summary.unchanged += len(texts) - len(new)
        rows += len(texts)
        done(rows, None)
    if not rows:
        raise UserError(f"{', '.join(files)}: there are no rows")
    return summary


def embedding_of(embedder: Embedder, model: str | Path) -> IndexEmbedding:
    """The embedding of an index with this model's vectors. Raises UserError for vectors that a
    server does not compute."""
    settings = embedder.settings
    if settings.tokens or settings.layers != (-1,):
        raise UserError("layers: an index has one vector of the last layer for each text")
    return IndexEmbedding(
        model=str(model), fingerprint=fingerprint_of(embedder.contents), settings=settings
    )


def check_model(index: SearchIndex, embedder: Embedder, model: str | Path) -> None:
    """Raises UserError unless a model gives the vectors of an index: by its files, or else by what
    it computes for some of the texts."""
    if fingerprint_of(embedder.contents) == index.embedding.fingerprint:
        return
    texts, vectors = index.samples()
    own = embedder.embed(texts) if texts else np.empty((0, embedder.size), np.float32)
    if not texts or own.shape != vectors.shape:
        of = f"vectors of {index.size} numbers by {index.embedding.model}"
        raise UserError(f"{model}: not the model of {index.folder}, which has {of}")
    if not made_by(cosine := likeness(own, vectors)):
        raise UserError(
            f"{model}: not the model of {index.folder}: its vectors of the same texts have a "
            f"cosine of {cosine:.2f} to those of {index.embedding.model}"
        )
