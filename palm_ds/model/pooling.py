"""From the vectors of tokens to one vector of their text.

pool(vectors, lengths, "mean")            texts one after the other, as in packed rows
pool_padded(vectors, real, how)           a padded row for each text, as in exported graphs
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch.nn import functional as F  # noqa: N812

from palm_ds.common.settings import Settings, one_of

POOLINGS = ("mean", "cls", "max")
SPLADE = "splade"
"""The pooling of a masked-LM head's scores into a weight for each word of the vocabulary, of which
most are 0 (palm_ds/model/ops/splade.py)."""
OF_ALL_TOKENS = ("mean", "max", SPLADE)
"""The poolings that read more than the first token."""


@dataclass(frozen=True, kw_only=True)
class Pooling(Settings):
    """The vector of a text, made from those of its tokens, special ones included."""

    pooling: Annotated[str, one_of((*POOLINGS, SPLADE))] = "mean"
    """mean, cls or max over the tokens of a text, or splade."""
    normalize: bool = False
    """Scale vectors to length 1."""
    max_length: int = 0
    """Tokens after which texts are truncated; 0: what the encoder reads."""


@dataclass(frozen=True, kw_only=True)
class TextPooling(Pooling):
    """The same, and how such vectors are meant to be used."""

    similarity: str = "cosine"
    """How two vectors are compared: cosine or dot."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """{name: what is put before a text}, such as `query` and `document`."""
    trained: bool = False
    """Whether the model was trained to give such vectors."""


def pool(vectors: torch.Tensor, lengths: torch.Tensor, pooling: str) -> torch.Tensor:
    """The vectors (texts, hidden) of texts of `lengths` (texts,) tokens, whose own vectors (tokens,
    hidden) follow each other; fp32 but for cls."""
    if pooling == "cls":
        return vectors.index_select(0, lengths.cumsum(0) - lengths)
    return torch.segment_reduce(vectors.float(), pooling, lengths=lengths, unsafe=True)


def pool_padded(vectors: torch.Tensor, real: torch.Tensor, how: Pooling) -> torch.Tensor:
    """The vectors (texts, hidden) of texts (texts, length, hidden) whose tokens are `real` (texts,
    length). Without segments, which ONNX has not."""
    mask = real.unsqueeze(-1)
    if how.pooling == "mean":
        pooled = torch.where(mask, vectors, 0.0).sum(1) / mask.sum(1).clamp(min=1)
    elif how.pooling == "max":
        pooled = torch.where(mask, vectors, -torch.inf).amax(1)
    else:
        pooled = first_tokens(vectors, real)
    return F.normalize(pooled, dim=-1) if how.normalize else pooled


def first_tokens(vectors: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """The vectors (texts, hidden) of the first `real` tokens of texts (texts, length, hidden)."""
    return vectors[torch.arange(vectors.shape[0]), real.long().argmax(1)]
