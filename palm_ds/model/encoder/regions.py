"""Regions of images in an encoder: their embedding, LayerNorm of a linear map of the features plus
one of the location, and what heads read of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.inputs.regions import LOCATION_SIZE
from palm_ds.model.ops.dropout import DropoutKeys, dropout


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
        self, batch: Batch, x: torch.Tensor, rate: float, keys: DropoutKeys | None
    ) -> torch.Tensor:
        """x (rows, length, hidden) with the vectors of the batch's regions in their places, after
        dropout in training. Without regions the parameters get gradients of 0, as they
        must in every forward pass."""
        if (regions := batch.regions) is None:
            nothing = x.new_zeros(1, self.feature.in_features), x.new_zeros(1, LOCATION_SIZE)
            return x + self(*nothing).sum() * 0
        places = regions.positions
        keys = keys and keys.select(places)
        vectors = self(regions.features, regions.locations)
        vectors = dropout(vectors, rate if self.training else 0.0, keys).to(x.dtype)
        return x.flatten(0, 1).index_copy(0, places, vectors).view_as(x)


class ReadsImages(nn.Module):
    """An encoder's answers about images. Those here are of one that reads texts alone."""

    config: EncoderConfig
    pooler: nn.Module

    @classmethod
    def region_size(cls, config: EncoderConfig) -> int:
        """Features of a region of an image; 0: it reads texts alone."""
        return 0

    @classmethod
    def paddle_json(cls, config: EncoderConfig) -> dict[str, Any]:
        """Keys of ERNIE's configuration besides the usual ones."""
        return {}

    def of_texts(self, rows: torch.Tensor) -> torch.Tensor:
        """The part of the rows (n, any) that `forward` returned of tokens that heads read."""
        return rows

    def of_regions(self, rows: torch.Tensor) -> torch.Tensor:
        """The same of regions: (n, `region_width`)."""
        return rows

    @property
    def region_width(self) -> int:
        """Width of the vectors of regions."""
        return self.config.hidden_size

    @property
    def match_width(self) -> int:
        """Width of what `match` returns."""
        return self.config.hidden_size

    @property
    def image_pooler(self) -> nn.Module:
        """The pooler of images, of an encoder that reads them."""
        raise NotImplementedError(f"{type(self).__name__} reads no images")

    def match(self, rows: torch.Tensor) -> torch.Tensor:
        """The input (n, match_width) of heads that compare an image with a text: the product of
        what the poolers make of the first region and of the first token. `rows` (2 n, any): those
        of all first regions, then those of the first tokens of their texts."""
        regions, tokens = rows.chunk(2)
        images = self.image_pooler(self.of_regions(regions))
        return images * self.pooler(self.of_texts(tokens))
