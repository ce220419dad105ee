"""Tokens by their ids: the special ones of a vocabulary, and spans of a source's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """The ids of a vocabulary that tasks need to know."""

    size: int
    pad: int
    cls: int
    sep: int
    mask: int
    unk: int
    regular: np.ndarray
    """(n,) int64: the ids that a random replacement may take."""


@dataclass(frozen=True)
class TokenSpan:
    """Consecutive tokens of one document."""

    start: int
    """Offset of the first token in the source."""
    ids: np.ndarray
    """(tokens,) int64"""
    marks: Mapping[str, np.ndarray] = field(default_factory=dict)
    """{annotation: (tokens,) uint8}"""

    def __len__(self) -> int:
        return len(self.ids)
