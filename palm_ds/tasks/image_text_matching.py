"""Does the image belong to the text? (ERNIE-ViL, UNIMO)

    [CLS] a dog runs [SEP] | regions of its image      match
    [CLS] a dog runs [SEP] | regions of another one    no match

The first region, that of the whole image, and [CLS] go through a pooler each; the head reads their
product. Rows that name the same image (several captions of one) are never mismatched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import nn

from palm_ds.common.errors import UserError
from palm_ds.common.settings import Share
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.example import Example
from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.heads.regions import ImageMatchHead
from palm_ds.tasks.shared.image_text import ImageTextTask, image_numbers

NAMES = ("another image", "its image")


@dataclass(frozen=True, kw_only=True)
class ImageTextMatching(ImageTextTask):
    """Tells the image of a text from another one."""

    mismatched: Share = 0.5
    """Share of the texts that get the image of another row."""

    labels = NAMES
    num_uniforms: ClassVar[int] = 2

    def check(self, source: TableSource, *, labelled: bool) -> None:
        super().check(source, labelled=labelled)
        if labelled and len(np.unique(image_numbers(source))) < 2:
            raise UserError(f"{self.where}: {source.name} has a single image; 2 are needed")

    def image_items(
        self, items: np.ndarray, uniform: np.ndarray, source: TableSource
    ) -> np.ndarray:
        further = 1 + (uniform[:, 1] * (len(source) - 1)).astype(np.int64)
        other = (items + further) % len(source)
        return np.where(uniform[:, 0] < self.mismatched, other, items)

    def label(self, example: Example, source: TableSource, rng: np.random.Generator) -> None:
        pictures = image_numbers(source)
        same = pictures[example.image] == pictures[example.item]
        example.labels[self.name] = np.zeros(1, np.int64), np.array([int(same)])

    @classmethod
    def labels_others(cls) -> bool:
        """Its labels need images of other rows."""
        return False

    def head(self, backbone: Encoder) -> nn.Module:
        self.check_encoder(backbone)
        return ImageMatchHead(backbone)

    def baseline(self, targets: np.ndarray, source: TableSource) -> tuple[np.ndarray, np.ndarray]:
        """The likelier class."""
        share = np.array([self.mismatched, 1 - self.mismatched]).clip(1e-6, 1 - 1e-6)
        return -np.log(share[targets]), (targets == share.argmax()).astype(float)
