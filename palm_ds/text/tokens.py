"""Token ids: the special tokens of a vocabulary, and spans of a corpus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

Count = TypeVar("Count", int, np.ndarray)


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
    attn: int | None = None
    noise: int | None = None
    """[ATTN] and [NOISE] of ERNIE-GEN, in vocabularies that have them."""
    separators: int = 1
    """[SEP] tokens between two texts; RoBERTa's tokenizers put 2."""
    second_type: int = 1
    """The token type of the second of two texts; 0 if the tokenizer does not tell them apart."""

    def types(self, texts: int) -> Sequence[int]:
        """The token type of each text: 0, 1, ..., or 0 for all."""
        return [number * self.second_type for number in range(texts)]

    def around(self, texts: Count) -> Count:
        """The number of special tokens in an input of this many texts."""
        return 2 + (texts - 1) * self.separators


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
