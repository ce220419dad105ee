"""Writes a corpus: documents to Arrow shards, shards to a folder that opens.

    with ShardWriter(file, annotations=("sentence", "word"), ids_type="uint16") as shard:
        shard.append("doc 1", ids, {"sentence": ..., "word": ...})
    finish_corpus(folder, tokenizer, [shard.summary(), ...], ...)

A shard is an Arrow stream of record batches, readable by `palm_ds.corpus.store` and by
`datasets.load_from_disk`. A document never crosses a record batch.
"""

from __future__ import annotations

import hashlib
import io
import os
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from palm_ds.common.atomic import sync_opened, write_file_atomically
from palm_ds.common.files import hash_of_text
from palm_ds.common.json_files import write_json
from palm_ds.corpus.manifest import (
    COUNTED_ANNOTATIONS,
    Manifest,
    Shard,
    describe_file,
    write_manifest,
)

if TYPE_CHECKING:
    from palm_ds.text.tokenizer import Tokenizer

REPEATED = "repeated.npy"
BATCH_TOKENS = 1 << 19  # a record batch is closed once it has this many tokens


def smallest_unsigned(size: int) -> str:
    """The smallest type for the ids 0 .. size - 1."""
    return next(t for t in ("uint8", "uint16", "uint32") if size - 1 <= np.iinfo(t).max)


@dataclass(frozen=True, kw_only=True)
class ShardLengths:
    """The lengths of the texts in a shard, and a hash of the tokens of each document."""

    document_tokens: np.ndarray  # (documents,) int64
    document_sentences: np.ndarray  # (documents,) int64
    sentence_tokens: np.ndarray  # (sentences,) int64
    document_hashes: np.ndarray  # (documents,) uint64


@dataclass(frozen=True, kw_only=True)
class ShardSummary:
    """Summary of a written shard."""

    shard: Shard
    text_bytes: int
    span_counts: Mapping[str, int]  # how many of each annotation in COUNTED_ANNOTATIONS
    file: Mapping[str, Any]  # bytes, sha256
    lengths: Callable[[str], np.ndarray]  # by field, read for the index one shard at a time


def as_arrow(values: np.ndarray) -> pa.Array:
    """The same memory as an Arrow array (`pa.array` would import pandas)."""
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


class HashingFile:
    """A file for pyarrow that computes its own SHA-256 and size."""

    def __init__(self, handle: IO[bytes]) -> None:
        self.handle, self.sha256, self.bytes = handle, hashlib.sha256(), 0
        self.closed = False

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        self.bytes += len(data)
        return self.handle.write(data)

    def flush(self) -> None:
        self.handle.flush()

    def close(self) -> None:
        """Flushes the bytes to disk; the caller closes the handle."""
        if not self.closed:
            self.handle.flush()
            sync_opened(self.handle.fileno())
        self.closed = True

    def entry(self) -> dict[str, Any]:
        """The manifest entry of the file."""
        return {"bytes": self.bytes, "sha256": self.sha256.hexdigest()}


class ShardWriter:
    """Writes one Arrow file under a temporary name and renames it when complete."""

    def __init__(self, file: Path, *, annotations: Sequence[str], ids_type: str) -> None:
        self.file, self.annotations = file, tuple(annotations)
        self.ids_type = np.dtype(ids_type)
        value = pa.from_numpy_dtype(self.ids_type)
        columns = [("id", pa.string()), ("ids", pa.list_(value))]
        self.schema = pa.schema(columns + [(m, pa.list_(pa.uint8())) for m in self.annotations])
        self.partial = file.with_name(f"{file.name}.{os.getpid()}.tmp")
        self.text_bytes = 0
        self._span_counts = {name: 0 for name in self.annotations if name in COUNTED_ANNOTATIONS}
        self._names: list[str] = []
        self._columns: list[list[np.ndarray]] = [[] for _ in range(1 + len(self.annotations))]
        self._pending = 0
        self._document_tokens, self._document_sentences = array("q"), array("q")
        self._sentence_tokens, self._document_hashes = array("q"), array("Q")

    def __enter__(self) -> ShardWriter:
        self._handle = self.partial.open("wb")
        self._sink = HashingFile(self._handle)
        self._stream = pa.ipc.new_stream(self._sink, self.schema)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            with self._handle:
                if kind is None:
                    self._flush()
                    self._stream.close()
                    self._sink.close()
            if kind is None:
                self.partial.replace(self.file)
        finally:  # also where a full disk ends one of these, or closing after it
            self.partial.unlink(missing_ok=True)

    def append(
        self,
        name: str,
        ids: np.ndarray,
        annotations: Mapping[str, np.ndarray],
        *,
        text_bytes: int = 0,
    ) -> None:
        """Adds a document of at least one token; without the annotation `sentence` it counts as one
        sentence."""
        assert len(ids), f"document {name} is empty"
        values = [np.asarray(ids).astype(self.ids_type, copy=False)]
        values += [np.asarray(annotations[a], np.uint8) for a in self.annotations]
        assert all(len(v) == len(ids) for v in values), f"document {name}: one value per token"
        for column, value in zip(self._columns, values, strict=True):
            column.append(value)
        for spans in self._span_counts:
            self._span_counts[spans] += int(np.count_nonzero(np.asarray(annotations[spans]) == 1))
        starts = (
            np.flatnonzero(annotations["sentence"])
            if "sentence" in annotations
            else np.zeros(1, int)
        )
        assert len(starts) and starts[0] == 0, f"document {name} begins with a sentence"
        self._sentence_tokens.frombytes(np.diff(starts, append=len(ids)).astype("q").tobytes())
        self._document_sentences.append(len(starts))
        self._document_tokens.append(len(ids))
        self._document_hashes.frombytes(
            hashlib.blake2b(values[0].tobytes(), digest_size=8).digest()
        )
        self._names.append(name)
        self._pending += len(ids)
        self.text_bytes += text_bytes
        if self._pending >= BATCH_TOKENS:
            self._flush()

    def _flush(self) -> None:
        if not self._names:
            return
        lengths = self._document_tokens[-len(self._names) :]
        offsets = as_arrow(np.cumsum([0, *lengths], dtype=np.int32))
        columns: list[pa.Array] = [pa.array(self._names, pa.string())]
        for values in self._columns:
            columns.append(pa.ListArray.from_arrays(offsets, as_arrow(np.concatenate(values))))
            values.clear()
        self._stream.write_batch(pa.record_batch(columns, schema=self.schema))
        self._names, self._pending = [], 0

    def summary(self) -> ShardSummary:
        """The summary of the closed shard."""
        lengths = ShardLengths(
            document_tokens=np.array(self._document_tokens, np.int64),
            document_sentences=np.array(self._document_sentences, np.int64),
            sentence_tokens=np.array(self._sentence_tokens, np.int64),
            document_hashes=np.array(self._document_hashes, np.uint64),
        )
        return ShardSummary(
            shard=Shard(
                name=self.file.name,
                documents=len(lengths.document_tokens),
                sentences=len(lengths.sentence_tokens),
                tokens=int(lengths.document_tokens.sum()),
            ),
            text_bytes=self.text_bytes,
            span_counts=dict(self._span_counts),
            file=self._sink.entry(),
            lengths=lambda field: getattr(lengths, field),
        )


def shard_name(number: int, shards: int) -> str:
    """data-00003-of-00012.arrow"""
    return f"data-{number:05d}-of-{shards:05d}.arrow"


def write_index(folder: Path, parts: Sequence[ShardSummary]) -> None:
    """Writes index/*.npy from the shards' lengths, with one shard in memory at a time."""
    (folder / "index").mkdir(exist_ok=True)
    documents = sum(part.shard.documents for part in parts)
    sentences = sum(part.shard.sentences for part in parts)
    _write_starts(folder, "document_starts", documents, parts, "document_tokens")
    _write_starts(folder, "sentence_starts", sentences, parts, "sentence_tokens")
    _write_starts(folder, "first_sentence", documents, parts, "document_sentences")
    repeated = find_repeated(parts)
    if len(repeated):
        np.save(folder / "index" / REPEATED, repeated)


def _write_starts(
    folder: Path, name: str, entries: int, parts: Sequence[ShardSummary], of: str
) -> None:
    """Writes index/NAME.npy: the running totals of some lengths, from 0."""
    file = folder / "index" / f"{name}.npy"
    starts = np.lib.format.open_memmap(file, mode="w+", dtype=np.int64, shape=(entries + 1,))
    at = 0
    for part in parts:
        lengths = part.lengths(of)
        starts[at + 1 : at + 1 + len(lengths)] = starts[at] + np.cumsum(lengths)
        at += len(lengths)
    starts.flush()


def find_repeated(parts: Sequence[ShardSummary], most: int = 8 << 20) -> np.ndarray:
    """The numbers of the documents that have the same tokens as another one, ascending. Some `most`
    hashes are in memory at a time."""
    count = sum(part.shard.documents for part in parts)
    pieces = max(1, -(-count // most))
    repeated = [np.zeros(0, np.int64)]
    for piece in range(pieces):
        hashes, numbers = _hashes_between(
            parts, (piece << 64) // pieces, (piece + 1 << 64) // pieces
        )
        order = np.argsort(hashes, kind="stable")
        same = hashes[order][1:] == hashes[order][:-1]
        repeated.append(
            numbers[order][np.append(same, False) | np.append(False, same)[: len(order)]]
        )
    return np.sort(np.concatenate(repeated))


def _hashes_between(
    parts: Sequence[ShardSummary], low: int, high: int
) -> tuple[np.ndarray, np.ndarray]:
    """(hashes, document numbers) of the documents whose hashes are in low .. high - 1."""
    hashes, numbers, at = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)], 0
    for part in parts:
        stored = part.lengths("document_hashes")
        inside = np.flatnonzero((stored >= np.uint64(low)) & (stored <= np.uint64(high - 1)))
        hashes.append(stored[inside])
        numbers.append(at + inside)
        at += len(stored)
    return np.concatenate(hashes), np.concatenate(numbers)


def write_dataset_files(folder: Path, shards: Sequence[Shard], fingerprint: str) -> None:
    """Writes dataset_info.json and state.json for `datasets.load_from_disk`. The features come from
    the shards' own schema, so that an annotation can be added by replacing state.json."""
    info = {"citation": "", "description": "", "features": None, "homepage": "", "license": ""}
    state = {
        "_data_files": [{"filename": shard.name} for shard in shards],
        "_fingerprint": fingerprint[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    write_json(folder / "dataset_info.json", info)
    write_json(folder / "state.json", state)


def content_fingerprint(summaries: Iterable[Mapping[str, Any]]) -> str:
    """A hash over the shards' hashes."""
    text = "\n".join(str(summary["sha256"]) for summary in summaries)
    return hash_of_text(text)


def save_lengths(file: Path, lengths: Callable[[str], np.ndarray]) -> None:
    """Writes the lengths of a summary to an .npz file."""
    buffer = io.BytesIO()
    arrays: dict[str, Any] = {f.name: lengths(f.name) for f in fields(ShardLengths)}
    np.savez(buffer, **arrays)
    write_file_atomically(file, buffer.getvalue())


def load_lengths(file: Path, field: str) -> np.ndarray:
    """Reads one field of what `save_lengths` wrote."""
    with np.load(file) as arrays:
        return arrays[field]


def write_corpus(
    folder: str | Path,
    documents: Iterable[tuple[str, np.ndarray, Mapping[str, np.ndarray]]],
    tokenizer: Tokenizer,
    *,
    annotations: Sequence[str] = ("sentence", "word", "phrase", "entity"),
) -> None:
    """Writes a corpus of one shard from (name, ids, annotations) triples, for tests and for
    programs that make ids themselves. To prepare text, use `palm_ds.corpus.prepare.prepare`."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    ids_type = smallest_unsigned(tokenizer.size)
    writer = ShardWriter(folder / shard_name(0, 1), annotations=annotations, ids_type=ids_type)
    with writer:
        for name, ids, values in documents:
            writer.append(name, ids, values)
    finish_corpus(folder, tokenizer, [writer.summary()], annotations=annotations, ids_type=ids_type)


def finish_corpus(
    folder: Path,
    tokenizer: Tokenizer,
    parts: Sequence[ShardSummary],
    *,
    annotations: Sequence[str],
    ids_type: str,
    rejected: int = 0,
    dropped: Mapping[str, int] | None = None,
    options: Mapping[str, Any] | None = None,
    inputs: Sequence[Mapping[str, Any]] = (),
) -> Manifest:
    """Writes the index, tokenizer and manifest of a folder whose shards are complete.

    state.json is not in the manifest's list of files, since adding an annotation replaces it before
    the manifest.
    """
    shards = [part.shard for part in parts]
    write_index(folder, parts)
    if not (folder / "tokenizer").is_dir():
        tokenizer.save(folder / "tokenizer")
    write_dataset_files(folder, shards, content_fingerprint(part.file for part in parts))
    files = {part.shard.name: dict(part.file) for part in parts}
    lists = ("rejected.jsonl", "dropped.jsonl", "collocations.tsv")
    others = [folder / name for name in ("dataset_info.json", *lists)]
    others += [*folder.glob("index/*"), *folder.glob("tokenizer/*")]
    for file in sorted(filter(Path.is_file, others)):
        files[file.relative_to(folder).as_posix()] = describe_file(file)
    manifest = Manifest(
        documents=sum(shard.documents for shard in shards),
        sentences=sum(shard.sentences for shard in shards),
        tokens=sum(shard.tokens for shard in shards),
        text_bytes=sum(part.text_bytes for part in parts),
        ids_type=ids_type,
        annotations=tuple(annotations),
        span_counts={
            name: sum(part.span_counts[name] for part in parts)
            for name in COUNTED_ANNOTATIONS
            if all(name in part.span_counts for part in parts)
        },
        tokenizer={
            "fingerprint": tokenizer.fingerprint,
            "kind": tokenizer.kind,
            "size": tokenizer.size,
        },
        shards=tuple(shards),
        files=files,
        rejected=rejected,
        dropped=dropped or {},
        options=options or {},
        inputs=tuple(inputs),
    )
    write_manifest(folder, manifest)
    return manifest
