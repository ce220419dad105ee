"""Find the part of an image that a text is about: a score of each of its regions (RefCOCO+;
ERNIE-ViL, Yu et al. 2021, section 4.2).

    [CLS] the left dog [SEP] | whole image, dog, grass, dog
                                            1    0      0      overlaps the box by half or more

The box of a row is given in pixels, as `box`. A region is right if it overlaps that box by
`overlap` (intersection over union), and learns this by a sigmoid; a text whose box no region
hits counts as wrong in scores. Predictions: `region`, the number of the region with the
highest score among those of the file, from 0; its `box` in pixels; its probability `score`; and the
`scores` of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.common.settings import PositiveShare, Rate
from palm_ds.data.reader.regions import ImageRegions
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.example import Example
from palm_ds.data.tasks.interfaces import StoredPrediction
from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.heads.regions import RegionScoreHead
from palm_ds.tasks.metrics.probabilities import rounded, sigmoid
from palm_ds.tasks.shared.image_text import ImageInput, overlaps
from palm_ds.tasks.shared.text_task import missing

_COUNTED = 1000
"""Rows that the baseline counts."""


@dataclass(frozen=True, kw_only=True)
class ReferringExpressions(ImageInput):
    """Finds the region that a text is about."""

    label_column: str = "box"
    """The column of the boxes."""
    overlap: PositiveShare = 0.5
    """Minimum intersection over union with the box at which a region is right."""
    dropout: Rate = 0.1
    """Dropout on the input of the head during training."""

    prediction_key = "region"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_regions <= self._first:
            raise UserError(f"{self.where}.max_regions: 1, the whole image, leaves none to find")

    def check_labels(self, source: TableSource) -> None:
        source.need(self.label_column, self.where)
        missing(source.column(self.label_column), source, self.label_column)

    @property
    def _first(self) -> int:
        """The first region of an example that is one of the file's."""
        return int(self.whole_image)

    def _right(self, found: ImageRegions, box: list[float] | None) -> np.ndarray:
        """(regions,) float32: 1 for those that overlap the box enough."""
        if box is None:
            return np.zeros(len(found), np.float32)
        corners = np.array(box) / np.tile(found.size, 2)
        area = (corners[2:] - corners[:2]).prod()
        common = overlaps(found.locations, np.append(corners, area)[None])
        return (common >= self.overlap).astype(np.float32)

    def _box(self, source: TableSource, item: int) -> list[float] | None:
        known = self.label_column in source.columns
        return source.column(self.label_column)[item] if known else None

    def label(self, example: Example, source: TableSource, rng: np.random.Generator) -> None:
        self.check_beside(example, source)
        assert example.regions is not None
        found = self.regions_of(example.item, source)
        right = self._right(found, self._box(source, example.item))
        places = example.regions.places[self._first :]
        example.labels[self.name] = places, right[self._first :]
        example.grouped_labels.add(self.name)

    def head(self, backbone: Encoder) -> RegionScoreHead:
        self.check_encoder(backbone)
        return RegionScoreHead(backbone, dropout=self.dropout)

    def baseline(self, targets: np.ndarray, source: TableSource) -> tuple[np.ndarray, np.ndarray]:
        """Any region, by the share of those that are right; what an image counts is divided among
        its regions."""
        share, regions = source.cached(f"right regions {self.name}", lambda: self._share(source))
        share = float(np.clip(share, 1e-6, 1 - 1e-6))
        loss = -(share * np.log(share) + (1 - share) * np.log(1 - share))
        return np.full(len(targets), loss / regions), np.full(len(targets), share / regions)

    def _share(self, source: TableSource) -> tuple[float, float]:
        """Of the regions of an image, and how many it has, on average over the first rows."""
        right = [
            self._right(self.regions_of(item, source), self._box(source, item))[self._first :]
            for item in range(min(len(source), _COUNTED))
        ]
        return float(np.mean([x.mean() for x in right])), float(np.mean([len(x) for x in right]))

    def decode(self, scores: np.ndarray, example: Example, source: TableSource) -> dict[str, Any]:
        found, probs = self.regions_of(example.item, source), sigmoid(scores[:, 0])
        region = int(probs.argmax())
        corners = found.locations[self._first + region, :4] * np.tile(found.size, 2)
        return {
            "region": region,
            "box": [round(float(x), 2) for x in corners],
            "score": float(probs[region]),
            "scores": rounded(probs),
        }

    def metrics(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> dict[str, float]:
        """The share of the rows with a box whose region is right; empty if there are none."""
        right = [
            self._right(source.regions(item), box)[prediction["region"] :][:1].sum()
            for item, prediction in predictions.items()
            if (box := self._box(source, item)) is not None
        ]
        return {"accuracy": float(np.mean(right))} if right else {}

    def read_prediction(self, stored: StoredPrediction) -> dict[str, Any]:
        region = int(stored.number("region", stored.value("region")))
        if region < 0:
            raise UserError(f"{stored.place}: region: {region} is below 0, the first region")
        return {**stored.values, "region": region}
