"""Vectors of texts or ids with one model and any settings, all of which share its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch

from palm_ds.common.errors import UserError, suggest
from palm_ds.common.sparse_vectors import SparseVectors
from palm_ds.inference.embedder import Embedder, EmbeddingSettings, Text
from palm_ds.model.inputs.batch import PackedText
from palm_ds.model.pooling import SPLADE


@dataclass(frozen=True, kw_only=True)
class TextVectors:
    """`open` reads the weights, at the first call."""

    open: Callable[[EmbeddingSettings], Embedder]
    embedders: dict[EmbeddingSettings, Embedder] = field(default_factory=dict)
    """Those that were used so far."""

    def __call__(
        self,
        texts: str | Sequence[Text] | Sequence[Sequence[int]] | torch.Tensor,
        settings: Mapping[str, Any],
    ) -> torch.Tensor | list[torch.Tensor]:
        """As `palm.Backbone`, called on texts. Raises UserError."""
        embedder = self._embedder(_settings(settings))
        encoded = _encoded(texts, embedder)
        if embedder.settings.tokens:
            return [torch.from_numpy(vectors) for vectors in embedder.embed_tokens(encoded)]
        vectors = embedder.vectors_encoded(encoded)
        return _sparse(vectors) if isinstance(vectors, SparseVectors) else torch.from_numpy(vectors)

    def words(
        self, texts: str | Sequence[Text], settings: Mapping[str, Any]
    ) -> list[dict[str, float]]:
        """{token: weight} of the sparse vector of each text. Raises UserError."""
        embedder = self._embedder(_settings(settings))
        vectors = embedder.vectors_encoded(_encoded(texts, embedder))
        if not isinstance(vectors, SparseVectors):
            raise UserError(
                f"words: vectors of {embedder.folder} ({embedder.settings.pooling}) have no words; "
                "those of a masked-LM head have (pooling: splade)"
            )
        return [embedder.named(vector) for vector in vectors]

    def _embedder(self, settings: EmbeddingSettings) -> Embedder:
        if settings not in self.embedders:
            opened = next(iter(self.embedders.values()), None)
            if opened and opened.words is None and settings.pooling == SPLADE:
                opened = None  # its masked-LM head was not read
            made = opened.with_settings(settings) if opened else self.open(settings)
            self.embedders[settings] = made
        return self.embedders[settings]


def _sparse(vectors: SparseVectors) -> torch.Tensor:
    """A sparse tensor in COO format, as sentence-transformers' SparseEncoder gives."""
    rows = np.arange(len(vectors)).repeat(vectors.active)
    at = torch.from_numpy(np.stack([rows, vectors.indices.astype(np.int64)]))
    values = torch.from_numpy(vectors.data)
    return torch.sparse_coo_tensor(
        at, values, vectors.shape, is_coalesced=True, check_invariants=True
    )


def _settings(given: Mapping[str, Any]) -> EmbeddingSettings:
    known = [field_.name for field_ in fields(EmbeddingSettings)]
    for name in given:
        if name not in known:
            raise UserError(f"{name}: no such setting{suggest(name, known)}")
    layers = given.get("layers", (-1,))
    layers = (layers,) if isinstance(layers, int) else tuple(layers)
    return EmbeddingSettings(**{**given, "layers": layers})


def _encoded(texts: object, embedder: Embedder) -> list[PackedText]:
    """Texts and pairs encoded, or the given ids without padding at the end, checked."""
    if not isinstance(texts, Iterable) or isinstance(texts, Mapping | bytes):
        raise UserError(f"texts: expected a text or a list of texts, got {texts!r:.60}")
    rows = [texts] if isinstance(texts, str) else list(texts)
    if any(map(_is_text, rows)):
        for number, row in enumerate(rows):
            if not _is_text(row):
                raise UserError(f"text {number}: expected a text like the others, got {row!r:.60}")
        return embedder.encode(rows)
    places = (f"text {number}" for number in range(len(rows)))
    ids = [_checked_ids(row, where, embedder) for row, where in zip(rows, places, strict=True)]
    return [embedder.encoded(each) for each in ids]


def _is_text(row: object) -> bool:
    """Whether it is a text or a pair."""
    if isinstance(row, tuple | list) and len(row) == 2:
        return all(isinstance(text, str) for text in row)
    return isinstance(row, str)


def _checked_ids(row: object, where: str, embedder: Embedder) -> np.ndarray:
    known, size = embedder.tokenizer.vocabulary, embedder.encoder.config.vocab_size or 0
    longest = embedder.encoder.config.max_length
    wanted = f"{where}: expected 1 to {longest} ids from 0 to {size - 1}"
    try:
        given = np.asarray(row)
    except ValueError:  # lists of different lengths
        raise UserError(f"{wanted}, got {row!r:.60}") from None
    if given.ndim != 1 or (given.dtype.kind not in "iu" and given.size):
        raise UserError(f"{wanted}, got {row!r:.60}")
    end = int(np.flatnonzero(given != known.pad).max(initial=-1)) + 1
    ids = given[: end + (known.pad == known.sep)]  # the first of such padding ends the text
    if not 0 < len(ids) <= longest or ids.min() < 0 or ids.max() >= size:
        raise UserError(wanted)
    return ids.astype(np.int64)
