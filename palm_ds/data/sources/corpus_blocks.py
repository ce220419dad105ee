"""Blocks of neighboring documents: what large corpora are shuffled by.

    corpus   shard 0 | shard 1 | ...
    segment  up to 1,024 blocks of one shard, read in an epoch at about the same time
    block    the documents that start in some 64k tokens of a shard
    window   128 random blocks of the current segments, shuffled item by item

Blocks have no table: their places follow from the shards' sizes, and their documents from the
corpus's memory-mapped index. Memory and time do not depend on the size of the corpus.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.common.rng import derive_key, permutation_at
from palm_ds.corpus.store import Corpus

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """Sizes of a corpus's blocks and windows. The defaults keep a window's items of nine tasks
    below 100 MB."""

    block_tokens: int = 1 << 16
    window_blocks: int = 128
    window_documents: int = 32
    """A window has about this many documents or more, however long they are: some tasks draw texts
    from other documents of the window."""
    segment_blocks: int = 1024
    group_segments: int = 16
    """Segments that are mixed with each other; the next ones begin when all are read."""

    def of_share(self, share: float) -> BlockSizes:
        """The sizes for a part of the documents: its blocks have as many tokens of that part."""
        return replace(
            self,
            block_tokens=round(self.block_tokens / share),
            window_documents=round(self.window_documents / share),
        )


@dataclass(frozen=True)
class CorpusBlocks:
    """The blocks of a corpus, numbered in corpus order."""

    corpus: Corpus
    sizes: BlockSizes

    def __len__(self) -> int:
        """The number of blocks."""
        return int(self._first_blocks[-1])

    @cached_property
    def _first_tokens(self) -> np.ndarray:
        """(shards + 1,) the first token of each shard."""
        return np.cumsum([0, *(shard.tokens for shard in self.corpus.manifest.shards)])

    @cached_property
    def _first_blocks(self) -> np.ndarray:
        """(shards + 1,) the first block of each shard."""
        blocks = -(-np.diff(self._first_tokens) // self.sizes.block_tokens)
        return np.cumsum([0, *blocks])

    @cached_property
    def segments(self) -> np.ndarray:
        """(segments + 1,) the first block of each segment. A shard's segments have equal sizes."""
        blocks = np.diff(self._first_blocks)
        parts = -(-blocks // self.sizes.segment_blocks)
        number = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
        within = number * np.repeat(blocks, parts) // np.repeat(parts, parts)
        return np.append(np.repeat(self._first_blocks[:-1], parts) + within, len(self))

    def shards_of(self, segments: np.ndarray) -> np.ndarray:
        """The shard of each segment."""
        return np.searchsorted(self._first_blocks, self.segments[segments], side="right") - 1

    def first_tokens(self, blocks: np.ndarray) -> np.ndarray:
        """The first token of each block; `len(self)` gives the number of tokens."""
        shard = np.searchsorted(self._first_blocks, blocks, side="right") - 1
        within = (blocks - self._first_blocks[shard]) * self.sizes.block_tokens
        return self._first_tokens[shard] + within

    def of_tokens(self, tokens: np.ndarray) -> np.ndarray:
        """The block of each token. A document belongs to the block of its first token."""
        shard = np.searchsorted(self._first_tokens, tokens, side="right") - 1
        within = (tokens - self._first_tokens[shard]) // self.sizes.block_tokens
        return self._first_blocks[shard] + within

    def count_documents(self, ranges: np.ndarray) -> int:
        """The documents that start in some (n, 2) ranges [first, last) of blocks."""
        return int(np.diff(self.document_ranges(ranges)).sum())

    def document_ranges(self, ranges: np.ndarray) -> np.ndarray:
        """(n, 2) the documents [first, last) that start in (n, 2) ranges of blocks."""
        return np.searchsorted(self.corpus.document_starts[:-1], self.first_tokens(ranges))

    def documents(self, blocks: np.ndarray) -> np.ndarray:
        """The numbers of all documents of some ascending blocks, ascending."""
        first, last = self.document_ranges(np.column_stack([blocks, blocks + 1])).T
        count = last - first
        number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        return number + np.repeat(first, count)


@dataclass(frozen=True)
class BlockOrder:
    """The order of all blocks in an epoch: groups of segments, and windows of blocks in each.

    The order of the shards depends on the epoch alone, that of the blocks in a group on the key:
    all tasks of a run read from the same few shards at a time."""

    blocks: CorpusBlocks
    epoch: int
    key: int

    @cached_property
    def _segments(self) -> np.ndarray:
        """(segments,) all segments, those of a shard one after another, the shards in random
        order."""
        segments = np.arange(len(self.blocks.segments) - 1)
        shards = self.blocks.shards_of(segments)
        count = len(self.blocks.corpus.manifest.shards)
        place = permutation_at(derive_key("shards", self.epoch), count, np.arange(count))
        return segments[np.argsort(place[shards], kind="stable")]

    @cached_property
    def _groups(self) -> np.ndarray:
        """(groups + 1,) the place of each group's first segment in `_segments`."""
        segments = len(self._segments)
        return _even_cuts(segments, segments // self.blocks.sizes.group_segments)

    @property
    def groups(self) -> int:
        """The number of groups."""
        return len(self._groups) - 1

    def group_segments(self, group: int) -> np.ndarray:
        """The segments of a group, ascending."""
        return np.sort(self._segments[self._groups[group] : self._groups[group + 1]])

    def prefetch(self, group: int) -> None:
        """Fetches the shards of a group, then those of the next one, if the corpus is remote."""
        groups = range(group, min(group + 2, self.groups))
        shards = [self.blocks.shards_of(self.group_segments(each)) for each in groups]
        try:
            self.blocks.corpus.prefetch(dict.fromkeys(np.concatenate(shards).tolist()))
        except UserError as error:  # the read of that shard tries again
            log.info("%s", error)

    def windows(self, group: int) -> list[np.ndarray]:
        """The blocks of each window of a group, ascending."""
        segments = self.group_segments(group)
        first, last = self.blocks.segments[segments], self.blocks.segments[segments + 1]
        ranges = [np.arange(a, b) for a, b in zip(first.tolist(), last.tolist(), strict=True)]
        blocks = np.concatenate(ranges)
        key = derive_key(self.key, "blocks", group)
        shuffled = blocks[permutation_at(key, len(blocks), np.arange(len(blocks)))]
        cuts = _even_cuts(len(blocks), self._window_count(segments, len(blocks)))
        return [np.sort(shuffled[a:b]) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]

    def _window_count(self, segments: np.ndarray, blocks: int) -> int:
        sizes, bounds = self.blocks.sizes, self.blocks.segments
        ranges = np.column_stack([bounds[segments], bounds[segments + 1]])
        documents = self.blocks.count_documents(ranges)
        return min(blocks // sizes.window_blocks, documents // sizes.window_documents)


def _even_cuts(count: int, parts: int) -> np.ndarray:
    """The bounds of `parts` (at least one) parts of range(count) whose sizes differ by at most
    one."""
    parts = max(1, parts)
    return np.arange(parts + 1) * count // parts
