"""Regions of images beside texts: boxes of a detector, each with a vector of features.

    [CLS] a b [SEP] r0 r1 r2     a region is a place of its text, after all tokens

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
    """The regions of a text, in its last places."""

    features: np.ndarray
    """(regions, features) float32"""
    locations: np.ndarray
    """(regions, 5) float32"""

    def __len__(self) -> int:
        return len(self.features)


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
    """(texts with regions,) int32: the flat position of the first region of each, ascending"""

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> BatchRegions:
        """Regions of the changed tensors."""
        return BatchRegions(
            positions=change(self.positions),
            features=change(self.features),
            locations=change(self.locations),
            firsts=change(self.firsts),
        )


def batch_regions(placed: Sequence[tuple[int, PackedRegions]]) -> BatchRegions | None:
    """The regions of texts, with the flat position of the first of each; None if there are none."""
    placed = [(first, regions) for first, regions in placed if len(regions)]
    if not placed:
        return None
    positions = [first + np.arange(len(regions)) for first, regions in placed]
    return BatchRegions(
        positions=torch.from_numpy(np.concatenate(positions)),
        features=_joined([regions.features for _, regions in placed]),
        locations=_joined([regions.locations for _, regions in placed]),
        firsts=torch.tensor([first for first, _ in placed], dtype=torch.int32),
    )


def _joined(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(np.float32))
