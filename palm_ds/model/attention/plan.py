"""Data that an attention implementation needs of a batch, computed once per forward for all
layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from palm_ds.model.ops.dropout import DropoutKeys


@dataclass(frozen=True)
class Tile:
    """Neighboring sequences that attention computes together, or a part of a long one."""

    tokens: int
    bias: torch.Tensor | None
    """(1 or texts, tokens, before + tokens + after), -inf where a token does not attend to another;
    None: all do."""
    before: int = 0
    """Tokens in front of it that it attends to as well."""
    after: int = 0
    """Tokens behind it that it attends to as well."""
    texts: int = 1
    """The number of such tiles in a row, each a text."""


@dataclass(frozen=True, kw_only=True)
class AttentionPlan:
    """Data that an implementation needs of a batch. Nothing in it but tensors changes from batch to
    batch, the tiles of CPUs excepted, so that compiled layers are compiled once."""

    kernel: str
    compute: Callable[..., torch.Tensor]
    """The implementation: (qkv, plan, num_heads, dropout, window) -> (rows, length, hidden)."""
    mask: torch.Tensor | None = None
    """(rows, 1, length, length) bool: whether token i attends to token j."""
    tiles: tuple[Tile, ...] = ()
    layer_tiles: dict[int | None, tuple[Tile, ...]] = field(default_factory=dict)
    """{window: the tiles of layers with it}, computed when the first of them is."""
    cu_seqlens: torch.Tensor | None = None
    """(sequences + 1,) int32. Sequences at its end may be empty."""
    max_seqlen: int = 0
    """No sequence is longer: the length of the rows."""
    bounds: torch.Tensor | None = None
    """(2, rows * length) int32: where the sequence of each token begins and where it has ended."""
    visibility: torch.Tensor | None = None
    """(2, rows * length) int32: the order and the limit of each token, where the mask or the tiles
    do not have them."""
    displaced: bool = False
    """Whether the batch has tokens that stand elsewhere than their positions say."""
    rotations: Mapping[tuple[float, float], tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict
    )
    """Cosines and sines by which layers turn queries and keys, once for all layers of the same base
    and factor."""
    bias: torch.Tensor | None = None
    """(rows or 1, heads, length, length): what is added to the scores; None: nothing."""
    distances: tuple[torch.Tensor, torch.Tensor] | None = None
    """The vectors of distances (1, 2 span, hidden), and which of them an offset has (2, 2 length),
    for layers with disentangled attention."""
    offsets: torch.Tensor | None = None
    """(rows, length, length): that of each pair of tokens, for these layers; None: that of their
    places."""
    distance_keys: DropoutKeys | None = None
    """Those of the vectors of distances."""
    keys: DropoutKeys | None = None
    """What dropout masks are computed from; None: torch draws them."""

    def for_layers(self, count: int) -> list[AttentionPlan]:
        """The same with the dropout keys of each layer, the first of which is number 1."""
        if self.keys is None:
            return [self] * count
        numbers = range(1, count + 1)
        tables = self.distance_keys.sites(numbers) if self.distance_keys else [None] * count
        pairs = zip(self.keys.sites(numbers), tables, strict=True)
        return [replace(self, keys=keys, distance_keys=table) for keys, table in pairs]


def split_heads(qkv: torch.Tensor, num_heads: int) -> tuple[torch.Tensor, ...]:
    """Query, key and value of (rows, length, 3 hidden), each (rows, length, heads, head size)."""
    rows, length, tripled = qkv.shape
    return qkv.view(rows, length, 3, num_heads, tripled // 3 // num_heads).unbind(2)


def softmax(scores: torch.Tensor) -> torch.Tensor:
    """Computed in fp32 at least, returned in the dtype of the scores."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    return scores.softmax(-1, dtype=wide).to(scores.dtype)


def distant(length: int, window: int, device: torch.device) -> torch.Tensor:
    """(length, length) bool: whether two positions are more than `window` tokens apart."""
    at = torch.arange(length, device=device)
    return (at[:, None] - at).abs() > window
