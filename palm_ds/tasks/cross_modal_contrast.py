"""The vector of an image is closer to those of its texts than to all others of a step, and that of
a text to its image's (cross-modal contrastive learning: UNIMO, Li et al. 2021).

    [CLS] [SEP] | regions        the image alone: its vector is that of [CLS]
    [CLS] a dog runs [SEP]       its text
    [CLS] a dog is running [SEP] `positives`: rewritten, or found by retrieval
    [CLS] a cat runs [SEP]       `negatives`: rewritten so that it is no longer true

Over all images and texts of a step, in whatever micro-batch and process they are, an image has the
loss - log of (the sum over its texts of exp(similarity / temperature) / the sum over all texts),
and its text the same over images. An image that was found for a text is a further row of both. The
rewriting and the search are not part of palm_ds. UNIMO encodes a pair and its rewritten texts
jointly, and only what is retrieved separately; here everything is encoded separately, so that all
of a step can be compared. Predictions: `score`, the similarity of the image and its text, and
`scores`, of all texts of the row. Metrics search all texts of the evaluated rows for every image,
and the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
from pydantic import PositiveFloat

from palm_ds.common.errors import UserError
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.example import Example, build_input, join, layouts, text_numbers
from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.heads.regions import CrossModalHead, Member
from palm_ds.tasks.metrics.counts import mean
from palm_ds.tasks.metrics.probabilities import rounded
from palm_ds.tasks.shared.embedding_task import DenseEmbeddingTask, need_text
from palm_ds.tasks.shared.image_text import ImageInput, image_numbers
from palm_ds.text.tokens import TokenSpan

TEXT, POSITIVES, NEGATIVES = "text_a", "positives", "negatives"


@dataclass(frozen=True, kw_only=True)
class CrossModalContrast(ImageInput, DenseEmbeddingTask):
    """Trains vectors of images and texts to find each other."""

    pooling: Literal["mean", "cls"] = "cls"
    """A text's or an image's vector: that of [CLS], or the mean over all places (UNIMO alone)."""
    temperature: PositiveFloat = 0.07
    """Similarities are divided by it: the smaller, the more the hardest negatives count."""

    prediction_key = "score"

    def columns_of(self, source: TableSource) -> tuple[str, ...]:
        source.need(TEXT, self.where)
        return (TEXT,)

    def label_roles(self) -> tuple[str, ...]:
        return ()

    def check(self, source: TableSource, *, labeled: bool) -> None:
        super().check(source, labeled=labeled)
        for item in range(len(source)):
            self.row_texts(source, item)

    def check_step(self, source: TableSource, examples: int) -> None:
        if examples < 2:
            raise UserError(f"{self.where}: one row per step: nothing to compare; raise `batch`")

    # ---- examples ----

    def row_texts(self, source: TableSource, item: int) -> list[str]:
        """Its text, those that say the same, then those that do not. Raises UserError."""
        own = need_text(source.column(TEXT)[item], source, item, TEXT)
        return [
            own,
            *self._further(source, item, POSITIVES),
            *self._further(source, item, NEGATIVES),
        ]

    def _further(self, source: TableSource, item: int, column: str) -> list[str]:
        if column not in source.columns:
            return []
        texts = source.column(column)[item] or []
        return [need_text(text, source, item, column) for text in texts]

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: TableSource, max_length: int
    ) -> np.ndarray:
        """`item`, the `tokens` (most texts,) of each text, special ones included, and the `tags` of
        the image."""
        item, most = items[:, 0], self.input_length(max_length)
        special = source.vocabulary.around(1)
        regions, tags = self.image_lengths(item, source, most - special)
        image = special + regions + tags
        added = np.full(len(item), special)
        kept = self.encoded(source).cut(item, added, source, most, max_length - image)
        return layouts(image + kept.sum(1), item=item, tokens=kept, tags=tags)

    def example(self, layout: np.void, source: TableSource, rng: np.random.Generator) -> Example:
        item, texts, known = int(layout["item"]), self.encoded(source), source.vocabulary
        nothing = build_input([TokenSpan(0, np.zeros(0, np.int64))], known)
        pieces = [
            build_input([texts.tokens.read(text, 0, int(tokens) - known.around(1))], known)
            for text, tokens in zip(texts.of(item), layout["tokens"], strict=False)
        ]
        example = join([self.beside_image(nothing, item, int(layout["tags"]), source), *pieces])
        example.item = example.image = item
        return example

    def label(self, example: Example, source: TableSource, rng: np.random.Generator) -> None:
        targets = np.zeros((len(example.sub_lengths), 2), np.int64)
        targets[:, 1] = text_numbers(example)
        targets[0] = Member.IMAGE, _number(source.regions(example.item).features)
        targets[1:, 0] = Member.NEGATIVE
        targets[2 : 2 + len(self._further(source, example.item, POSITIVES)), 0] = Member.POSITIVE
        targets[1, 0] = Member.TEXT
        self.add_labels(example, targets)

    def class_name(self, label: int) -> str:
        return Member(label).name.lower()

    # ---- head and predictions ----

    def head(self, backbone: Encoder) -> CrossModalHead:
        self.check_encoder(backbone)
        if self.pooling == "mean" and backbone.region_width != backbone.hidden_size:
            raise UserError(
                f"{self.where}.pooling: mean, but {backbone.config.kind} has vectors of another "
                "width for regions; use cls"
            )
        return CrossModalHead(self.vector_settings(backbone), temperature=self.temperature)

    def decode(self, scores: np.ndarray, example: Example, source: TableSource) -> dict[str, Any]:
        vectors = self.compare(scores)
        own = vectors[1:] @ vectors[0]
        return {"score": round(float(own[0]), 6), "scores": rounded(own), "vectors": vectors}

    def metrics(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> dict[str, float]:
        """Recalls in both directions; empty for predictions of a file, which have no vectors."""
        if not predictions or not all("vectors" in each for each in predictions.values()):
            return {}
        images: dict[int, np.ndarray] = {}
        texts: dict[str, np.ndarray] = {}
        belong: set[tuple[int, str]] = set()
        for item, each in predictions.items():
            image, own = int(image_numbers(source)[item]), self.row_texts(source, item)
            images[image] = each["vectors"][0]
            texts |= dict(zip(own, each["vectors"][1:], strict=True))
            same = 1 + len(self._further(source, item, POSITIVES))
            belong |= {(image, text) for text in own[:same]}
        row, column = ({each: n for n, each in enumerate(some)} for some in (images, texts))
        relevant = np.zeros((len(images), len(texts)), bool)
        relevant[*np.array([(row[image], column[text]) for image, text in belong]).T] = True
        similar = np.array(list(images.values())) @ np.array(list(texts.values())).T
        found = recalls("text", similar, relevant)
        asked = relevant.any(0)
        return found | recalls("image", similar.T[asked], relevant.T[asked])


def recalls(wanted: str, scores: np.ndarray, relevant: np.ndarray) -> dict[str, float]:
    """The recall of `wanted` by their `scores` (queries, candidates) for queries, each of which has
    `relevant` candidates. Ties earn nothing, as in palm_ds/tasks/metrics/ranking.py."""
    known = np.where(np.isnan(scores), -np.inf, scores)
    best = np.where(relevant, known, -np.inf).max(1, keepdims=True)
    ahead = ((known >= best) & ~relevant).sum(1)
    return {f"{wanted}_recall@{k}": mean(ahead < k) for k in (1, 5, 10)}


def _number(features: np.ndarray) -> int:
    """Equal for images with the same features."""
    hashed = blake2b(np.ascontiguousarray(features, np.float32).tobytes(), digest_size=8)
    return int.from_bytes(hashed.digest(), "little", signed=True)
