"""Mines n-grams of tokens from a corpus: those that occur more often than their tokens would by
chance (`palm-ds corpus ngrams`).

    p(w) = c(w) / N          of the N n-grams of this length
    t(w) = (p(w) - p(w_1) ... p(w_n)) / sqrt(p(w) (1 - p(w)) / N)

is the t-statistic under the null hypothesis that the parts are independent (ERNIE-Gram, Xiao et al.
2021, arXiv 2010.12148). Of each length the n-grams with the highest t are kept. Choices of ours:
the parts are single tokens for every length, an n-gram is within a sentence, and has no special
token.

The n-grams of a length are counted in a pass over the corpus. Of longer ones only those that begin
with a frequent shorter one are counted, since no other can be frequent.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.common.rng import derive_key, permutation_at
from palm_ds.corpus.store import Corpus, open_corpus
from palm_ds.text.ngrams import NgramLexicon, ScoredNgram, write_ngrams

log = logging.getLogger(__name__)
SIZES = (100_000, 200_000)
"""Bigrams, trigrams: the paper's, as we remember it; not checked."""
_PIECE = 4_000_000  # tokens that are counted at a time
_SAMPLE = 500_000  # tokens that are cut, for the summary


@dataclass(frozen=True, kw_only=True)
class NgramCounts:
    """The frequent n-grams of a length."""

    tokens: np.ndarray
    """(n-grams, length) int64, in lexicographic order"""
    counts: np.ndarray
    """(n-grams,) int64"""
    total: int
    """N-grams of this length, frequent or not."""


Pieces = Callable[[], Iterator[tuple[np.ndarray, np.ndarray]]]
"""Parts of a corpus: the ids (tokens,) int64, -1 for a special token, and whether a sentence begins
at each."""


def mine_ngrams(
    path: str | Path,
    file: str | Path,
    *,
    sizes: Sequence[int] = SIZES,
    least: int = 5,
    sample: int = 0,
) -> dict[str, float]:
    """Write the lexicon of a corpus; returns how many n-grams of each length it has, and into how
    large segments it cuts the corpus. `sizes`: how many of 2, 3, ... tokens at most; `least`: times
    that an n-gram occurs; `sample`: tokens of random documents to count, 0 for all. Raises
    UserError."""
    _check(sizes, least, sample)
    corpus = open_corpus(path)
    pieces = pieces_of(corpus, sample or sys.maxsize)
    unigrams, levels = count_ngrams(pieces, corpus.vocabulary.size, len(sizes) + 1, least)
    tokenizer, ngrams = corpus.tokenizer(), []
    for size, level in zip(sizes, levels, strict=True):
        for row, t in best_of(level, unigrams, size):
            tokens = tuple(level.tokens[row].tolist())
            text = " ".join(tokenizer.tokens(level.tokens[row]))
            count = int(level.counts[row])
            ngrams.append(ScoredNgram(tokens=tokens, text=text, count=count, t=t))
    if not ngrams:
        raise UserError(f"corpus {corpus.path}: no n-gram occurs {least} times; lower --least")
    write_ngrams(Path(file), ngrams, tokenizer.fingerprint)
    lengths = [len(ngram.tokens) for ngram in ngrams]
    counted = {f"n-grams of {n}": float(lengths.count(n)) for n in range(2, len(sizes) + 2)}
    mean = _mean_segment(corpus, ngrams)
    log.info("%s: %d n-grams; segments have %.2f tokens on average", file, len(ngrams), mean)
    return counted | {"tokens per segment": mean}


def _check(sizes: Sequence[int], least: int, sample: int) -> None:
    if not sizes or min(sizes) < 0 or not max(sizes):
        raise UserError(f"--sizes {' '.join(map(str, sizes))}: expected numbers, not all of them 0")
    if least < 1:
        raise UserError(f"--least {least}: must be at least 1")
    if sample < 0:
        raise UserError(f"--sample {sample}: must not be negative; 0 counts the whole corpus")


def pieces_of(corpus: Corpus, tokens: int) -> Pieces:
    """Whole documents of a corpus, random ones with about `tokens` tokens in all."""
    starts = np.asarray(corpus.document_starts)
    documents = np.arange(len(corpus))
    if tokens < starts[-1]:
        order = permutation_at(derive_key("n-grams"), len(corpus), documents)
        taken = np.searchsorted(np.cumsum(np.diff(starts)[order]), tokens) + 1
        documents = np.sort(order[:taken])
    regular = np.zeros(corpus.vocabulary.size, bool)
    regular[corpus.vocabulary.regular] = True
    ends = np.cumsum(starts[documents + 1] - starts[documents])
    groups = np.split(documents, np.searchsorted(ends, np.arange(_PIECE, ends[-1], _PIECE)))

    def pieces() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for group in groups:
            if not len(group):
                continue
            sizes = starts[group + 1] - starts[group]
            before = np.cumsum(sizes) - sizes
            places = np.arange(sizes.sum()) + np.repeat(starts[group] - before, sizes)
            ids = corpus.take(places).astype(np.int64)
            first = np.searchsorted(corpus.sentence_starts, places, side="right") - 1
            begins = np.asarray(corpus.sentence_starts)[first] == places
            yield np.where(regular[ids], ids, -1), begins

    return pieces


def count_ngrams(
    pieces: Pieces, vocabulary: int, longest: int, least: int
) -> tuple[np.ndarray, list[NgramCounts]]:
    """How often each token occurs (vocabulary,), and the n-grams of 2 to `longest` tokens that
    occur `least` times."""
    unigrams = np.zeros(vocabulary, np.int64)
    for ids, _ in pieces():
        unigrams += np.bincount(ids[ids >= 0], minlength=vocabulary)
    known: list[np.ndarray] = []  # the keys of the frequent n-grams of 2, 3, ... tokens
    levels: list[NgramCounts] = []
    for length in range(2, longest + 1):
        keys, counts, total = np.zeros(0, np.int64), np.zeros(0, np.int64), 0
        for ids, begins in pieces():
            inside = within_sentences(ids, begins, length)
            total += int(inside.sum())
            own = _keys(ids, known, vocabulary)
            keys, counts = _added(keys, counts, own[inside[: len(own)] & (own >= 0)])
        keys, counts = keys[counts >= least], counts[counts >= least]
        before = levels[-1].tokens if levels else np.arange(vocabulary)[:, None]
        tokens = np.column_stack([before[keys // vocabulary], keys % vocabulary])
        levels.append(NgramCounts(tokens=tokens, counts=counts, total=total))
        known.append(keys)
    return unigrams, levels


def within_sentences(ids: np.ndarray, begins: np.ndarray, length: int) -> np.ndarray:
    """(tokens,) bool: whether an n-gram of this length begins at each token."""
    inside = np.zeros(len(ids), bool)
    many = len(ids) - length + 1
    if many <= 0:
        return inside
    sentence, special = np.cumsum(begins), np.cumsum(ids < 0)
    same = sentence[length - 1 :] == sentence[:many]
    inside[:many] = same & (special[length - 1 :] == special[:many]) & (ids[:many] >= 0)
    return inside


def _keys(ids: np.ndarray, known: Sequence[np.ndarray], vocabulary: int) -> np.ndarray:
    """The key of the n-gram at each token that has room for it: that of its beginning among the
    frequent ones, and its last token; -1 if its beginning is not frequent."""
    number = ids
    for keys in (*known, None):
        last = ids[len(ids) - len(number) + 1 :]
        own = np.where((number[:-1] >= 0) & (last >= 0), number[:-1] * vocabulary + last, -1)
        if keys is None:
            return own
        if not len(keys):
            return np.full(len(own) - 1, -1)
        where = np.minimum(np.searchsorted(keys, own), len(keys) - 1)
        number = np.where(keys[where] == own, where, -1)
    raise AssertionError


def _added(keys: np.ndarray, counts: np.ndarray, more: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ascending keys and their counts, with each of `more` counted once."""
    own, times = np.unique(more, return_counts=True)
    merged, place = np.unique(np.concatenate([keys, own]), return_inverse=True)
    total = np.zeros(len(merged), np.int64)
    np.add.at(total, place, np.concatenate([counts, times]))
    return merged, total


def best_of(level: NgramCounts, unigrams: np.ndarray, size: int) -> list[tuple[int, float]]:
    """The n-grams that are kept, as rows of `level`, and their t: the highest ones above 0, equal
    ones in the order of their tokens."""
    if not len(level.counts):
        return []
    share = level.counts / level.total
    parts = np.sort(unigrams[level.tokens] / unigrams.sum(), axis=1)  # products of one order
    deviation = np.sqrt(share * (1 - share) / level.total)
    t = np.round((share - parts.prod(1)) / np.maximum(deviation, np.finfo(float).tiny), 6)
    order = np.argsort(-t, kind="stable")[:size]
    return [(int(row), float(t[row])) for row in order if t[row] > 0]


def _mean_segment(corpus: Corpus, ngrams: Sequence[ScoredNgram]) -> float:
    """Tokens of a segment, on average over a sample of the corpus."""
    lexicon = NgramLexicon([ngram.tokens for ngram in ngrams])
    tokens = segments = 0
    for ids, _ in pieces_of(corpus, _SAMPLE)():
        known = np.where(ids < 0, lexicon.largest_id + 1, ids)
        tokens, segments = tokens + len(ids), segments + len(lexicon.cut(known)[0])
    return round(tokens / segments, 3)
