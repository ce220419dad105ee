"""A finished corpus, memory-mapped and read by token offsets.

    corpus = open_corpus("data/wiki")
    corpus.sentence_starts[:3]                       # where sentences begin, over the whole corpus
    corpus.read(start, end, marks=["word"]).ids      # a view of the file, not a copy

Nothing is loaded: a shard is mapped when it is first read, and every process that reads the corpus
shares one copy in the machine's page cache. A corpus pickles as its path.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from palm_ds.common.errors import UserError, suggest
from palm_ds.corpus.manifest import Manifest, check_files, read_manifest
from palm_ds.text.tokenizer import Tokenizer, load_tokenizer
from palm_ds.text.tokens import SpecialTokens, TokenSpan


@dataclass(frozen=True)
class _Block:
    """A record batch: its tokens end to end, and the ids and starts of its documents."""

    start: int  # global offset of its first token
    columns: dict[str, np.ndarray]
    names: pa.Array


def open_corpus(path: str | Path, verify: bool = False) -> Corpus:
    """The corpus in this folder; `verify` reads every file and compares its hash."""
    path = Path(path)
    manifest = read_manifest(path)
    check_files(path, manifest, hashes=verify)
    return Corpus(path, manifest)


class Corpus:
    """Documents as token ids with marks beside them; made by `open_corpus`."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest, self.marks = path, manifest, manifest.marks
        self.document_starts = self._index("document_starts", manifest.documents)
        self.sentence_starts = self._index("sentence_starts", manifest.sentences)
        self.first_sentence = self._index("first_sentence", manifest.documents)
        counts = [shard.tokens for shard in manifest.shards]
        self._units = dict(manifest.units)
        self._shard_starts: list[int] = np.cumsum([0, *counts]).tolist()
        self._shards: dict[int, tuple[list[int], list[_Block]]] = {}

    def __reduce__(self) -> tuple:
        return _reopen, (self.path,)

    def __len__(self) -> int:
        return self.manifest.documents

    def __repr__(self) -> str:
        return f"Corpus({str(self.path)!r}, documents={len(self)}, tokens={self.manifest.tokens})"

    def _index(self, name: str, entries: int) -> np.ndarray:
        file = self.path / "index" / f"{name}.npy"
        try:
            array = np.load(file, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise UserError(f"corpus {self.path}: index/{name}.npy: {error}") from None
        if array.shape != (entries + 1,) or array.dtype != np.int64:
            raise UserError(
                f"corpus {self.path}: index/{name}.npy holds {array.dtype} {array.shape}, where "
                f"int64 ({entries + 1},) is due; prepare the corpus again"
            )
        return array

    def tokenizer(self) -> Tokenizer:
        """The tokenizer the corpus was made with."""
        tokenizer = load_tokenizer(self.path / "tokenizer")
        stated = self.manifest.tokenizer["fingerprint"]
        if tokenizer.fingerprint != stated:
            raise UserError(
                f"corpus {self.path}: tokenizer/ is not the tokenizer the corpus was made with "
                f"(fingerprint {tokenizer.fingerprint[:12]}, manifest {stated[:12]})"
            )
        return tokenizer

    @cached_property
    def vocabulary(self) -> SpecialTokens:
        """The ids that tasks need to know."""
        return self.tokenizer().vocabulary

    def count_units(self, annotation: str) -> int:
        """How many words, phrases or entities there are. The manifest says; if it was written by
        an older version, the column is counted once."""
        if annotation not in self._units:
            columns = (block.columns[annotation] for block in self._blocks())
            self._units[annotation] = sum(int(np.count_nonzero(x == 1)) for x in columns)
        return self._units[annotation]

    def read(self, start: int, end: int, marks: Sequence[str] | None = None) -> TokenSpan:
        """The tokens start .. end of the corpus, which lie inside one document. Views, not copies:
        ids in the corpus's own unsigned type, marks uint8; `marks=None` reads all of them."""
        block = self._block(start)
        inside = slice(start - block.start, end - block.start)
        ids = block.columns["ids"][inside]
        assert len(ids) == end - start, f"tokens {start} .. {end} are not in one document"
        wanted = self.marks if marks is None else marks
        try:
            return TokenSpan(start, ids, {name: block.columns[name][inside] for name in wanted})
        except KeyError as error:
            raise self._no_mark(error.args[0]) from None

    def take(self, positions: np.ndarray, column: str = "ids") -> np.ndarray:
        """The values of a column at tokens of the corpus, in any order and from anywhere: ids in
        the corpus's own unsigned type, marks uint8, in the shape of `positions`. A copy. The work
        is one look-up for each record batch that is touched, not for each position."""
        if column != "ids" and column not in self.marks:
            raise self._no_mark(column)
        wanted = np.asarray(positions, np.int64).ravel()
        order = np.argsort(wanted, kind="stable")
        rising = wanted[order]
        values = np.empty(len(wanted), self.manifest.ids_type if column == "ids" else np.uint8)
        done = 0
        while done < len(rising):
            block = self._block(int(rising[done]))
            source = block.columns[column]
            end = int(np.searchsorted(rising, block.start + len(source)))
            values[order[done:end]] = source[rising[done:end] - block.start]
            done = end
        return values.reshape(np.shape(positions))

    def _no_mark(self, name: str) -> UserError:
        return UserError(
            f"corpus {self.path} has no mark {name!r}{suggest(name, self.marks)} "
            "(`palm-ds corpus annotate` adds one)"
        )

    def document(self, number: int, marks: Sequence[str] | None = None) -> tuple[str, TokenSpan]:
        """The id of a document and all of its tokens."""
        start, end = map(int, self.document_starts[number : number + 2])
        block = self._block(start)
        first = int(np.searchsorted(self.document_starts, block.start))
        return block.names[number - first].as_py(), self.read(start, end, marks)

    def _block(self, token: int) -> _Block:
        shard = bisect_right(self._shard_starts, token) - 1
        if not 0 <= token < self._shard_starts[-1]:
            raise IndexError(f"token {token} of {self._shard_starts[-1]}")
        starts, blocks = self._shard(shard)
        return blocks[bisect_right(starts, token) - 1]

    def _blocks(self) -> Iterator[_Block]:
        for number in range(len(self.manifest.shards)):
            yield from self._shard(number)[1]

    def _shard(self, number: int) -> tuple[list[int], list[_Block]]:
        if number not in self._shards:
            self._shards[number] = self._map(number)
        return self._shards[number]

    def _map(self, number: int) -> tuple[list[int], list[_Block]]:
        """Maps a shard: no bytes are read but the headers of its record batches."""
        file = self.path / self.manifest.shards[number].name
        blocks, at = [], self._shard_starts[number]
        try:
            with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
                for batch in stream:
                    blocks.append(_block_of(batch, at))
                    at += len(blocks[-1].columns["ids"])
        except (OSError, pa.ArrowInvalid) as error:
            raise UserError(f"corpus {self.path}: {file.name} is damaged: {error}") from None
        if at != self._shard_starts[number + 1]:
            raise UserError(
                f"corpus {self.path}: {file.name} holds {at - self._shard_starts[number]} tokens "
                f"where the manifest says {self.manifest.shards[number].tokens}"
            )
        return [block.start for block in blocks], blocks


def _in_place(numbers: pa.Array) -> np.ndarray:
    """The same memory as a numpy array (`to_numpy` would import pandas for it)."""
    values = np.frombuffer(numbers.buffers()[1], numbers.type.to_pandas_dtype())
    return values[numbers.offset : numbers.offset + len(numbers)]


def _block_of(batch: pa.RecordBatch, start: int) -> _Block:
    columns = {
        name: _in_place(batch.column(name).flatten()) for name in batch.schema.names if name != "id"
    }
    return _Block(start, columns, batch.column("id"))


def _reopen(path: Path) -> Corpus:
    return Corpus(path, read_manifest(path))
