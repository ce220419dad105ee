"""Embedding of the regions of images: LayerNorm of a linear map of the features plus one of the
location."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from palm_ds.model.inputs.batch import Batch
from palm_ds.model.inputs.regions import LOCATION_SIZE


class RegionEmbedding(nn.Module):
    """Vectors of regions, which stand in the place of their tokens' embeddings."""

    def __init__(self, region_size: int, hidden_size: int, norm: nn.Module):
        super().__init__()
        self.feature = nn.Linear(region_size, hidden_size)
        self.location = nn.Linear(LOCATION_SIZE, hidden_size)
        self.norm = norm

    def forward(self, features: torch.Tensor, locations: torch.Tensor) -> torch.Tensor:
        """(regions, hidden) of features (regions, any) and locations (regions, 5)."""
        dtype = self.feature.weight.dtype
        return self.norm(self.feature(features.to(dtype)) + self.location(locations.to(dtype)))

    def placed(
        self,
        batch: Batch,
        x: torch.Tensor,
        drop: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """x (rows, length, hidden) with the vectors of the batch's regions in their places, after
        `drop(vectors, flat positions)`. Without regions the parameters get gradients of 0, as they
        must in every forward pass."""
        if (regions := batch.regions) is None:
            nothing = x.new_zeros(1, self.feature.in_features), x.new_zeros(1, LOCATION_SIZE)
            return x + self(*nothing).sum() * 0
        vectors = drop(self(regions.features, regions.locations), regions.positions).to(x.dtype)
        return x.flatten(0, 1).index_copy(0, regions.positions, vectors).view_as(x)
