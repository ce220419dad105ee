"""Teacher outputs for a batch, besides the scores among its labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch


@dataclass
class EncoderStates:
    """States of a forward pass of an encoder, by the number of the layer, from 1."""

    embeddings: torch.Tensor | None = None  # (rows, length, hidden)
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)  # (rows, length, hidden)
    qkv: dict[int, torch.Tensor] = field(default_factory=dict)  # (rows, length, 3 hidden)


class VocabularyScores(Protocol):
    """A teacher's scores of the vocabulary for n rows."""

    def scores(self, inside: slice, size: int) -> torch.Tensor:
        """Those of some rows: (rows, size) in fp32; minus infinity where the teacher gives
        none."""
        ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class TeacherOutputs:
    """Teacher outputs for a batch."""

    states: EncoderStates | None = None
    words: Mapping[str, VocabularyScores] = field(default_factory=dict)
    """{task of masked words: scores at its soft labels}"""
