"""Fingerprints of texts: equal for the same words, alike for almost the same words.

A text becomes its *terms*: words in lower case, and Chinese or Japanese characters one by one.
Punctuation, spaces and capitals make no difference. Its *shingles* are the runs of five terms. The
share of shingles that two texts have in common is estimated by the share of equal values in their
MinHash signatures (Broder 1997, computed by rensa). Signatures are cut in bands; texts with an
equal band are compared.

    similarity of the texts      0.7    0.75   0.8    0.85   0.9
    found with 16 bands of 7     74 %   90 %   98 %   99.7 %  100 %
"""

from __future__ import annotations

import importlib
import re
import unicodedata
from collections.abc import Sequence
from hashlib import blake2b
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
