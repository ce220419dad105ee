"""Reads a finished corpus by token offsets, memory-mapped.

    corpus = open_corpus("data/wiki")                    # or "s3://bucket/wiki"
    corpus.sentence_starts[:3]                           # token offsets over the whole corpus
    corpus.read(start, end, annotations=["word"]).ids    # a view of the file, not a copy

Nothing is loaded: a shard is mapped when it is read, and all processes that read the corpus share
one copy in the page cache. The shards used last stay mapped, so memory does not grow with the
corpus. Those of a corpus behind a URL are fetched when they are read, and kept in a cache
(palm_ds.corpus.corpus_folder). A corpus is pickled as its path.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from palm_ds.common.errors import UserError, suggest
from palm_ds.common.file_cache import HeldFile
from palm_ds.common.lru_cache import RecentlyUsed
from palm_ds.corpus.corpus_folder import CorpusFolder, open_folder
from palm_ds.corpus.writer import REPEATED
from palm_ds.text.tokenizer import Tokenizer, load_tokenizer
from palm_ds.text.tokens import SpecialTokens, TokenSpan

_BLOCKS = 64  # decoded record batches kept per shard, some kilobytes each: views of the file


@dataclass(frozen=True)
class RecordBlock:
    """A record batch: its tokens end to end, and the names of its documents."""

    start: int  # offset of its first token in the shard
    columns: dict[str, np.ndarray]
    names: pa.Array

    def __len__(self) -> int:
        return len(self.columns["ids"])


class MappedShard:
    """The record batches of a shard, whose file is mapped, found by token.

    Only the headers of the record batches are read to find their places (a few bytes are kept for
    each). Of the batches themselves, the few used last are kept as Python objects.
    """

    def __init__(self, file: Path) -> None:
        with pa.memory_map(str(file)) as source:
            self._data = source.read_buffer()
        stream = pa.BufferReader(self._data)
        self._schema = pa.ipc.read_schema(stream)
        starts, places = [0], []
        while (size := self._tokens(stream, places)) is not None:
            starts.append(starts[-1] + size)
        self._starts = np.array(starts, np.int64)  # (batches + 1,) tokens
        self._places = np.array(places, np.int64)  # (batches,) bytes
        self._blocks: RecentlyUsed[int, RecordBlock] = RecentlyUsed(_BLOCKS)

    @property
    def tokens(self) -> int:
        return int(self._starts[-1])

    def __len__(self) -> int:
        """The number of record batches."""
        return len(self._places)

    def block(self, token: int) -> RecordBlock:
        """The record batch with a token of the shard."""
        return self.numbered(int(np.searchsorted(self._starts, token, side="right")) - 1)

    def numbered(self, number: int) -> RecordBlock:
        """A record batch by its number."""
        return self._blocks.get(number, lambda: self._decode(number))

    def _tokens(self, stream: pa.BufferReader, places: list[int]) -> int | None:
        """The tokens of the next record batch, whose place is appended; None at the end."""
        place = stream.tell()
        try:
            message = pa.ipc.read_message(stream)
        except EOFError:
            return None
        places.append(place)
        return len(pa.ipc.read_record_batch(message, self._schema).column("ids").values)

    def _decode(self, number: int) -> RecordBlock:
        stream = pa.BufferReader(self._data.slice(int(self._places[number])))
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(stream), self._schema)
        columns = {
            name: _in_place(batch.column(name).flatten())
            for name in batch.schema.names
            if name != "id"
        }
        return RecordBlock(int(self._starts[number]), columns, batch.column("id"))


def _in_place(numbers: pa.Array) -> np.ndarray:
    """The same memory as a numpy array (`to_numpy` would import pandas for it)."""
    values = np.frombuffer(numbers.buffers()[1], numbers.type.to_pandas_dtype())
    return values[numbers.offset : numbers.offset + len(numbers)]


_MAX_SHARDS = 160
"""Shards that stay mapped: those of a group, those read ahead, and some."""


def open_corpus(path: str | Path, verify: bool = False) -> Corpus:
    """Opens the corpus in this folder or at this URL; `verify` reads every file and compares its
    hash."""
    folder = open_folder(path)
    if verify:
        folder.verify()
    return Corpus(folder)


class Corpus:
    """Documents as token ids and annotations; see `open_corpus`."""

    def __init__(self, folder: CorpusFolder) -> None:
        manifest = folder.manifest
        self.folder, self.path, self.manifest = folder, folder.path, manifest
        self.annotations = manifest.annotations
        self._held: list[HeldFile] = []
        self.document_starts = self._index("document_starts", manifest.documents)
        self.sentence_starts = self._index("sentence_starts", manifest.sentences)
        self.first_sentence = self._index("first_sentence", manifest.documents)
        counts = [shard.tokens for shard in manifest.shards]
        self._span_counts = dict(manifest.span_counts)
        self._shard_starts: list[int] = np.cumsum([0, *counts]).tolist()
        self._shards: RecentlyUsed[int, tuple[HeldFile, MappedShard]] = RecentlyUsed(_MAX_SHARDS)

    def __reduce__(self) -> tuple:
        return _reopen, (self.path,)

    def __len__(self) -> int:
        return self.manifest.documents

    def __repr__(self) -> str:
        return f"Corpus({str(self.path)!r}, documents={len(self)}, tokens={self.manifest.tokens})"

    def _index(self, name: str, entries: int) -> np.ndarray:
        held = self.folder.hold(f"index/{name}.npy")
        self._held.append(held)
        try:
            array = np.load(held.path, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise UserError(f"corpus {self.path}: index/{name}.npy: {error}") from None
        if array.shape != (entries + 1,) or array.dtype != np.int64:
            raise UserError(
                f"corpus {self.path}: index/{name}.npy has {array.dtype} {array.shape}, expected "
                f"int64 ({entries + 1},); prepare the corpus again"
            )
        return array

    @cached_property
    def repeated(self) -> np.ndarray:
        """The numbers of the documents with the same tokens as another one, ascending."""
        name = f"index/{REPEATED}"
        if name not in self.manifest.files:
            return np.zeros(0, np.int64)
        self._held.append(self.folder.hold(name))
        return np.load(self._held[-1].path, mmap_mode="r")

    def tokenizer(self) -> Tokenizer:
        """The tokenizer the corpus was prepared with."""
        tokenizer = load_tokenizer(self.folder.tokenizer())
        stated = self.manifest.tokenizer["fingerprint"]
        if tokenizer.fingerprint != stated:
            raise UserError(
                f"corpus {self.path}: tokenizer/ is not the tokenizer the corpus was prepared with "
                f"(fingerprint {tokenizer.fingerprint[:12]}, manifest {stated[:12]})"
            )
        return tokenizer

    @cached_property
    def vocabulary(self) -> SpecialTokens:
        """The special token ids that tasks need."""
        return self.tokenizer().vocabulary

    def count_spans(self, annotation: str) -> int:
        """The number of words, phrases or entities: from the manifest or, if it was added
        later, counted once."""
        if annotation not in self._span_counts:
            columns = (block.columns[annotation] for block in self._blocks())
            self._span_counts[annotation] = sum(
                int(np.count_nonzero(column == 1)) for column in columns
            )
        return self._span_counts[annotation]

    def read(self, start: int, end: int, annotations: Sequence[str] | None = None) -> TokenSpan:
        """Reads the tokens start .. end of the corpus, which must be inside one document. Returns
        views, not copies: ids in the corpus's unsigned type, annotations as uint8;
        `annotations=None` reads all."""
        first, block = self._block(start)
        inside = slice(start - first, end - first)
        ids = block.columns["ids"][inside]
        assert len(ids) == end - start, f"tokens {start} .. {end} are not in one document"
        wanted = self.annotations if annotations is None else annotations
        try:
            return TokenSpan(start, ids, {name: block.columns[name][inside] for name in wanted})
        except KeyError as error:
            raise self._no_mark(error.args[0]) from None

    def take(self, positions: np.ndarray, annotation: str = "ids") -> np.ndarray:
        """Reads the ids (in the corpus's unsigned type) or an annotation (uint8) at token positions
        in any order. Returns a copy in the shape of `positions`. Takes one look-up per record batch
        involved, not per position."""
        if annotation != "ids" and annotation not in self.annotations:
            raise self._no_mark(annotation)
        wanted = np.asarray(positions, np.int64).ravel()
        order = np.argsort(wanted, kind="stable")
        rising = wanted[order]
        values = np.empty(len(wanted), self.manifest.ids_type if annotation == "ids" else np.uint8)
        done = 0
        while done < len(rising):
            start, block = self._block(int(rising[done]))
            source = block.columns[annotation]
            end = int(np.searchsorted(rising, start + len(source)))
            values[order[done:end]] = source[rising[done:end] - start]
            done = end
        return values.reshape(np.shape(positions))

    def _no_mark(self, name: str) -> UserError:
        return UserError(
            f"corpus {self.path}: has no annotation {name!r}{suggest(name, self.annotations)} "
            "(`palm-ds corpus annotate` adds one)"
        )

    def document(
        self, number: int, annotations: Sequence[str] | None = None
    ) -> tuple[str, TokenSpan]:
        """The name of a document and all of its tokens."""
        start, end = map(int, self.document_starts[number : number + 2])
        at, block = self._block(start)
        first = int(np.searchsorted(self.document_starts, at))
        return block.names[number - first].as_py(), self.read(start, end, annotations)

    def _block(self, token: int) -> tuple[int, RecordBlock]:
        """The record batch with a token of the corpus, and the offset of its first token."""
        number = bisect_right(self._shard_starts, token) - 1
        if not 0 <= token < self._shard_starts[-1]:
            raise IndexError(f"token {token} of {self._shard_starts[-1]}")
        before = self._shard_starts[number]
        block = self._shard(number).block(token - before)
        return before + block.start, block

    def _blocks(self) -> Iterator[RecordBlock]:
        for number in range(len(self.manifest.shards)):
            shard = self._shard(number)
            yield from map(shard.numbered, range(len(shard)))

    def prefetch(self, shards: Iterable[int]) -> None:
        """Fetches shards that will be read soon to this machine, the first ones first, as far as
        the cache has room for them; to be called in a thread. Of a local corpus there is nothing
        to fetch."""
        self.folder.prefetch([self.manifest.shards[number].name for number in shards])

    def _shard(self, number: int) -> MappedShard:
        return self._shards.get(number, lambda: self._map(number))[1]

    def _map(self, number: int) -> tuple[HeldFile, MappedShard]:
        stated = self.manifest.shards[number]
        held = self.folder.hold(stated.name, self._shards.drop_oldest)
        try:
            shard = MappedShard(held.path)
        except (OSError, pa.ArrowInvalid) as error:
            raise UserError(f"corpus {self.path}: {stated.name} is damaged: {error}") from None
        if shard.tokens != stated.tokens:
            raise UserError(
                f"corpus {self.path}: {stated.name} has {shard.tokens} tokens, but the manifest "
                f"says {stated.tokens}"
            )
        return held, shard


def _reopen(path: str | Path) -> Corpus:
    return Corpus(open_folder(path, check=False))
