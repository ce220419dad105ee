"""Does the image belong to the text? (ERNIE-ViL, UNIMO)

    [CLS] a dog runs [SEP] | regions of its image      match
    [CLS] a dog runs [SEP] | regions of another one    no match

The first region, that of the whole image, and [CLS] each have a pooler; the head reads the product
of the two. Rows that name the same image (several captions of one) are never mismatched.
Predictions are of the pairs as they are: `label`, `logits`, and `probs`, the second of which is
that they belong together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from torch import nn

from palm_ds.common.errors import UserError
from palm_ds.common.settings import Share
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.example import Example
from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.heads.regions import ImageMatchHead
from palm_ds.tasks.metrics.classes import accuracy, auc
from palm_ds.tasks.metrics.probabilities import rounded, softmax, whole_share
from palm_ds.tasks.shared.image_text import ImageTextTask, image_numbers

NAMES = ("another image", "its image")


@dataclass(frozen=True, kw_only=True)
class ImageTextMatching(ImageTextTask):
    """Tells the image of a text from another one."""

    mismatched: Share = 0.5
    """Share of the texts that get the image of another row."""

    labels = NAMES
    edits_text = False
    num_uniforms = 2
    prediction_key = "label"
    eval_only = ("belongs",)

    def for_prediction(self) -> Self:
        return replace(self, mismatched=0.0)

    def check(self, source: TableSource, *, labeled: bool) -> None:
        super().check(source, labeled=labeled)
        if labeled and len(np.unique(image_numbers(source))) < 2:
            raise UserError(f"{self.where}: {source.name} has a single image; 2 are needed")

    def image_items(
        self, items: np.ndarray, uniform: np.ndarray, source: TableSource
    ) -> np.ndarray:
        further = 1 + (uniform[:, 1] * (len(source) - 1)).astype(np.int64)
        other = (items + further) % len(source)
        return np.where(uniform[:, 0] < self.mismatched, other, items)

    def label(self, example: Example, source: TableSource, rng: np.random.Generator) -> None:
        target = np.array([_belongs(example, source)], np.int64)
        example.labels[self.name] = np.zeros(1, np.int64), target

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

    def decode(self, scores: np.ndarray, example: Example, source: TableSource) -> dict[str, Any]:
        return {
            "label": NAMES[int(scores[0].argmax())],
            "logits": rounded(scores[0]),
            "probs": rounded(softmax(scores[0])),
            "belongs": _belongs(example, source),
        }

    def metrics(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> dict[str, float]:
        """Accuracy and AUC where some of the images are those of other rows, as in a run."""
        known = [each["belongs"] for each in predictions.values() if "belongs" in each]
        if len(known) < len(predictions) or len(set(known)) < 2:
            return {}
        labels = [each["label"] == NAMES[1] for each in predictions.values()]
        probabilities = whole_share(np.array([x["probs"] for x in predictions.values()]), 1)
        return {"accuracy": accuracy(labels, known), "auc": auc(probabilities, known, True)}


def _belongs(example: Example, source: TableSource) -> bool:
    """Whether its image is that of its text."""
    pictures = image_numbers(source)
    return bool(pictures[example.image] == pictures[example.item])
