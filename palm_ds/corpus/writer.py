"""Writes a corpus: documents to Arrow shards, shards to a folder that opens.

    with ShardWriter(file, marks=("sentence", "word"), ids_type="uint16") as shard:
        shard.append("doc 1", ids, {"sentence": ..., "word": ...})
    finish(folder, tokenizer, [shard.summary(), ...])

A shard is an Arrow stream of record batches, which `datasets.load_from_disk` opens as well as
`palm_ds.corpus.store` does. A document never crosses a record batch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from palm_ds.common.atomic import write_file_atomically
from palm_ds.common.json_files import write_json
from palm_ds.corpus.manifest import (
    UNITS,
    Manifest,
    Shard,
    describe_file,
    write_manifest,
)

if TYPE_CHECKING:
    from palm_ds.text.tokenizer import Tokenizer

BATCH_TOKENS = 1 << 19  # a record batch is closed once it holds this many


def smallest_unsigned(size: int) -> str:
    """The smallest type that holds the ids 0 .. size - 1."""
    return next(t for t in ("uint8", "uint16", "uint32") if size - 1 <= np.iinfo(t).max)


@dataclass(frozen=True, kw_only=True)
class ShardSummary:
    """What is known of a written shard; the arrays become the corpus's index."""

    shard: Shard
    text_bytes: int
    units: Mapping[str, int]  # how many of each annotation in UNITS
    file: Mapping[str, Any]  # bytes, sha256
    document_tokens: np.ndarray  # (documents,) int64
    document_sentences: np.ndarray  # (documents,) int64
    sentence_tokens: np.ndarray  # (sentences,) int64


def as_arrow(values: np.ndarray) -> pa.Array:
    """The same memory as an Arrow array (`pa.array` would import pandas for it)."""
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


class HashingFile:
    """A file for pyarrow that knows its own sha256 and size."""

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
        """Has the bytes on the disk; the handle stays its owner's."""
        if not self.closed:
            self.handle.flush()
            os.fsync(self.handle.fileno())
        self.closed = True

    def entry(self) -> dict[str, Any]:
        """The manifest's entry for the file."""
        return {"bytes": self.bytes, "sha256": self.sha256.hexdigest()}


class ShardWriter:
    """One Arrow file, written beside its place and moved there when complete."""

    def __init__(self, file: Path, *, marks: Sequence[str], ids_type: str) -> None:
        self.file, self.marks = file, tuple(marks)
        self.ids_type = np.dtype(ids_type)
        value = pa.from_numpy_dtype(self.ids_type)
        columns = [("id", pa.string()), ("ids", pa.list_(value))]
        self.schema = pa.schema(columns + [(m, pa.list_(pa.uint8())) for m in self.marks])
        self.partial = file.with_name(f"{file.name}.{os.getpid()}.tmp")
        self.text_bytes = 0
        self._units = {name: 0 for name in self.marks if name in UNITS}
        self._names: list[str] = []
        self._columns: list[list[np.ndarray]] = [[] for _ in range(1 + len(self.marks))]
        self._pending = 0
        self._document_tokens: list[int] = []
        self._document_sentences: list[int] = []
        self._sentence_tokens: list[np.ndarray] = []

    def __enter__(self) -> ShardWriter:
        self._handle = self.partial.open("wb")
        self._sink = HashingFile(self._handle)
        self._stream = pa.ipc.new_stream(self._sink, self.schema)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._handle.close()
            self.partial.unlink(missing_ok=True)
            return
        self._flush()
        self._stream.close()
        self._sink.close()
        self._handle.close()
        self.partial.replace(self.file)

    def append(
        self, name: str, ids: np.ndarray, marks: Mapping[str, np.ndarray], *, text_bytes: int = 0
    ) -> None:
        """One document. It has at least one token; without a mark `sentence` it is one sentence."""
        assert len(ids), f"document {name} is empty"
        values = [np.asarray(ids).astype(self.ids_type, copy=False)]
        values += [np.asarray(marks[mark], np.uint8) for mark in self.marks]
        assert all(len(v) == len(ids) for v in values), f"document {name}: a mark a token"
        for column, value in zip(self._columns, values, strict=True):
            column.append(value)
        for unit in self._units:
            self._units[unit] += int(np.count_nonzero(np.asarray(marks[unit]) == 1))
        starts = np.flatnonzero(marks["sentence"]) if "sentence" in marks else np.zeros(1, int)
        assert len(starts) and starts[0] == 0, f"document {name} begins with a sentence"
        self._sentence_tokens.append(np.diff(starts, append=len(ids)))
        self._document_sentences.append(len(starts))
        self._document_tokens.append(len(ids))
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
        """Of the shard once it is closed."""
        document_tokens = np.array(self._document_tokens, np.int64)
        sentences = [np.zeros(0, np.int64), *self._sentence_tokens]
        sentence_tokens = np.concatenate(sentences).astype(np.int64)
        return ShardSummary(
            shard=Shard(
                name=self.file.name,
                documents=len(document_tokens),
                sentences=len(sentence_tokens),
                tokens=int(document_tokens.sum()),
            ),
            text_bytes=self.text_bytes,
            units=dict(self._units),
            file=self._sink.entry(),
            document_tokens=document_tokens,
            document_sentences=np.array(self._document_sentences, np.int64),
            sentence_tokens=sentence_tokens,
        )


def shard_name(number: int, shards: int) -> str:
    """data-00003-of-00012.arrow"""
    return f"data-{number:05d}-of-{shards:05d}.arrow"


def write_index(folder: Path, shards: Sequence[Shard], parts: Iterable[ShardSummary]) -> None:
    """index/*.npy from the shards' lengths, one shard in memory at a time."""
    (folder / "index").mkdir(exist_ok=True)
    documents, sentences = (
        sum(getattr(shard, name) for shard in shards) for name in ("documents", "sentences")
    )
    entries = {
        "document_starts": documents + 1,
        "sentence_starts": sentences + 1,
        "first_sentence": documents + 1,
    }
    arrays = {
        name: np.lib.format.open_memmap(
            folder / "index" / f"{name}.npy", mode="w+", dtype=np.int64, shape=(size,)
        )
        for name, size in entries.items()
    }
    filled = dict.fromkeys(arrays, 0)
    for part in parts:
        for name, lengths in (
            ("document_starts", part.document_tokens),
            ("sentence_starts", part.sentence_tokens),
            ("first_sentence", part.document_sentences),
        ):
            at, array = filled[name], arrays[name]
            array[at + 1 : at + 1 + len(lengths)] = array[at] + np.cumsum(lengths)
            filled[name] += len(lengths)
    for array in arrays.values():
        array.flush()


def write_dataset_files(folder: Path, shards: Sequence[Shard], fingerprint: str) -> None:
    """dataset_info.json and state.json, which `datasets.load_from_disk` reads. The features are
    left to the shards' own schema, so that a column can be added by replacing one file."""
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
    """A hash of the shards' hashes."""
    text = "\n".join(str(summary["sha256"]) for summary in summaries)
    return hashlib.sha256(text.encode()).hexdigest()


def save_arrays(file: Path, summary: ShardSummary) -> None:
    """The arrays of a summary, as one .npz."""
    import io

    buffer = io.BytesIO()
    np.savez(
        buffer,
        document_tokens=summary.document_tokens,
        document_sentences=summary.document_sentences,
        sentence_tokens=summary.sentence_tokens,
    )
    write_file_atomically(file, buffer.getvalue())


def write_corpus(
    folder: str | Path,
    documents: Iterable[tuple[str, np.ndarray, Mapping[str, np.ndarray]]],
    tokenizer: Tokenizer,
    *,
    marks: Sequence[str] = ("sentence", "word", "phrase", "entity"),
) -> None:
    """A corpus of one shard from (id, ids, marks) triples: for tests and for programs that have
    their own way of making ids. Everything else is `palm_ds.corpus.prepare.prepare`."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    ids_type = smallest_unsigned(tokenizer.size)
    writer = ShardWriter(folder / shard_name(0, 1), marks=marks, ids_type=ids_type)
    with writer:
        for name, ids, values in documents:
            writer.append(name, ids, values)
    finish(folder, tokenizer, [writer.summary()], marks=marks, ids_type=ids_type)


def finish(
    folder: Path,
    tokenizer: Tokenizer,
    parts: Sequence[ShardSummary],
    *,
    marks: Sequence[str],
    ids_type: str,
    **about: Any,
) -> Manifest:
    """Index, tokenizer and manifest of a folder whose shards are written. `about`: the further
    fields of the manifest (options, inputs, rejected). state.json is not among the manifest's
    files, since it is replaced before the manifest when a mark is added."""
    shards = [part.shard for part in parts]
    write_index(folder, shards, parts)
    if not (folder / "tokenizer").is_dir():
        tokenizer.save(folder / "tokenizer")
    write_dataset_files(folder, shards, content_fingerprint(part.file for part in parts))
    files = {part.shard.name: dict(part.file) for part in parts}
    others = [folder / name for name in ("dataset_info.json", "rejected.jsonl", "collocations.tsv")]
    others += [*folder.glob("index/*"), *folder.glob("tokenizer/*")]
    for file in sorted(filter(Path.is_file, others)):
        files[file.relative_to(folder).as_posix()] = describe_file(file)
    manifest = Manifest(
        documents=sum(shard.documents for shard in shards),
        sentences=sum(shard.sentences for shard in shards),
        tokens=sum(shard.tokens for shard in shards),
        text_bytes=sum(part.text_bytes for part in parts),
        ids_type=ids_type,
        marks=tuple(marks),
        units={
            name: sum(part.units[name] for part in parts)
            for name in UNITS
            if all(name in part.units for part in parts)
        },
        tokenizer={
            "fingerprint": tokenizer.fingerprint,
            "kind": tokenizer.kind,
            "size": tokenizer.size,
        },
        shards=tuple(shards),
        files=files,
        **about,
    )
    write_manifest(folder, manifest)
    return manifest
