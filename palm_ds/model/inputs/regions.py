"""Regions of images beside texts: boxes of a detector, each with a vector of features.

    [CLS] a b [SEP] r0 r1 r2     a region is a place of its text, after the tokens beside it

A place has a token like any other, which an encoder that reads images replaces: by what it makes of
the region's features and location. So texts with images are packed in rows as all others are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

LOCATION_SIZE = 5
"""Numbers of a location: x1, y1, x2, y2 and the area, as shares of the image's."""


@dataclass(frozen=True, kw_only=True)
class PackedRegions:
    """The regions of a text, or of several that stay together in a row. Those of an image stand one
    behind the other, and a token before the next image."""

    features: np.ndarray
    """(regions, features) float32"""
    locations: np.ndarray
    """(regions, 5) float32"""
    places: np.ndarray
    """(regions,) int64, ascending: where they are in their text"""

    def __len__(self) -> int:
        return len(self.features)

    @property
    def firsts(self) -> np.ndarray:
        """(images,) the place of the first region of each image."""
        return self.places[np.diff(self.places, prepend=-2) > 1]


def join_regions(parts: Sequence[tuple[int, PackedRegions]]) -> PackedRegions:
    """The regions of texts that become one, with the place of the first token of each."""
    return PackedRegions(
        features=np.concatenate([regions.features for _, regions in parts]),
        locations=np.concatenate([regions.locations for _, regions in parts]),
        places=np.concatenate([start + regions.places for start, regions in parts]),
    )


@dataclass(frozen=True, kw_only=True)
class BatchRegions:
    """The regions of a batch."""

    positions: torch.Tensor
    """(regions,) int64, flat, ascending"""
    features: torch.Tensor
    """(regions, features) float32"""
    locations: torch.Tensor
    """(regions, 5) float32"""
    firsts: torch.Tensor
    """(images,) int32: the flat position of the first region of each, ascending"""

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> BatchRegions:
        """Regions of the changed tensors."""
        return BatchRegions(
            positions=change(self.positions),
            features=change(self.features),
            locations=change(self.locations),
            firsts=change(self.firsts),
        )


def batch_regions(placed: Sequence[tuple[int, PackedRegions]]) -> BatchRegions | None:
    """The regions of texts, with the flat position of the first token of each; None if there are
    none."""
    placed = [(first, regions) for first, regions in placed if len(regions)]
    if not placed:
        return None
    joined = join_regions(placed)
    firsts = np.concatenate([start + regions.firsts for start, regions in placed])
    return BatchRegions(
        positions=torch.from_numpy(joined.places),
        features=torch.from_numpy(joined.features.astype(np.float32)),
        locations=torch.from_numpy(joined.locations.astype(np.float32)),
        firsts=torch.from_numpy(firsts.astype(np.int32)),
    )
