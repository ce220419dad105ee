"""A search over texts that `palm-ds embed` has turned into vectors: every one is compared.

palm-ds embed runs/mine --input texts.txt --output vectors.npy
index = open_index(Path("vectors.npy"), ["texts.txt"])
index.nearest(query_vector, top=5)      # [(row, cosine), ...]
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from palm_ds.common.errors import UserError
from palm_ds.data.reader import TableSettings, open_table
from palm_ds.inference.embedder import EmbeddingSettings
from palm_ds.serve.requests import normalized

_ROWS = 65_536  # vectors that are read and normalised at a time


@dataclass(frozen=True, kw_only=True)
class SearchIndex:
    """Vectors of length 1 and their texts."""

    vectors: np.ndarray  # (texts, size) float32
    texts: Sequence[str]
    settings: EmbeddingSettings
    """How the texts were embedded, and queries must be."""
    model: str
    """The path of the model that embedded them."""

    def nearest(self, query: np.ndarray, top: int) -> list[tuple[int, float]]:
        """The rows with the highest cosine to a query (size,), the best first; equal ones in the
        order of the texts."""
        cosines = self.vectors @ normalized(query[None].astype(np.float32))[0]
        top = min(top, len(cosines))
        lowest = np.partition(cosines, -top)[-top]
        best = np.flatnonzero(cosines >= lowest)
        best = best[np.argsort(-cosines[best], kind="stable")][:top]
        return [(int(row), float(cosines[row])) for row in best]


def open_index(file: Path, texts: Sequence[str], column: str = "") -> SearchIndex:
    """The output of `palm-ds embed` with its texts; without `texts` those of the files it was made
    from. Raises UserError."""
    about = _about(file)
    settings = _settings(file, about)
    vectors = _vectors(file, about)
    passages = _texts(texts, column) if texts else _texts(about["inputs"], column, about)
    if len(passages) != len(vectors):
        raise UserError(
            f"{file}: {len(vectors):,} vectors, but {len(passages):,} texts; give the files that "
            "it was made from (--texts)"
        )
    return SearchIndex(
        vectors=vectors, texts=passages, settings=settings, model=str(about.get("model", ""))
    )


def _about(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise UserError(f"--index: {file}: no such file; `palm-ds embed` writes one")
    stated = file.with_name(f"{file.name}.json")
    try:
        return _checked(json.loads(stated.read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise UserError(
            f"--index: {stated}: not the description that `palm-ds embed` writes next to vectors"
        ) from None


def _checked(about: Mapping[str, Any]) -> dict[str, Any]:
    """A description with the types that `palm-ds embed` writes. Raises ValueError, KeyError or
    TypeError for others."""
    return {
        **about,
        "settings": {**about["settings"], "layers": tuple(about["settings"].get("layers", (-1,)))},
        "scales": np.array(about.get("scales", 1.0), np.float32),
        "inputs": [*map(os.fspath, about.get("inputs", []))],
        "columns": dict(about.get("columns", {})),
    }


def _settings(file: Path, about: Mapping[str, Any]) -> EmbeddingSettings:
    try:
        settings = EmbeddingSettings(**about["settings"])
    except TypeError as error:
        raise UserError(f"--index: {file}.json: settings: {error}") from None
    if settings.tokens:
        raise UserError(f"--index: {file}: has vectors of tokens; embed without --tokens")
    if settings.layers != (-1,):
        raise UserError(f"--index: {file}: is of layers {settings.layers}; a server computes -1")
    return settings


def _vectors(file: Path, about: Mapping[str, Any]) -> np.ndarray:
    """(texts, size) float32 of length 1."""
    stored = _stored(file)
    scales = about["scales"]
    if scales.shape not in ((), stored.shape[1:]):
        raise UserError(
            f"--index: {file}.json: {scales.shape} scales for vectors of {stored.shape[1]} numbers"
        )
    out = np.empty(stored.shape, np.float32)
    for first in range(0, len(stored), _ROWS):
        part = stored[first : first + _ROWS].astype(np.float32) * scales
        out[first : first + _ROWS] = normalized(part)
    if not np.isfinite(out).all():
        raise UserError(f"--index: {file}: has numbers that are not finite")
    return out


def _stored(file: Path) -> np.ndarray:
    try:
        if file.suffix == ".npy":
            stored = np.load(file, mmap_mode="r", allow_pickle=False)
        else:
            column = pq.read_table(file, columns=["embedding"]).column(0).combine_chunks()
            stored = column.flatten().to_numpy(zero_copy_only=False).reshape(len(column), -1)
    except (OSError, ValueError, KeyError) as error:
        line = str(error).splitlines()[0]
        raise UserError(f"--index: {file}: not a file of `palm-ds embed`: {line}") from None
    if stored.ndim != 2 or not stored.size:
        raise UserError(f"--index: {file}: its shape is {stored.shape}; expected (texts, numbers)")
    return stored


def _texts(files: Sequence[str], column: str, about: Mapping[str, Any] | None = None) -> list[str]:
    """The texts of files, read as `about` says unless `column` names another."""
    if not files:
        raise UserError("--index: give its texts: --texts FILE")
    about = about or {}
    columns = {"text_a": column} if column else about.get("columns", {})
    table = open_table(
        list(files), TableSettings(columns=columns, format=about.get("format") or "auto")
    )
    if "text_a" not in table.columns:
        raise UserError(f"{', '.join(files)}: no column of texts; name it: --column NAME")
    return table.column("text_a")
