"""Vectors of `palm-ds embed` and their texts, as an index that is only searched.

palm-ds embed runs/mine --input texts.txt --output vectors.npy
index = open_embedded(Path("vectors.npy"), ["texts.txt"])
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from palm_ds.common.errors import UserError, first_line
from palm_ds.corpus.mapped_shard import map_array
from palm_ds.data.reader import TableSettings, open_table
from palm_ds.data.reader.options import without_labels
from palm_ds.inference.embedder import EmbeddingSettings
from palm_ds.inference.search.index import IndexEmbedding, SearchIndex
from palm_ds.inference.search.store import Store
from palm_ds.inference.search.texts import IndexedText
from palm_ds.inference.search.vectors import VectorArray, unit
from palm_ds.model.pooling import SPLADE

_ROWS = 65_536  # vectors that are read and normalized at a time


def open_embedded(file: Path, texts: Sequence[str], column: str = "") -> SearchIndex:
    """The output of `palm-ds embed` with its texts; without `texts` those of the files it was made
    from. The id of a text is its row. Raises UserError."""
    about = _about(file)
    settings = _settings(file, about)
    vectors = _vectors(file, about)
    passages = _texts(texts, column) if texts else _texts(about["inputs"], column, about)
    if len(passages) != len(vectors):
        raise UserError(
            f"{file}: {len(vectors):,} vectors, but {len(passages):,} texts; give the files that "
            "it was made from (--texts)"
        )
    rows = [IndexedText(text=text, id=str(row)) for row, text in enumerate(passages)]
    model = str(about.get("model", ""))
    return SearchIndex(
        Store.in_memory(VectorArray(vectors), rows),
        IndexEmbedding(model=model, fingerprint="", settings=settings),
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
    if settings.pooling == SPLADE:
        raise UserError(
            f"--index: {file}: has sparse vectors; `palm-ds index build` makes an index of them"
        )
    if settings.layers != (-1,):
        raise UserError(
            f"--index: {file}: has vectors of layers {settings.layers}; a server computes only the "
            "last layer, -1"
        )
    return settings


def _vectors(file: Path, about: Mapping[str, Any]) -> np.ndarray:
    """(texts, size) float32 of length 1."""
    stored = _stored(file)
    scales = about["scales"]
    if scales.shape not in ((), stored.shape[1:]):
        raise UserError(
            f"--index: {file}.json: scales of shape {scales.shape} for vectors of "
            f"{stored.shape[1]} numbers"
        )
    out = np.empty(stored.shape, np.float32)
    for first in range(0, len(stored), _ROWS):
        part = stored[first : first + _ROWS].astype(np.float32) * scales
        out[first : first + _ROWS] = unit(part)
    if not np.isfinite(out).all():
        raise UserError(f"--index: {file}: has numbers that are not finite")
    return out


def _stored(file: Path) -> np.ndarray:
    try:
        if file.suffix == ".npy":
            stored = map_array(file)
        else:
            column = pq.read_table(file, columns=["embedding"]).column(0).combine_chunks()
            stored = column.flatten().to_numpy(zero_copy_only=False).reshape(len(column), -1)
    except (OSError, ValueError, KeyError) as error:
        line = first_line(error)
        raise UserError(f"--index: {file}: not a file of `palm-ds embed`: {line}") from None
    if stored.ndim != 2 or not stored.size:
        raise UserError(f"--index: {file}: its shape is {stored.shape}; expected (texts, numbers)")
    return stored


def _texts(files: Sequence[str], column: str, about: Mapping[str, Any] | None = None) -> list[str]:
    """The texts of files, read as `about` says unless `column` names another."""
    if not files:
        raise UserError("--index: give its texts with --texts FILE")
    about = about or {}
    columns = {"text_a": column} if column else about.get("columns", {})
    read = TableSettings(columns=columns, format=about.get("format") or "auto")
    table = open_table(list(files), without_labels(read))
    if "text_a" not in table.columns:
        raise UserError(f"{', '.join(files)}: no text column; name one with --column NAME")
    return table.column("text_a")
