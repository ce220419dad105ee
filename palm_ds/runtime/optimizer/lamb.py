"""LAMB, for very large batches (You et al. 2020)."""

from __future__ import annotations

from typing import Any

import torch

from palm_ds.runtime.optimizer.scaled_adam import ScaledAdam, Values


class Lamb(ScaledAdam):
    """LAMB (You et al. 2020, algorithm 2): AdamW's update of each matrix, scaled to the matrix's
    norm.

    Biases, LayerNorm and heads, which have no weight decay, take Adam's step unscaled, as in the
    authors' code.
    """

    uses_norms = True

    def is_scaled(self, group: dict[str, Any]) -> bool:
        return group["decays"]

    def sums(self, values: Values, update: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Squares of the weights and of the update."""
        squares = torch.dot(values.weight, values.weight), torch.dot(update, update)
        return torch.stack(squares).double()

    def factors(self, sums: torch.Tensor, numels: torch.Tensor) -> torch.Tensor:
        """|weights| / |update|; 1 if either is 0."""
        weights, updates = sums.unbind(1)
        usable = (weights > 0) & (updates > 0)
        return torch.where(usable, (weights / updates).sqrt(), 1.0)
