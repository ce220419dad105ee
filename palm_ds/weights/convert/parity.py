"""Numerical parity: runs two checkpoints on the same texts and compares them layer by layer.

    side A ──> embeddings, layer 1, ..., pooled, each head's scores ─┐
                                                                      ├─> the largest difference
    side B ──> the same ─────────────────────────────────────────────┘

Hugging Face folders run in transformers; all other formats run in palm_ds's encoder with the
checkpoint's own config, on the CPU in fp32. One side is freed before the other is loaded.
"""

from __future__ import annotations

import ctypes
import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from palm_ds.common.errors import UserError
from palm_ds.common.rng import derive_key, keyed_generator
from palm_ds.model.encoder.encoder import encoder_class
from palm_ds.text.tokenizer import Tokenizer
from palm_ds.weights.convert.options import TEXTS
from palm_ds.weights.formats.contents import CheckpointContents
from palm_ds.weights.formats.runnable import Outputs, RunnableCheckpoint, Texts

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-2}
"""Largest allowed difference relative to the largest value (at least 1), by the dtype that the
weights were rounded to."""
_MAX_TOKENS = 48


@dataclass(frozen=True)
class Difference:
    """Comparison of one tensor: the largest difference and the largest absolute value."""

    kind: str
    name: str
    largest: float
    scale: float


@dataclass(frozen=True, kw_only=True)
class ParityReport:
    """Result of a comparison."""

    sides: tuple[str, str]
    differences: tuple[Difference, ...]
    tolerance: float

    @property
    def worst(self) -> Difference:
        """The largest difference relative to its tolerance."""
        return max(self.differences, key=lambda each: each.largest / max(each.scale, 1.0))

    @property
    def passed(self) -> bool:
        return self.worst.largest <= self.tolerance * max(self.worst.scale, 1.0)

    def __str__(self) -> str:
        worst, kinds = self.worst, dict.fromkeys(difference.kind for difference in self.differences)
        sides = f"{self.sides[0]} against {self.sides[1]} on {' and '.join(kinds)} texts"
        if not worst.largest:
            return f"no difference; {sides}"
        return (
            f"largest difference {worst.largest:.1e} ({worst.name}, {worst.kind} texts; values up "
            f"to {worst.scale:.3g}), allowed {self.tolerance * max(worst.scale, 1.0):.1e}; "
            f"{sides}"
        )

    def record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "passed": self.passed,
            "tolerance": self.tolerance,
            "sides": list(self.sides),
            "largest": self.worst.largest,
            "where": self.worst.name,
            "differences": [vars(difference) for difference in self.differences],
        }


def compare(
    a: RunnableCheckpoint,
    b: RunnableCheckpoint,
    inputs: Sequence[Texts],
    *,
    heads: Mapping[str, str] | None = None,
    tolerance: float | None = None,
) -> ParityReport:
    """Run both sides and compare the outputs that both have.

    `heads`: {head of a: head of b}; by default heads are paired by name. Raises UserError if the
    shapes differ.
    """
    _check_shapes(a.contents, b.contents)
    pairs = heads if heads is not None else {head: head for head in a.contents.heads}
    results = [_run(side, inputs) for side in (a, b)]
    left_out = set() if _own_pooler(a.contents) == _own_pooler(b.contents) else {"pooled"}
    rising = {f"head {name}" for name in _raised_heads(a.contents, b.contents)}
    differences = [
        _difference(
            texts.kind,
            name,
            *(_centered(x) if name in rising else x for x in (one[name], other[other_name])),
        )
        for texts, one, other in zip(inputs, *results, strict=True)
        for name in one
        if name not in left_out
        if (other_name := _other_name(name, pairs)) in other
    ]
    return ParityReport(
        sides=(a.name, b.name),
        differences=tuple(differences),
        tolerance=tolerance_of(a.contents, b.contents) if tolerance is None else tolerance,
    )


def _own_pooler(contents: CheckpointContents) -> bool:
    """Whether the pooler has values of its own; in some files it starts as a head."""
    pooler = contents.entries.get("backbone.pooler.dense.weight")
    same = [
        x for x in contents.entries.values() if pooler and x.source_names == pooler.source_names
    ]
    return len(same) < 2


def _raised_heads(a: CheckpointContents, b: CheckpointContents) -> list[str]:
    """The masked-LM heads of `a` whose scores of all tokens may be larger by the same number in
    one: a task embedding was folded into the token embeddings, which are the output embeddings."""
    if a.config.task_types == b.config.task_types:
        return []
    if encoder_class(a.config).has_token_types(a.config):
        return []
    return [name for name, head in a.heads.items() if head.kind == "masked_words"]


def _centered(scores: torch.Tensor) -> torch.Tensor:
    """The same probabilities of tokens, (positions, vocabulary)."""
    return scores - scores.mean(-1, keepdim=True)


def tolerance_of(a: CheckpointContents, b: CheckpointContents) -> float:
    """The tolerance for fp32 if both dtypes agree, else that of the coarser one: its values were
    rounded."""
    types = [dtype.entries["backbone.word.weight"].read().dtype for dtype in (a, b)]
    if types[0] == types[1]:
        return TOLERANCE[torch.float32]
    return max(TOLERANCE.get(dtype, TOLERANCE[torch.float32]) for dtype in types)


def _check_shapes(a: CheckpointContents, b: CheckpointContents) -> None:
    kinds = [side.config.kind for side in (a, b)]
    if kinds[0] != kinds[1]:
        raise UserError(f"{a.path}, {b.path}: have different encoders, {kinds[0]} and {kinds[1]}")
    for name in ("hidden_size", "num_layers", "num_heads"):
        one, other = getattr(a.config, name), getattr(b.config, name)
        if one != other:
            raise UserError(f"{b.path}: has {name} {other}, but {a.path} has {one}")


def _run(side: RunnableCheckpoint, inputs: Sequence[Texts]) -> list[Outputs]:
    with _releasing_memory(), torch.no_grad():
        run = side.open()
        outputs = [run(texts) for texts in inputs]
        del run
    return outputs


@contextmanager
def _releasing_memory() -> Iterator[None]:
    """Return the memory that was allocated inside to the system: modules form cycles, and glibc
    keeps small blocks. Objects created while garbage collection is off stay in the youngest
    generation, so only this one is searched: all of torch would take half a second."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect(0)
        if was_enabled:
            gc.enable()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _other_name(name: str, heads: Mapping[str, str]) -> str:
    return f"head {heads.get(head, '')}" if (head := _head_of(name)) else name


def _head_of(name: str) -> str:
    return name.removeprefix("head ") if name.startswith("head ") else ""


def _difference(kind: str, name: str, a: torch.Tensor, b: torch.Tensor) -> Difference:
    if a.shape != b.shape:
        raise UserError(
            f"{name}: has shape {tuple(a.shape)} on one side and {tuple(b.shape)} on the other"
        )
    largest = float((a.float() - b.float()).abs().max())
    scale = float(a.float().abs().max())
    largest = largest if math.isfinite(largest) and math.isfinite(scale) else math.inf
    return Difference(kind, name, largest, scale if math.isfinite(scale) else 1.0)


def same_heads(a: CheckpointContents, b: CheckpointContents) -> dict[str, str]:
    """{head of a: head of b}: those of one name, and the only ones of a kind."""
    pairs = {name: name for name in a.heads if name in b.heads}

    def only_of_kind(contents: CheckpointContents, other: CheckpointContents) -> dict[tuple, str]:
        kinds: dict[tuple, list[str]] = {}
        for name, head in contents.heads.items():
            if name not in other.heads:
                reads = head.kind == "classes" and (head.pooled, head.outputs.averaged)
                kind = (head.kind, head.exported_classes, reads)
                kinds.setdefault(kind, []).append(name)
        return {kind: names[0] for kind, names in kinds.items() if len(names) == 1}

    in_a, in_b = only_of_kind(a, b), only_of_kind(b, a)
    return pairs | {in_a[kind]: in_b[kind] for kind in in_a if kind in in_b}


# ---- inputs ----


def inputs_for(
    a: CheckpointContents,
    b: CheckpointContents,
    tokenizer: Tokenizer | None,
    texts: Sequence[str] = TEXTS,
) -> list[Texts]:
    """Random ids within the limits of both, and natural texts if there is a tokenizer."""
    if not texts:
        raise UserError("texts: empty; give at least one text to compare the two sides on")
    inputs = [_random_texts(a, b)]
    if tokenizer is not None:
        inputs.append(_real_texts(a, b, tokenizer, texts))
    return inputs


def _random_texts(a: CheckpointContents, b: CheckpointContents) -> Texts:
    rng = keyed_generator(derive_key("proof"), 0)
    words, segments, longest = _limits(a, b)
    banned = {a.config.pad, b.config.pad}
    ids = np.array([i for i in range(words) if i not in banned] or [0])
    lengths = [longest, max(longest * 2 // 3, 1), max(longest // 3, 1), min(2, longest)]
    rows = [
        (rng.choice(ids, n), np.sort(rng.integers(0, segments, n, dtype=np.int64))) for n in lengths
    ]
    return _padded("random", rows, a.config.pad)


def _real_texts(
    a: CheckpointContents, b: CheckpointContents, tokenizer: Tokenizer, texts: Sequence[str]
) -> Texts:
    words, segments, longest = _limits(a, b)
    known = tokenizer.vocabulary
    rows = []
    for number, (ids, _) in enumerate(tokenizer.encode_texts(list(texts))):
        ids = np.array([known.cls, *ids[: longest - 2], known.sep])[:longest]
        if ids.max() >= words:
            raise UserError(
                f"{tokenizer.origin}: gives id {ids.max()}, but the token embeddings have {words} "
                "rows; it belongs to another model"
            )
        rows.append((ids, np.full(len(ids), number % min(segments, 2), np.int64)))
    return _padded("real", rows, a.config.pad)


def _limits(a: CheckpointContents, b: CheckpointContents) -> tuple[int, int, int]:
    """(vocabulary size, token types, text length) that both sides support."""
    configs = (a.config, b.config)
    words = min(config.entries["backbone.word.weight"].shape[0] for config in (a, b))
    longest = min(_MAX_TOKENS, *(config.max_length for config in configs))
    return words, min(config.token_types for config in configs), longest


def _padded(kind: str, rows: Sequence[tuple[np.ndarray, np.ndarray]], pad: int) -> Texts:
    longest = max(len(ids) for ids, _ in rows)
    shape = (len(rows), longest)
    ids, segments = np.full(shape, pad, np.int64), np.zeros(shape, np.int64)
    real = np.zeros(shape, bool)
    for r, (row, of) in enumerate(rows):
        ids[r, : len(row)], segments[r, : len(row)], real[r, : len(row)] = row, of, True
    arrays = {"ids": ids, "segments": segments, "real": real}
    return Texts(kind=kind, **{name: torch.from_numpy(x) for name, x in arrays.items()})
