"""Two checkpoints compute the same: both run on the same texts, layer by layer, and are compared.

    side A ──> embeddings, layer 1, ..., pooled, each head's scores ─┐
                                                                      ├─> the largest difference
    side B ──> the same ─────────────────────────────────────────────┘

A Hugging Face folder runs in transformers; what nobody can run here runs in our encoder, with the
checkpoint's own numbers, on the CPU in fp32. One side is let go before the other is loaded.
"""

from __future__ import annotations

import ctypes
import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from palm_ds.common import rng as keyed
from palm_ds.common.errors import UserError
from palm_ds.text.tokenizer import Tokenizer
from palm_ds.weights.formats.contents import Contents
from palm_ds.weights.formats.runnable import Outputs, RunnableCheckpoint, Texts

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-2}
"""How far two sides may be apart, as part of the largest number there (at least 1), by the type
that the weights were rounded to."""
TEXTS = (
    "The river had risen in the night, and by morning the lower road was under water.",
    "Who wrote it? Nobody knows; the manuscript was found in 1897, in a box of old letters.",
    "In mathematics, a group is a set with an operation that is associative.",
    "他们在北京大学学习计算机科学。",
    "昨天下了一场大雨，今天早上天气很好。",
    "A short one.",
)
"""Real texts for who has none at hand."""
_LONGEST = 48


@dataclass(frozen=True)
class Difference:
    """How far the sides are apart in one tensor: the largest difference, the largest number."""

    kind: str
    name: str
    largest: float
    scale: float


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What came of running both."""

    sides: tuple[str, str]
    differences: tuple[Difference, ...]
    tolerance: float

    @property
    def worst(self) -> Difference:
        """The difference that comes nearest to what is allowed, or exceeds it most."""
        return max(self.differences, key=lambda each: each.largest / max(each.scale, 1.0))

    @property
    def holds(self) -> bool:
        return self.worst.largest <= self.tolerance * max(self.worst.scale, 1.0)

    def __str__(self) -> str:
        worst, kinds = self.worst, dict.fromkeys(each.kind for each in self.differences)
        sides = f"{self.sides[0]} against {self.sides[1]} on {' and '.join(kinds)} texts"
        if not worst.largest:
            return f"no difference; {sides}"
        return (
            f"largest difference {worst.largest:.1e} ({worst.name}, {worst.kind} texts; numbers up "
            f"to {worst.scale:.3g}), allowed {self.tolerance * max(worst.scale, 1.0):.1e}; "
            f"{sides}"
        )

    def record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "holds": self.holds,
            "tolerance": self.tolerance,
            "sides": list(self.sides),
            "largest": self.worst.largest,
            "where": self.worst.name,
            "differences": [vars(each) for each in self.differences],
        }


def compare(
    a: RunnableCheckpoint,
    b: RunnableCheckpoint,
    inputs: Sequence[Texts],
    *,
    heads: Mapping[str, str] | None = None,
    tolerance: float | None = None,
) -> Proof:
    """Run both sides and compare what both compute. `heads`: {a's head: b's}; by default those of
    the same name. Raises UserError where they are not of one shape."""
    _check_shapes(a.contents, b.contents)
    pairs = heads if heads is not None else {x: x for x in a.contents.heads}
    results = [_run(side, inputs) for side in (a, b)]
    found = [
        _difference(texts.kind, name, one[name], other[theirs])
        for texts, one, other in zip(inputs, *results, strict=True)
        for name in one
        if (theirs := _other_name(name, pairs)) in other
    ]
    return Proof(
        sides=(a.name, b.name),
        differences=tuple(found),
        tolerance=tolerance_of(a.contents, b.contents) if tolerance is None else tolerance,
    )


def tolerance_of(a: Contents, b: Contents) -> float:
    """That of the coarser type where the types differ: then values were rounded."""
    types = [each.entries["backbone.word.weight"].read().dtype for each in (a, b)]
    if types[0] == types[1]:
        return TOLERANCE[torch.float32]
    return max(TOLERANCE.get(each, TOLERANCE[torch.float32]) for each in types)


def _check_shapes(a: Contents, b: Contents) -> None:
    for name in ("hidden_size", "num_layers", "num_heads"):
        one, other = getattr(a.config, name), getattr(b.config, name)
        if one != other:
            raise UserError(
                f"{b.path}: is of another shape than {a.path}: {name} {other}, there {one}"
            )


def _run(side: RunnableCheckpoint, inputs: Sequence[Texts]) -> list[Outputs]:
    run = side.open()
    with torch.no_grad():
        found = [run(texts) for texts in inputs]
    del run
    _hand_back()
    return found


def _hand_back() -> None:
    """What one side had: modules are cycles, and glibc keeps for later what is freed in pieces."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _other_name(name: str, heads: Mapping[str, str]) -> str:
    return f"head {heads.get(head, '')}" if (head := _head_of(name)) else name


def _head_of(name: str) -> str:
    return name.removeprefix("head ") if name.startswith("head ") else ""


def _difference(kind: str, name: str, a: torch.Tensor, b: torch.Tensor) -> Difference:
    if a.shape != b.shape:
        raise UserError(f"{name}: {tuple(a.shape)} on one side, {tuple(b.shape)} on the other")
    largest = float((a.float() - b.float()).abs().max())
    scale = float(a.float().abs().max())
    largest = largest if math.isfinite(largest) and math.isfinite(scale) else math.inf
    return Difference(kind, name, largest, scale if math.isfinite(scale) else 1.0)


# ---- inputs ----


def inputs_for(
    a: Contents, b: Contents, tokenizer: Tokenizer | None, texts: Sequence[str] = TEXTS
) -> list[Texts]:
    """Random texts that both can read, and real ones where there is a tokenizer."""
    if not texts:
        raise UserError("there is no text to run the two sides on")
    found = [_random_texts(a, b)]
    if tokenizer is not None:
        found.append(_real_texts(a, b, tokenizer, texts))
    return found


def _random_texts(a: Contents, b: Contents) -> Texts:
    rng = keyed.generator(keyed.key("proof"), 0)
    words, segments, longest = _limits(a, b)
    banned = {a.config.pad, b.config.pad}
    ids = np.array([i for i in range(words) if i not in banned] or [0])
    lengths = [longest, max(longest * 2 // 3, 1), max(longest // 3, 1), min(2, longest)]
    rows = [
        (rng.choice(ids, n), np.sort(rng.integers(0, segments, n, dtype=np.int64))) for n in lengths
    ]
    return _padded("random", rows, a.config.pad)


def _real_texts(a: Contents, b: Contents, tokenizer: Tokenizer, texts: Sequence[str]) -> Texts:
    words, segments, longest = _limits(a, b)
    known = tokenizer.vocabulary
    rows = []
    for number, (ids, _) in enumerate(tokenizer.encode_texts(list(texts))):
        ids = np.array([known.cls, *ids[: longest - 2], known.sep])[:longest]
        if ids.max() >= words:
            raise UserError(
                f"{tokenizer.origin}: gives id {ids.max()}, the word table has {words} rows; it is "
                "another model's"
            )
        rows.append((ids, np.full(len(ids), number % min(segments, 2), np.int64)))
    return _padded("real", rows, a.config.pad)


def _limits(a: Contents, b: Contents) -> tuple[int, int, int]:
    """What both can read: ids, segments and tokens."""
    configs = (a.config, b.config)
    words = min(each.entries["backbone.word.weight"].shape[0] for each in (a, b))
    longest = min(_LONGEST, *(each.max_length for each in configs))
    return words, min(each.token_types for each in configs), longest


def _padded(kind: str, rows: Sequence[tuple[np.ndarray, np.ndarray]], pad: int) -> Texts:
    longest = max(len(ids) for ids, _ in rows)
    shape = (len(rows), longest)
    ids, segments = np.full(shape, pad, np.int64), np.zeros(shape, np.int64)
    real = np.zeros(shape, bool)
    for r, (row, of) in enumerate(rows):
        ids[r, : len(row)], segments[r, : len(row)], real[r, : len(row)] = row, of, True
    return Texts(kind=kind, **{n: torch.from_numpy(x) for n, x in _three(ids, segments, real)})


def _three(*arrays: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    return zip(("ids", "segments", "real"), arrays, strict=True)
