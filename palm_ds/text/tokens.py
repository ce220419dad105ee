"""Token ids: the special tokens of a vocabulary, and spans of a corpus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """The ids of a vocabulary that tasks need."""

    size: int
    pad: int
    cls: int
    sep: int
    mask: int
    unk: int
    regular: np.ndarray
    """(n,) int64: ids eligible as random replacements in masking."""


@dataclass(frozen=True)
class TokenSpan:
    """Consecutive tokens of one document."""

    start: int
    """Offset of the first token in the source."""
    ids: np.ndarray
    """(tokens,) int64"""
    annotations: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Name -> (tokens,) uint8."""

    def __len__(self) -> int:
        return len(self.ids)
