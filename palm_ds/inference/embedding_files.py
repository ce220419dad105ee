"""Embeds files with one process or several.

    rows ──table──> every process: its chunks ──embedder──> .OUTPUT.parts/part_000000.npz
                                                                   │
    OUTPUT, complete or absent, and OUTPUT.json <──joined── rank 0

A part that an interrupted run has finished is not computed again. The files are the same for any
number of processes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from palm_ds.common.atomic import move_into_place
from palm_ds.common.errors import UserError, suggest
from palm_ds.common.files import check_not_input, hash_of_text
from palm_ds.common.json_files import write_json
from palm_ds.common.plugins import source_code
from palm_ds.common.sparse_vectors import SparseVectors, load_sparse
from palm_ds.common.version import __version__
from palm_ds.data.reader import ColumnKey, Table, TableSettings, open_table
from palm_ds.data.reader.options import without_labels
from palm_ds.inference.embedder import CHUNK, Embedder, Text
from palm_ds.inference.parts import OutputParts, model_files
from palm_ds.runtime.processes.process_group import SINGLE_PROCESS, ProcessGroup

TYPES = ("float32", "float16", "int8")
_SUFFIXES, _SPARSE = (".npy", ".parquet"), ".npz"
_ROWS = 512  # of a row group of a parquet file
_INT8 = 127


@dataclass(frozen=True, kw_only=True)
class EmbeddingJob:
    """Texts to embed, and where to write their vectors."""

    inputs: Sequence[str]
    output: Path
    columns: Mapping[str, ColumnKey] = field(default_factory=dict)
    """{role: column}; the texts are `text_a`, with `text_b` pairs."""
    format: str = ""
    """Format of the input; empty: by the files' suffixes."""
    dtype: str = "float32"
    """int8: each number divided by its dimension's scale (in OUTPUT.json) and rounded."""

    def check(self, embedder: Embedder) -> None:
        """Raises UserError for what cannot be written."""
        if self.dtype not in TYPES:
            raise UserError(f"dtype: no {self.dtype!r}{suggest(self.dtype, TYPES)}")
        if embedder.sparse:
            self._check_sparse()
        elif self.output.suffix not in _SUFFIXES:
            raise UserError(f"{self.output}: its suffix must be one of {', '.join(_SUFFIXES)}")
        if self.output.is_dir():
            raise UserError(f"{self.output}: is a folder; name a file")
        if embedder.settings.tokens and self.output.suffix == ".npy":
            raise UserError(
                f"{self.output}: texts have different numbers of tokens; write a .parquet file"
            )
        if embedder.settings.tokens and self.dtype == "int8":
            raise UserError("dtype: int8 is for vectors of texts; use float16")

    def _check_sparse(self) -> None:
        if self.output.suffix != _SPARSE:
            raise UserError(
                f"{self.output}: sparse vectors (splade) are written as SciPy's {_SPARSE}; name "
                "such a file"
            )
        if self.dtype != "float32":
            raise UserError(f"dtype: {self.dtype}: sparse vectors are float32")


@dataclass(frozen=True, kw_only=True)
class EmbeddingSummary:
    """Summary of an embedding job."""

    rows: int
    size: int
    continued: int
    """Rows that an interrupted run had finished."""
    seconds: float
    active: float | None = None
    """Mean number of non-zero entries of sparse vectors; None: they are dense."""


def embed_files(
    embedder: Embedder,
    job: EmbeddingJob,
    *,
    model: str,
    group: ProcessGroup = SINGLE_PROCESS,
    done: Callable[[int, int], None] = lambda rows, of: None,
) -> EmbeddingSummary | None:
    """Embed the texts of files into one file; rank 0 returns the summary. All processes call it;
    `done(rows, of)` reports the progress of a process. `model` is noted in the output. Raises
    UserError."""
    job.check(embedder)
    started = time.monotonic()
    table = open_table(list(job.inputs), _read_settings(job))
    check_not_input(job.output, table.names)
    texts = texts_of(table, job.columns)
    key = [vectors_key(embedder), table.fingerprint]
    with OutputParts.opened(job.output, ".npz", key, group) as parts:
        continued = sum(group.gather(_write_parts(embedder, texts, parts, group, done)))
        if group.rank:
            return None
        about = _about(embedder, job, model, len(texts))
        active = _publish(parts, job, table, about, embedder)
    return EmbeddingSummary(
        rows=len(texts),
        size=embedder.size,
        continued=continued,
        seconds=time.monotonic() - started,
        active=active,
    )


def _read_settings(job: EmbeddingJob) -> TableSettings:
    return without_labels(TableSettings(format=job.format or "auto", columns=job.columns))


def texts_of(table: Table, columns: Mapping[str, ColumnKey]) -> list[Text]:
    """The texts of a table; the pairs of one with two texts in a row, unless `columns` names the
    first alone. Raises UserError."""
    if "text_a" not in table.columns:
        raise UserError(f"{', '.join(table.names)}: no text column; name one with --column NAME")
    texts = table.column("text_a")
    alone = "text_a" in columns and "text_b" not in columns
    if alone or "text_b" not in table.columns:
        return texts
    return list(zip(texts, table.column("text_b"), strict=True))


# ---- parts ----


def vectors_key(embedder: Embedder) -> list[Any]:
    """All that vectors depend on but their texts, as JSON."""
    dtype, device = next(embedder.encoder.parameters()).dtype, embedder.device.type
    settings = [asdict(embedder.settings), embedder.task_id, embedder.batch_tokens, str(dtype)]
    code = hash_of_text(source_code(type(embedder.encoder)))
    return [model_files(embedder.folder), settings, device, code, __version__]


def _write_parts(
    embedder: Embedder,
    texts: Sequence[Text],
    parts: OutputParts,
    group: ProcessGroup,
    done: Callable[[int, int], None],
) -> int:
    """Embed this process's chunks; returns the rows that were there already."""
    mine = range(0, len(texts), CHUNK)[group.rank :: group.world]
    rows = sum(min(CHUNK, len(texts) - first) for first in mine)
    finished = there = 0
    for first in mine:
        chunk = texts[first : first + CHUNK]
        if parts.path(first).exists():
            there += len(chunk)
        else:
            parts.write(first, partial(_write_part, embedder, chunk))
        finished += len(chunk)
        done(finished, rows)
    return there


def _write_part(embedder: Embedder, texts: Sequence[Text], file: Path) -> None:
    encoded = embedder.encode(texts)
    vectors = None if embedder.settings.tokens else embedder.vectors_encoded(encoded)
    if isinstance(vectors, SparseVectors):
        vectors.save(file)
        return
    if vectors is None:
        vectors = np.concatenate(embedder.embed_tokens(encoded))
        lengths = np.array([len(encoding.input_ids) for encoding in encoded])
    else:
        lengths = np.ones(len(encoded), np.int64)
    np.savez(file, vectors=vectors, lengths=lengths)


# ---- the output ----


def _about(embedder: Embedder, job: EmbeddingJob, model: str, rows: int) -> dict[str, Any]:
    return {
        "made_by": f"palm_ds {__version__}",
        "model": model,
        "inputs": list(map(str, job.inputs)),
        "columns": dict(job.columns),
        "format": job.format,
        "rows": rows,
        "size": embedder.size,
        "dtype": job.dtype,
        "settings": asdict(embedder.settings),
    }


def _publish(
    parts: OutputParts, job: EmbeddingJob, table: Table, about: dict[str, Any], embedder: Embedder
) -> float | None:
    """Write the output and what it is; returns the mean number of non-zero entries of sparse
    vectors."""
    first = range(0, len(table), CHUNK)
    files = [parts.path(number) for number in first]
    temporary, active = parts.folder / f"joined{job.output.suffix}", None
    if embedder.sparse:
        joined = SparseVectors.join([load_sparse(file) for file in files])
        joined.save(temporary)
        active = float(joined.active.mean()) if len(joined) else 0.0
    elif job.output.suffix == ".npy":
        convert = _converter(files, job.dtype, about)
        _write_npy(temporary, files, convert, (len(table), embedder.size))
    else:
        _write_parquet(temporary, files, _converter(files, job.dtype, about), table, about)
    write_json(job.output.with_name(f"{job.output.name}.json"), about)
    move_into_place(temporary, job.output)
    return active


def _converter(
    files: Sequence[Path], dtype: str, about: dict[str, Any]
) -> Callable[[np.ndarray], np.ndarray]:
    """Turns float32 vectors into the wanted type; the scales of int8 are noted in `about`."""
    if dtype != "int8":
        return lambda vectors: vectors.astype(dtype)
    largest = np.maximum.reduce([np.abs(vectors).max(0) for vectors, _ in _read(files)])
    scales = np.where(largest > 0, largest, 1).astype(np.float32) / np.float32(_INT8)
    about["scales"] = scales.tolist()
    return lambda vectors: np.rint(vectors / scales).clip(-_INT8, _INT8).astype(np.int8)


def _read(files: Sequence[Path]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(vectors, lengths) of each part."""
    for file in files:
        with np.load(file, allow_pickle=False) as part:
            yield part["vectors"], part["lengths"]


def _write_npy(
    path: Path,
    files: Sequence[Path],
    convert: Callable[[np.ndarray], np.ndarray],
    shape: tuple[int, int],
) -> None:
    out: np.memmap | None = None
    first = 0
    for vectors, _ in _read(files):
        values = convert(vectors)
        if out is None:
            out = np.lib.format.open_memmap(path, mode="w+", dtype=values.dtype, shape=shape)
        out[first : first + len(values)] = values
        first += len(values)
    assert out is not None and first == shape[0]
    out.flush()


def _write_parquet(
    path: Path,
    files: Sequence[Path],
    convert: Callable[[np.ndarray], np.ndarray],
    table: Table,
    about: Mapping[str, Any],
) -> None:
    """A row for each text: its id if the table has ids, and its vector (or list of vectors)."""
    ids = table.column("id") if "id" in table.columns else None
    many = bool(about["settings"]["tokens"])
    value = pa.from_numpy_dtype(np.dtype(about["dtype"]))
    vector = pa.list_(value, about["size"])
    fields = [pa.field("embedding", pa.list_(vector) if many else vector)]
    fields = [pa.field("id", pa.string()), *fields] if ids is not None else fields
    schema = pa.schema(fields, metadata={"palm_ds": json.dumps(about)})
    first = 0
    with pq.ParquetWriter(path, schema) as writer:
        for vectors, lengths in _read(files):
            flat = pa.array(convert(vectors).ravel())
            column: pa.Array = pa.FixedSizeListArray.from_arrays(flat, about["size"])
            if many:
                starts = pa.array(np.concatenate([[0], lengths.cumsum()]), pa.int32())
                column = pa.ListArray.from_arrays(starts, column)
            columns = [column]
            if ids is not None:
                own = [str(x) for x in ids[first : first + len(lengths)]]
                columns = [pa.array(own, pa.string()), column]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema), row_group_size=_ROWS)
            first += len(lengths)
