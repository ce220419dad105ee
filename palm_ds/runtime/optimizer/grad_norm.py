"""The Euclidean norm of many numbers, right to 1e-7 at any size.

On a CPU, torch's own fp32 norm adds the squares nearly one by one: over the 16 million numbers of a
token embedding it comes out 6e-4 too small, so that a run clips otherwise than one that shards the
same gradients. Here fp32 adds up small pieces, and float64 adds up the pieces.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

_PIECE = 1 << 14  # numbers


def total_norm(tensors: Iterable[torch.Tensor], dtype: torch.dtype | None = None) -> torch.Tensor:
    """The norm of all tensors together, as a float64 scalar on their device; 0 for none. `dtype`:
    what a tensor or piece of one is summed in (default: its own)."""
    pieces = [piece for tensor in tensors for piece in _pieces(tensor)]
    if not pieces:
        return torch.zeros((), dtype=torch.float64)
    norms = torch._foreach_norm(pieces, 2, dtype)  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack(norms).double().norm()


def _pieces(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """Other devices add up pairwise, which one piece is exact enough for."""
    return tensor.flatten().split(_PIECE) if tensor.device.type == "cpu" else (tensor,)
