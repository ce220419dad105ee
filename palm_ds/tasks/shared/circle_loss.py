"""The circle loss of pairs of images and texts (Sun et al. 2020), as in ERNIE-ViL's retrieval."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, NonNegativeInt

from palm_ds.common.errors import UserError
from palm_ds.common.rng import derive_key, keyed_uniform
from palm_ds.common.settings import InnerShare
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.example import Example, build_input, join, layouts
from palm_ds.tasks.shared.image_text import OptionalImages, image_numbers
from palm_ds.tasks.shared.text_task import ARRANGED_BY

_KEY = derive_key("image negatives")
_BITS = 2.0**53  # of a uniform number


@dataclass(frozen=True, kw_only=True)
class CircleLoss(OptionalImages):
    """A task on pairs of images and texts that may be trained by the circle loss: each pair that
    belongs together beside others that do not, which are drawn from the other rows (ERNIE-ViL's
    retrieval).

    a dog runs | its image     a dog runs | another image     a cat sleeps | the image of the dog
        the pair                   a negative image               a negative text
    """

    loss: Literal["classes", "circle"] = "classes"
    """classes: classify each pair as relevant or not. circle: the circle loss, of images and
    texts."""
    negative_images: NonNegativeInt = 20
    """Circle loss: number of other images for each text."""
    negative_texts: NonNegativeInt = 0
    """Circle loss: number of other texts for each image. The loss of a pair is the mean of two
    losses, over one half each of these images and texts; their number must be even."""
    margin: InnerShare = 0.3
    """Circle loss: the similarity of a pair should be above 1 - margin, that of others below
    margin."""
    scale: Annotated[float, Field(gt=0, le=300)] = 32.0
    """Circle loss: factor of the similarities."""

    num_uniforms = 1
    head_settings = ("loss",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.circle and not self.images:
            raise UserError(
                f"{self.where}.loss: circle compares images and texts; set images: true"
            )
        if self.circle and self.negatives % 2:
            raise UserError(
                f"{self.where}: {self.negatives} negative images and texts; the circle loss takes "
                "them in two halves: give an even number"
            )

    @abstractmethod
    def belongs(self, source: TableSource) -> np.ndarray:
        """(rows,) bool: whose text and image belong together."""

    @property
    def circle(self) -> bool:
        return self.loss == "circle"

    @property
    def negatives(self) -> int:
        return self.negative_images + self.negative_texts

    def for_prediction(self) -> Self:
        return replace(self, negative_images=0, negative_texts=0)

    def longest_text(self, length: int) -> int:
        return self.max_length or length if self.circle else super().longest_text(length)

    def check(self, source: TableSource, *, labeled: bool) -> None:
        if self.circle and not self.max_length:
            raise UserError(
                f"{self.where}.max_length: missing; with the circle loss it is the most tokens of "
                f"a text with its image, and a row of `length` tokens holds {1 + self.negatives}"
            )
        super().check(source, labeled=labeled)

    def check_labels(self, source: TableSource) -> None:
        if self.circle and self.negatives and len(self._pairs(source).images) < 2:
            raise UserError(
                f"{self.where}: {source.name} has texts of fewer than 2 images; the circle loss "
                "takes other images from the other rows"
            )

    def training_items(self, source: TableSource, max_length: int) -> np.ndarray:
        items = self.items(source, max_length)
        return items[self.belongs(source)[items[:, 0]]] if self.circle else items

    def _pairs(self, source: TableSource) -> MatchingPairs:
        return source.cached(
            f"pairs {self.name}", lambda: MatchingPairs.of(source, self.belongs(source))
        )

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: TableSource, max_length: int
    ) -> np.ndarray:
        """Circle loss: `item`, and of the `pairs` of texts and images, negatives behind the own
        pair, `text` and `image` (pairs,), the rows of each, `tokens` (pairs, texts) and `tags`."""
        if not self.circle:
            return super().layout(items, uniform, source, max_length)
        item, many = items[:, 0], 1 + self.negatives
        most = self.input_length(max_length) if self.max_length else max_length // many
        if many * most > max_length:
            raise UserError(
                f"{self.where}.max_length: {most} tokens of a text with its image, and "
                f"{self.negatives} others beside it, but rows hold {max_length}; raise `length` to "
                f"{many * most} or lower it to {max_length // many}"
            )
        text, image = np.repeat(item[:, None], many, 1), np.repeat(item[:, None], many, 1)
        pairs = np.ones_like(item)
        if self.negatives and len(own := np.flatnonzero(self.belongs(source)[item])):
            others = self._pairs(source).others(item[own], uniform[own, 0], self.negatives)
            pairs[own] = many
            image[own, 1 : 1 + self.negative_images] = others[:, : self.negative_images]
            text[own, 1 + self.negative_images :] = others[:, self.negative_images :]
        cut = self.cut_beside(text.ravel(), image.ravel(), source, most)
        length = np.where(np.arange(many) < pairs[:, None], cut.length.reshape(-1, many), 0)
        return layouts(
            length.sum(1),
            item=item,
            pairs=pairs,
            text=text,
            image=image,
            tokens=cut.tokens.reshape(len(item), many, -1),
            tags=cut.tags.reshape(-1, many),
        )

    def example(self, layout: np.void, source: TableSource, rng: np.random.Generator) -> Example:
        if not self.circle:
            return super().example(layout, source, rng)
        columns = [source.encoded(column) for column in self.columns_of(source)]
        parts = []
        for pair in range(int(layout["pairs"])):
            text, tokens = int(layout["text"][pair]), layout["tokens"][pair].tolist()
            pieces = [x.read(text, 0, many) for x, many in zip(columns, tokens, strict=True)]
            image, tags = int(layout["image"][pair]), int(layout["tags"][pair])
            made = build_input(pieces, source.vocabulary)
            parts.append(self.beside_image(made, image, tags, source))
        example = join(parts)
        example.item = int(layout["item"])
        return example

    def input_key(self) -> str:
        own = any(getattr(type(self), x) is not getattr(CircleLoss, x) for x in ARRANGED_BY)
        return super().input_key() if own or self.circle else self.image_key()

    def label_pairs(self, example: Example) -> None:
        """Label the own pair 0, and its negatives by their half. Raises UserError."""
        others = len(example.sub_lengths) - 1
        if others not in (0, self.negatives):
            raise UserError(
                f"{self.where}: it builds its own pairs; name it first in the task group"
            )
        halves = np.repeat([1, 2], others // 2)
        self.label_text(example, np.array([0, *halves], np.int64))
        example.grouped_labels.add(self.name)

    def alike(self, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The circle loss of a probability of one half for all."""
        examples = np.ones(int((targets == 0).sum()))
        each = 2 * self.scale * (0.5 + self.margin) * (0.5 - self.margin)
        share = (targets == 1).sum() / (self.negatives / 2 or 1) / max(len(examples), 1)
        loss = np.logaddexp(0, each + np.log(max(self.negatives, 1) / 2))
        return share * loss * examples, share / (1 + self.negatives) * examples


@dataclass(frozen=True, kw_only=True)
class MatchingPairs:
    """The rows of a table by the image they belong to."""

    pictures: np.ndarray
    """(rows,) int64, equal for rows of the same image."""
    rows: np.ndarray
    """(pairs,) rows whose image and text belong together, those of an image one after the other."""
    images: np.ndarray
    """(images,) their images, as `pictures` numbers them, ascending."""
    starts: np.ndarray
    """(images,) where those of each begin in `rows`."""
    counts: np.ndarray
    """(images,) how many each has."""

    @classmethod
    def of(cls, source: TableSource, belong: np.ndarray) -> MatchingPairs:
        """Of the rows that `belong` (rows,) together."""
        pictures, rows = image_numbers(source), np.flatnonzero(belong)
        rows = rows[np.argsort(pictures[rows], kind="stable")]
        images, starts, counts = np.unique(pictures[rows], return_index=True, return_counts=True)
        return cls(pictures=pictures, rows=rows, images=images, starts=starts, counts=counts)

    def others(self, items: np.ndarray, uniform: np.ndarray, count: int) -> np.ndarray:
        """(n, count) pairs of other images than those of the rows `items` (n,), by one uniform
        number (n,) for each. There must be two images."""
        draws = keyed_uniform(_KEY, (uniform * _BITS).astype(np.int64), 2 * count)
        image, row = draws[:, :count], draws[:, count:]
        own = np.searchsorted(self.images, self.pictures[items])[:, None]
        further = 1 + (image * (len(self.images) - 1)).astype(np.int64)
        other = (own + further) % len(self.images)
        return self.rows[self.starts[other] + (row * self.counts[other]).astype(np.int64)]
