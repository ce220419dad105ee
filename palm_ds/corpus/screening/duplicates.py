"""Finds the copies among documents by their fingerprints: equal for the same words, alike for
almost the same words.

A text becomes its *terms*: words in lower case, and Chinese or Japanese characters one by one.
Punctuation, spaces and capitals make no difference. Its *shingles* are the runs of five terms. The
share of shingles that two texts have in common is estimated by the share of equal values in their
MinHash signatures (Broder 1997, computed by rensa). Signatures are cut in bands; texts with an
equal band are compared.

    similarity of the texts      0.7    0.75   0.8    0.85   0.9
    found with 16 bands of 7     74 %   90 %   98 %   99.7 %  100 %

Every work unit has sorted keys on disk (the hash of its texts, and one of each band of their
signatures). One range of keys after another is read from all units, so that memory does not depend
on their number. Documents with an equal key are compared, and linked if they are alike; of
documents that are linked, directly or through others, the first is kept. Neither the order of the
work nor the number of processes matters.
"""

from __future__ import annotations

import importlib
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import ModuleType

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.common.rng import mix_bits

BANDS, ROWS = 16, 7
SIGNATURE = BANDS * ROWS
_SHINGLE = 5  # terms
_SEED = 1
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_SINGLE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
SINGLE = re.compile(f"[{_SINGLE}]")
"""Characters that are terms by themselves."""
_TERM = re.compile(rf"[{_SINGLE}]|[^\W_{_SINGLE}]+")
_MAX_CACHED_TERMS = 1 << 20


class _TermHashes(dict[str, int]):
    """64 bits of every term, computed once."""

    def __missing__(self, term: str) -> int:
        if len(self) >= _MAX_CACHED_TERMS:
            self.clear()
        value = int.from_bytes(blake2b(term.encode("utf-8"), digest_size=8).digest(), "little")
        self[term] = value
        return value


class Fingerprints:
    """Computes the fingerprints of texts."""

    def __init__(self) -> None:
        self._known = _TermHashes()

    def terms(self, text: str) -> np.ndarray:
        """(terms,) uint64: a hash of each term of the text."""
        if not text.isascii():
            text = unicodedata.normalize("NFKC", text)
        terms = _TERM.findall(text.lower()) or [text]
        return np.fromiter(map(self._known.__getitem__, terms), np.uint64, len(terms))


def exact_hash(terms: np.ndarray) -> int:
    """64 bits that are equal for texts with the same terms."""
    return int.from_bytes(blake2b(terms.tobytes(), digest_size=8).digest(), "little")


def shingles(terms: np.ndarray, size: int = _SHINGLE) -> np.ndarray:
    """(shingles,) uint64: a hash of each run of `size` terms, or of a shorter text."""
    size = min(size, len(terms))
    count = len(terms) - size + 1
    hashes = np.zeros(count, np.uint64)
    for offset in range(size):
        hashes = hashes * _FACTOR + terms[offset : offset + count]
    return mix_bits(hashes)


def signatures(texts: Sequence[np.ndarray]) -> np.ndarray:
    """(texts, SIGNATURE) uint32: the MinHash signature of the shingles of each text."""
    minhash = import_rensa().RMinHash
    if not texts:
        return np.zeros((0, SIGNATURE), np.uint32)
    edges = np.cumsum([0, *map(len, texts)]).astype(np.uint64)
    digests = minhash.digest_matrix_from_flat_token_hashes(
        np.concatenate(texts), edges, SIGNATURE, _SEED
    )
    return np.array(digests.to_rows(), np.uint32)


def bands(hashes: np.ndarray) -> np.ndarray:
    """(BANDS, texts) uint64: a hash of each band of the signatures."""
    pieces = hashes.reshape(-1, BANDS, ROWS).astype(np.uint64)
    keys = np.zeros(pieces.shape[:2], np.uint64)
    for row in range(ROWS):
        keys = mix_bits(keys * _FACTOR + pieces[:, :, row])
    return keys.T


def import_rensa() -> ModuleType:
    """The package that computes MinHash signatures. Raises UserError if it is not installed."""
    try:
        return importlib.import_module("rensa")
    except ImportError:
        raise UserError("--dedup: near copies need the package rensa (pip install rensa)") from None


_MAX_KEYS = 4 << 20  # in memory
_MAX_PAIRS = 1 << 15  # whose signatures are in memory


@dataclass(frozen=True, kw_only=True)
class UnitFingerprints:
    """The fingerprints of a work unit, memory-mapped."""

    start: int  # the number of its first document among all
    keys: np.ndarray  # (keys of a document, documents with keys) uint64, each row sorted
    order: np.ndarray  # the same shape, uint32: the documents of the keys
    exact: np.ndarray  # (documents,) uint64
    signatures: np.ndarray  # (documents, SIGNATURE) uint32, or none


class Clusters:
    """Documents that are linked; each cluster is known by its first document."""

    def __init__(self, file: Path, documents: int) -> None:
        self.parent = np.lib.format.open_memmap(file, mode="w+", dtype=np.int64, shape=(documents,))
        for start in range(0, documents, _MAX_KEYS):
            end = min(start + _MAX_KEYS, documents)
            self.parent[start:end] = np.arange(start, end)

    def first(self, documents: np.ndarray) -> np.ndarray:
        """The first document of the cluster of each document."""
        roots = self.parent[documents]
        while not np.array_equal(roots, above := self.parent[roots]):
            roots = above
        self.parent[documents] = roots
        return roots

    def link(self, one: np.ndarray, other: np.ndarray) -> None:
        """Joins the clusters of pairs of documents."""
        while len(one):
            first, second = self.first(one), self.first(other)
            apart = first != second
            one, other, first, second = one[apart], other[apart], first[apart], second[apart]
            np.minimum.at(self.parent, np.maximum(first, second), np.minimum(first, second))


def find_clusters(units: Sequence[UnitFingerprints], similarity: float, file: Path) -> Clusters:
    """Links all copies: documents of equal texts and, if the units have signatures, those whose
    signatures agree in at least `similarity`. `file` takes 8 bytes per document."""
    clusters = Clusters(file, sum(len(unit.exact) for unit in units))
    for row in range(len(units[0].keys) if units else 0):
        for keys, documents in _ranges(units, row):
            one, other = _pairs(keys, documents)
            if row:
                one, other = _alike(units, clusters, one, other, similarity)
            clusters.link(one, other)
    return clusters


def _ranges(units: Sequence[UnitFingerprints], row: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(keys, documents) of all units, sorted, one range of keys after another."""
    count = sum(unit.keys.shape[1] for unit in units)
    pieces = max(1, -(-count // _MAX_KEYS))
    edges = [(i << 64) // pieces for i in range(pieces)]
    places = [
        np.append(np.searchsorted(unit.keys[row], np.array(edges, np.uint64)), unit.keys.shape[1])
        for unit in units
    ]
    for piece in range(pieces):
        cuts = [(u, slice(p[piece], p[piece + 1])) for u, p in zip(units, places, strict=True)]
        keys = np.concatenate([unit.keys[row, cut] for unit, cut in cuts])
        numbers = [unit.start + unit.order[row, cut].astype(np.int64) for unit, cut in cuts]
        documents = np.concatenate(numbers)
        order = np.lexsort((documents, keys))
        yield keys[order], documents[order]


def _pairs(keys: np.ndarray, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of documents with an equal key, each with the first one and with the one before it."""
    same = np.flatnonzero(keys[1:] == keys[:-1]) + 1
    begins = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
    first = begins[np.searchsorted(begins, same, side="right") - 1]
    further = first != same - 1
    one = np.concatenate([documents[first], documents[same - 1][further]])
    return one, np.concatenate([documents[same], documents[same][further]])


def _alike(
    units: Sequence[UnitFingerprints],
    clusters: Clusters,
    one: np.ndarray,
    other: np.ndarray,
    similarity: float,
) -> tuple[np.ndarray, np.ndarray]:
    """The pairs that are not linked yet and whose signatures agree."""
    apart = clusters.first(one) != clusters.first(other)
    one, other = one[apart], other[apart]
    keep = np.zeros(len(one), bool)
    for start in range(0, len(one), _MAX_PAIRS):
        part = slice(start, start + _MAX_PAIRS)
        keep[part] = similarities(units, one[part], other[part]) >= similarity
    return one[keep], other[keep]


def similarities(
    units: Sequence[UnitFingerprints], one: np.ndarray, other: np.ndarray
) -> np.ndarray:
    """The share of equal values in the signatures of pairs of documents."""
    return (_signatures(units, one) == _signatures(units, other)).mean(axis=1)


def _signatures(units: Sequence[UnitFingerprints], documents: np.ndarray) -> np.ndarray:
    starts = np.array([unit.start for unit in units])
    number = np.searchsorted(starts, documents, side="right") - 1
    signatures = np.zeros((len(documents), units[0].signatures.shape[1]), np.uint32)
    for unit in np.unique(number):
        mine = number == unit
        signatures[mine] = units[unit].signatures[documents[mine] - starts[unit]]
    return signatures
