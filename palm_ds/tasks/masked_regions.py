"""Predict masked regions of an image from the others and from its text: their features (UNIMO, Li
et al. 2021) and the detector's distribution over its classes (ERNIE-ViL, Yu et al. 2021).

    [CLS] a dog runs [SEP] | whole image, dog, grass, ball
                           | whole image, 0,   grass, ball      features of the dog: what were they?

In a task group with `masked_words`, words are masked as well. Neither model's pretraining code was
released. After the papers: 15 % of the regions are predicted; a region that overlaps a masked one
by more than `overlap` shows nothing either, though it is not predicted. Our choices: the whole
image then shows the mean of the unmasked regions, since the mean of all would give the masked ones
away; losses are means over features, and divergences rather than cross-entropies, so that they are
0 for a perfect prediction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from pydantic import NonNegativeInt
from torch import nn

from palm_ds.common.config import Several
from palm_ds.common.errors import UserError
from palm_ds.common.settings import InnerShare, Share
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.example import Example
from palm_ds.data.tasks.masking import choose_units
from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.heads.heads import further_loss
from palm_ds.model.heads.regions import CLASSES, RegionClassHead, RegionFeatureHead
from palm_ds.tasks.shared.image_text import ImageTextTask, overlaps

FEATURES = "features"
_COUNTED = 1000
"""Images that the baseline counts."""
_LEAST = 1e-30


@dataclass(frozen=True, kw_only=True)
class MaskedRegions(ImageTextTask):
    """Predicts masked regions of images."""

    rate: InnerShare = 0.15
    """Share of an image's regions to predict; at least one."""
    mask_rate: Share = 0.9
    """Share of the predicted regions whose features are set to zero; the others are shown."""
    overlap: Share = 0.4
    """Regions whose intersection over union with a masked one exceeds this are set to zero too; 1:
    none."""
    predict: Several[Literal["features", "classes"]] = (FEATURES, CLASSES)
    """What is predicted: the features (squared error), the detector's classes (divergence)."""
    classes: NonNegativeInt = 0
    """Number of the detector's classes; 0: as in the training rows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.predict or len(set(self.predict)) < len(self.predict):
            raise UserError(f"{self.where}.predict: name features, classes or both, each once")

    def check(self, source: TableSource, *, labeled: bool) -> None:
        super().check(source, labeled=labeled)
        if CLASSES in self.predict and source.regions(0).classes is None:
            raise UserError(
                f"{source.where(0)}: image: no classes, which {self.where} predicts; predict: "
                "[features] does without"
            )

    def resolved(self, source: TableSource) -> MaskedRegions:
        task, first = super().resolved(source), source.regions(0).classes
        if CLASSES not in self.predict or first is None:
            return replace(task, classes=0)
        return replace(task, classes=self.classes or first.shape[1])

    def label(self, example: Example, source: TableSource, rng: np.random.Generator) -> None:
        """No labels for the image of another row."""
        self.check_beside(example, source)
        assert example.regions is not None
        found = self.regions_of(example.image, source)
        first = int(self.whole_image)
        if example.image != example.item or len(found) == first:
            return
        number = np.arange(len(found)) - first  # each region is a unit, but not the whole image
        where = np.flatnonzero(choose_units(number, self.rate, rng))
        masked = where[rng.random(len(where)) < self.mask_rate]
        example.regions = replace(
            example.regions, features=self._shown(found.features, found.locations, masked)
        )
        places = example.regions.places[where]
        if FEATURES in self.predict:
            example.labels[self.name] = places, found.features[where]
        if CLASSES in self.predict:
            if found.classes is None or found.classes.shape[1] != self.classes:
                raise UserError(
                    f"{source.where(example.image)}: image: no {self.classes} classes for each "
                    "region, which the others have"
                )
            example.labels[self._classes_loss] = places, found.classes[where]

    def _shown(self, features: np.ndarray, locations: np.ndarray, masked: np.ndarray) -> np.ndarray:
        """The features with zeros for masked regions, and for those that they overlap."""
        first, shown = int(self.whole_image), features.copy()
        hidden = overlaps(locations, locations[masked]) > self.overlap
        hidden[:first] = False
        hidden[masked] = True
        shown[hidden] = 0
        if first:
            left = shown[first:][~hidden[first:]]
            shown[0] = left.mean(0) if len(left) else 0
        return shown

    @property
    def _classes_loss(self) -> str:
        """The name of the loss over classes: the task's own if it has no other."""
        return further_loss(self.name, CLASSES) if FEATURES in self.predict else self.name

    def loss_weights(self) -> dict[str, float]:
        names = [self.name, *([self._classes_loss] if CLASSES in self.predict else [])]
        return dict.fromkeys(names, self.weight)

    def head(self, backbone: Encoder) -> nn.Module:
        self.check_encoder(backbone)
        if FEATURES not in self.predict:
            return RegionClassHead(backbone, self.classes)
        return RegionFeatureHead(backbone, self.region_size, classes=self.classes)

    def baseline_of(
        self, loss: str, targets: np.ndarray, source: TableSource
    ) -> tuple[np.ndarray, np.ndarray]:
        """The mean features, or distribution, of the source's regions."""
        of_classes = loss == self._classes_loss and CLASSES in self.predict
        mean = source.cached(f"means {self.name}", lambda: self._means(source))[int(of_classes)]
        targets = targets.reshape(-1, len(mean))
        if not of_classes:
            return ((targets - mean) ** 2).mean(1), np.full(len(targets), np.nan)
        ratio = np.log(np.maximum(targets, _LEAST) / np.maximum(mean, _LEAST))
        return (targets * ratio).sum(1), (targets.argmax(1) == mean.argmax()).astype(float)

    def _means(self, source: TableSource) -> tuple[np.ndarray, np.ndarray]:
        """Those of the first images."""
        found = [source.regions(item) for item in range(min(len(source), _COUNTED))]
        features = np.concatenate([image.features for image in found]).mean(0)
        known = [image.classes for image in found if image.classes is not None]
        return features, np.concatenate(known).mean(0) if known else np.zeros(0)

    def baseline(self, targets: np.ndarray, source: TableSource) -> tuple[np.ndarray, np.ndarray]:
        return self.baseline_of(self.name, targets, source)
