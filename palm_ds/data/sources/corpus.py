"""A corpus source: the documents of one corpus to train on, or those held out.

    small corpus   one source with all its documents
    large corpus   a split, read window by window; every window is a source of its own

Positions are global token offsets in the corpus, so that an example records where each of its
tokens comes from and a task can look at the text around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.common.rng import derive_key, keyed_uniform, permutation_at
from palm_ds.corpus.annotations import how_to_add
from palm_ds.corpus.store import Corpus
from palm_ds.data.sources.corpus_blocks import BlockOrder, BlockSizes, CorpusBlocks
from palm_ds.data.sources.source import (
    CachesResults,
    held_out_draw,
    train_heldout_split,
    unigram_frequencies,
)
from palm_ds.text.tokens import SpecialTokens, TokenSpan

_SAMPLE_TOKENS = 2_000_000
_ADVICE = {
    True: "every file of text is one document, as it has no empty line; if each line is a text, "
    "prepare it again with `palm-ds prepare --text_documents line`",
    False: "prepare more documents, or give the source's `validation` and `held_out: 0`",
}
"""The cure for a corpus of too few documents: are its files undivided?"""


@dataclass(frozen=True)
class CorpusSource(CachesResults):
    """Some documents of a corpus, with the annotations that tasks read."""

    corpus: Corpus
    documents: np.ndarray  # (documents,) indices, ascending
    annotations: tuple[str, ...] = ()
    split: CorpusSplit | None = None
    """The split of a large corpus that this is a window of."""

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def reference(self) -> CorpusSource:
        """Source that statistics are taken from: itself, or the first window of its split."""
        return self.split.reference if self.split else self

    @cached_property
    def block_numbers(self) -> np.ndarray:
        """(documents,) the block that each document starts in; 0 if the corpus has no blocks."""
        if self.split is None:
            return np.zeros(len(self), np.int64)
        return self.split.blocks.of_tokens(self.starts)

    def document_of(self, tokens: np.ndarray) -> np.ndarray:
        """The place in `documents` of the document that each token is in."""
        return np.searchsorted(self.starts, tokens, side="right") - 1

    @property
    def name(self) -> str:
        return str(self.corpus.path)

    @property
    def vocabulary(self) -> SpecialTokens:
        return self.corpus.vocabulary

    def read(self, start: int, end: int) -> TokenSpan:
        """The tokens [start, end), all of one document."""
        return self.corpus.read(int(start), int(end), self.annotations)

    @cached_property
    def starts(self) -> np.ndarray:
        """(documents,) offset of the start of each document."""
        return np.asarray(self.corpus.document_starts)[self.documents]

    @cached_property
    def ends(self) -> np.ndarray:
        """(documents,) offset of the end of each document."""
        return np.asarray(self.corpus.document_starts)[self.documents + 1]

    @cached_property
    def first_sentences(self) -> np.ndarray:
        """(documents,) the number of each document's first sentence."""
        return np.asarray(self.corpus.first_sentence)[self.documents]

    @cached_property
    def last_sentences(self) -> np.ndarray:
        """(documents,) one past the number of each document's last sentence."""
        return np.asarray(self.corpus.first_sentence)[self.documents + 1]

    @cached_property
    def paragraphs(self) -> np.ndarray:
        """(paragraphs, 2) sentences [first, last) of every paragraph, in order. Without paragraph
        boundaries in the corpus, a document is one paragraph."""
        count = self.last_sentences - self.first_sentences
        inside = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        number = np.repeat(self.first_sentences, count) + inside
        if "sentence" in self.corpus.annotations:
            begins = self.corpus.take(self.corpus.sentence_starts[number], "sentence") == 2
        else:
            begins = np.zeros(len(number), bool)
        first = number[begins | (inside == 0)]
        document = np.searchsorted(self.first_sentences, first, side="right") - 1
        following = np.append(first[1:], self.last_sentences[-1:])
        return np.column_stack([first, np.minimum(following, self.last_sentences[document])])

    def sentence_end(self, first: np.ndarray, limit: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """The end (exclusive) of the whole sentences from `first` that fit in `tokens`: at least
        one sentence, never beyond sentence `limit`."""
        offsets = self.corpus.sentence_starts
        last = np.searchsorted(offsets, offsets[first] + tokens, side="right") - 1
        return np.clip(last, first + 1, limit)

    def sentence_begin(self, last: np.ndarray, limit: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """The first of the whole sentences before sentence `last` that fit in `tokens`: at least
        one sentence, never before sentence `limit`."""
        offsets = self.corpus.sentence_starts
        return np.clip(np.searchsorted(offsets, offsets[last] - tokens), limit, last - 1)

    def tokens_around(self, start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Number of tokens that the document of each span [start, end) has before and after it."""
        document = self.document_of(start)
        return start - self.starts[document], self.ends[document] - end

    @cached_property
    def unigrams(self) -> np.ndarray:
        """(vocabulary,) relative frequencies in up to two million tokens, one added to each count:
        the unigram baseline."""
        if self.reference is not self:
            return self.reference.unigrams
        return unigram_frequencies((piece.ids for piece in self.sample(())), self.vocabulary.size)

    def sample(self, annotations: Sequence[str]) -> Iterator[TokenSpan]:
        """Whole documents, some two million tokens, in a fixed random order."""
        seen, count = 0, len(self.documents)
        for document in permutation_at(derive_key("unigrams"), count, np.arange(count)):
            piece = self.corpus.read(
                int(self.starts[document]), int(self.ends[document]), annotations
            )
            yield piece
            seen += len(piece)
            if seen > _SAMPLE_TOKENS:
                return


@dataclass(frozen=True)
class CorpusSplit:
    """The training or the held-out documents of a corpus too large to be one source."""

    corpus: Corpus
    held_out: float
    """The share of the documents that is held out."""
    is_held_out: bool
    """Whether this is that share, or the rest."""
    annotations: tuple[str, ...]
    blocks: CorpusBlocks

    def window(self, blocks: np.ndarray) -> CorpusSource:
        """The documents of this split in some ascending blocks."""
        documents = self.blocks.documents(blocks)
        out = held_out_draw(documents) < self.held_out
        chosen = documents[out if self.is_held_out else ~out]
        chosen = without_copies(self.corpus, chosen) if self.is_held_out else chosen
        return CorpusSource(self.corpus, chosen, self.annotations, self)

    @cached_property
    def reference(self) -> CorpusSource:
        """A random window, always the same: a sample for statistics."""
        return self.window(BlockOrder(self.blocks, 0, derive_key("reference")).windows(0)[0])

    def __reduce__(self) -> tuple:
        """Without what it has cached."""
        fields = (self.corpus, self.held_out, self.is_held_out, self.annotations, self.blocks)
        return CorpusSplit, fields

    def describe(self) -> str:
        """The settings that its windows depend on, as text."""
        copies = f" {len(self.corpus.repeated)}" if self.is_held_out else ""
        settings = f"{self.held_out!r} {self.is_held_out} {self.blocks.sizes}"
        return settings if copies in ("", " 0") else settings + copies


def split_corpus(
    corpus: Corpus,
    held_out: float,
    annotations: Sequence[str],
    sizes: BlockSizes | None = None,
) -> tuple[CorpusSource, CorpusSource]:
    """The training and the held-out documents. The split depends only on document numbers, so it is
    the same in every run over a corpus. Of a large corpus these are the first windows of its
    `split`s."""
    missing = sorted(set(annotations) - set(corpus.annotations))
    if missing:
        raise UserError(
            f"{corpus.path}: the corpus has no annotation {', '.join(missing)}; "
            f"{how_to_add(missing, corpus.path)}"
        )
    sizes = sizes or BlockSizes()
    if len(CorpusBlocks(corpus, sizes)) >= 2 * sizes.window_blocks and held_out < 1:
        return (
            _large_split(corpus, held_out, False, annotations, sizes),
            _large_split(corpus, held_out, True, annotations, sizes),
        )
    where = {"where": str(corpus.path), "of": "documents"}
    try:
        training, held = train_heldout_split(len(corpus), held_out, at_least_one=True, **where)
    except UserError as error:
        raise UserError(f"{error}; {_ADVICE[corpus.manifest.undivided]}") from None
    held = without_copies(corpus, held)
    return CorpusSource(corpus, training, tuple(annotations)), CorpusSource(
        corpus, held, tuple(annotations)
    )


def without_copies(corpus: Corpus, held_out: np.ndarray) -> np.ndarray:
    """The held-out documents without those that are elsewhere in the corpus too, perhaps in the
    training part; all of them if that leaves none."""
    if not len(held_out) or not len(corpus.repeated):
        return held_out
    place = np.minimum(np.searchsorted(corpus.repeated, held_out), len(corpus.repeated) - 1)
    kept = held_out[corpus.repeated[place] != held_out]
    return kept if len(kept) else held_out


def _large_split(
    corpus: Corpus,
    held_out: float,
    is_held_out: bool,
    annotations: Sequence[str],
    sizes: BlockSizes,
) -> CorpusSource:
    share = held_out if is_held_out else 1 - held_out
    if share == 0:
        return CorpusSource(corpus, np.zeros(0, np.int64), tuple(annotations))
    blocks = CorpusBlocks(corpus, sizes.of_share(share))
    return CorpusSplit(corpus, held_out, is_held_out, tuple(annotations), blocks).reference


def passages(source: CorpusSource, size: int) -> np.ndarray:
    """(passages, 3) start, end, start of the document: every document cut every `size` tokens.

    The rest of a document, if longer than half of `size`, is cut once more at a random place:
    texts of 0.5 to 1 rows would pack badly. (The later piece gets its beginning back where the row
    has room.)"""
    count = -(-(source.ends - source.starts) // size)
    number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    start = np.repeat(source.starts, count) + number * size
    rest_start = source.starts + (count - 1) * size
    rest = source.ends - rest_start
    draw = keyed_uniform(derive_key("passage"), rest_start, 1)[:, 0]
    # At least 1: a quarter of 3 tokens would leave an empty passage before the cut.
    cut = rest_start + np.maximum((rest * (0.25 + 0.5 * draw)).astype(np.int64), 1)
    start = np.sort(np.concatenate([start, cut[(rest > size / 2) & (rest < 0.97 * size)]]))
    document = source.document_of(start)
    following = np.append(start[1:], source.ends[-1:])
    end = np.minimum(following, source.ends[document])
    return np.column_stack([start, end, source.starts[document]])
