"""Texts as segments, n-grams of a lexicon and single tokens, and what a corpus's segments are
like."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.model.heads.ngrams import ngram_id
from palm_ds.text.ngrams import SINGLE, NgramLexicon, read_ngrams


@dataclass(frozen=True)
class Segments:
    """The segments of a text."""

    first: np.ndarray
    """(segments,) the first token of each, ascending"""
    sizes: np.ndarray
    """(segments,) tokens of each"""
    ids: np.ndarray
    """(segments,) int64: its token, or below 0 its n-gram (model/heads/ngrams.py)"""


@dataclass(frozen=True)
class SegmentStatistics:
    """What the segments of a corpus are like, of a sample of it."""

    mean_tokens: float
    """Tokens of a segment."""
    frequency: np.ndarray
    """(tokens + n-grams,) relative frequencies, one added to each count: the unigram baseline."""

    @cached_property
    def commonest(self) -> int:
        return int(self.frequency.argmax())


def open_lexicon(path: str, where: str) -> tuple[NgramLexicon, str]:
    """The lexicon in a file, and the fingerprint of its tokenizer. Raises UserError, starting with
    `where`."""
    try:
        return read_ngrams(path)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def segments_of(ids: np.ndarray, lexicon: NgramLexicon) -> Segments:
    """The segments of a text (tokens,)."""
    first, numbers = lexicon.cut(ids)
    own = np.where(numbers == SINGLE, np.asarray(ids, np.int64)[first], ngram_id(numbers))
    return Segments(first, np.diff(first, append=len(ids)), own)


def places_of(ids: np.ndarray, tokens: int) -> np.ndarray:
    """The places of segments in a joined vocabulary: `tokens` tokens, then the n-grams."""
    return np.where(ids < 0, tokens + ngram_id(ids), ids)


def segment_statistics(source: CorpusSource, lexicon: NgramLexicon, path: str) -> SegmentStatistics:
    """Those of a source or, if it is a window of a large corpus, of its first window."""
    source = source.reference

    def count() -> SegmentStatistics:
        tokens, size = 0, source.vocabulary.size
        counts = np.ones(size + len(lexicon))
        for piece in source.sample(()):
            ids = segments_of(piece.ids, lexicon).ids
            counts += np.bincount(places_of(ids, size), minlength=len(counts))
            tokens += len(piece)
        segments = counts.sum() - len(counts)
        return SegmentStatistics(tokens / max(segments, 1), counts / counts.sum())

    return source.cached(f"segments {path}", count)
