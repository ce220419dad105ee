"""Random numbers that are a pure function of a key: no generator is ever shared or advanced.

derive_key("seed 1", name)              a 64-bit key from any parts
keyed_uniform(key, n, count)            `count` uniform numbers for each n, vectorized over n
permutation_at(key, size, index)        a permutation of range(size) at index, in O(1) memory
keyed_generator(key, n)                 a full numpy generator for the n-th example
"""

from __future__ import annotations

import hashlib

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FEISTEL_ROUNDS = 6


def derive_key(*parts: object) -> int:
    """A 64-bit key from any parts; stable across processes, machines and Python versions."""
    text = "\x1f".join(map(repr, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mix_bits(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014): a bijection of 64-bit words."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def keyed_bits(seed: int, n: np.ndarray, slot: int = 0) -> np.ndarray:
    """64 random bits for every n; `slot` separates independent draws of the same n."""
    with np.errstate(over="ignore"):
        state = mix_bits(np.asarray(n).astype(np.uint64) * _GOLDEN + np.uint64(seed))
        return mix_bits(state + np.uint64(slot + 1) * _GOLDEN)


def keyed_uniform(seed: int, n: np.ndarray, count: int) -> np.ndarray:
    """(len(n), count) float64 in [0, 1)."""
    columns = [keyed_bits(seed, n, slot) >> np.uint64(11) for slot in range(count)]
    return np.stack(columns, axis=1).astype(np.float64) * 2.0**-53


def keyed_generator(seed: int, n: int) -> np.random.Generator:
    """A counter-based (Philox) generator for the n-th item under this key."""
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, n]))


def permutation_at(seed: int, size: int, index: np.ndarray) -> np.ndarray:
    """The keyed permutation of range(size) at each index: (len(index),) int64.

    A balanced Feistel network over the next even power of two, walked until inside the range
    (Black and Rogaway 2002): shuffles an epoch over any corpus without a table.
    """
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    out = _feistel(seed, np.asarray(index).astype(np.uint64), half)
    while (outside := out >= np.uint64(size)).any():
        out[outside] = _feistel(seed, out[outside], half)
    return out.astype(np.int64)


def _feistel(seed: int, x: np.ndarray, half: int) -> np.ndarray:
    mask = np.uint64((1 << half) - 1)
    left, right = x >> np.uint64(half), x & mask
    for step in range(_FEISTEL_ROUNDS):
        left, right = right, left ^ (keyed_bits(seed, right, step) & mask)
    return (left << np.uint64(half)) | right
