"""Base of tasks on texts with images: a row's text, its object tags, and the regions of an image.

    row ──> [CLS] text_a [SEP] tag tag | whole image, region, region ...

Regions are given, with the features of a detector (docs/images.md). They have places in their row
like tokens, so that texts with images are packed as others are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import numpy as np
from pydantic import NonNegativeInt, PositiveInt

from palm_ds.common.errors import UserError
from palm_ds.data.reader.regions import ImageRegions
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.example import Example, layouts, with_image
from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.inputs.regions import LOCATION_SIZE, PackedRegions
from palm_ds.tasks.shared.text_task import TextTask, level

ImageTask = TypeVar("ImageTask", bound="ImageTextTask")
IMAGE, TAGS = "image", "object_tags"
_WHOLE = np.array([[0, 0, 1, 1, 1]], np.float32)
"""The location of the whole image."""


@dataclass(frozen=True, kw_only=True)
class ImageTextTask(TextTask):
    """A task on rows of a text and an image."""

    max_regions: PositiveInt = 37
    """Maximum regions of an image, the whole image included; further ones are left out."""
    max_tags: NonNegativeInt = 50
    """Maximum tokens of object tags, if the table has them; 0: read none."""
    whole_image: bool = True
    """Put a region of the whole image first, whose features are the mean of the others'."""
    region_size: NonNegativeInt = 0
    """Features of a region; 0: as many as the training rows have."""

    edits_text: ClassVar[bool] = True

    def check(self, source: TableSource, *, labelled: bool) -> None:
        super().check(source, labelled=labelled)
        source.need(IMAGE, self.where)
        source.region_counts()

    def resolved(self: ImageTask, source: TableSource) -> ImageTask:
        source.need(IMAGE, self.where)
        return replace(self, region_size=self.region_size or source.regions(0).features.shape[1])

    def label_roles(self) -> tuple[str, ...]:
        return ()

    def check_encoder(self, backbone: Encoder) -> None:
        """Raises UserError for an encoder that reads no such regions."""
        size = backbone.region_size(backbone.config)
        if not size:
            raise UserError(
                f"{self.where}: reads images, but backbone.kind: {backbone.config.kind} reads "
                f"texts alone; use kind: unimo or ernie_vil with options: {{region_size: "
                f"{self.region_size}}}"
            )
        if size != self.region_size:
            raise UserError(
                f"backbone.options.region_size: {size}, but the regions of {self.where} have "
                f"{self.region_size} features"
            )

    # ---- the input ----

    def images(self, items: np.ndarray, uniform: np.ndarray, source: TableSource) -> np.ndarray:
        """(n,) the rows whose images stand beside the texts of these rows (n,)."""
        return items

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: TableSource, max_length: int
    ) -> np.ndarray:
        """`item`, `tokens` (texts,) of each text, `image`, `regions` and `tags`: the row of the
        image, its regions, and the tokens of its tags."""
        item = items[:, 0]
        image = self.images(item, uniform, source)
        regions = np.minimum(source.region_counts()[image] + self.whole_image, self.max_regions)
        tags = self._tag_lengths(image, source)
        lengths = [source.encoded(column).lengths[item] for column in self.columns_of(source)]
        added = source.vocabulary.around(len(lengths)) + regions + tags
        room = self.input_length(max_length) - added
        if len(full := np.flatnonzero(room < 1)):
            row, rows = full[0], image.tolist()
            raise UserError(
                f"{source.where(rows[row])}: {regions[row]} regions and {tags[row]} tokens of "
                f"tags leave no room for a text in {self.input_length(max_length)} tokens; raise "
                f"`length`, or lower {self.where}.max_regions or max_tags"
            )
        kept = level(np.stack(lengths, 1), room)
        length = kept.sum(1) + added
        return layouts(length, item=item, tokens=kept, image=image, regions=regions, tags=tags)

    def example(self, layout: np.void, source: TableSource, rng: np.random.Generator) -> Example:
        text = super().example(layout, source, rng)
        image, tags = int(layout["image"]), np.zeros(0, np.int64)
        if layout["tags"]:
            tags = source.encoded(TAGS).read(image, 0, int(layout["tags"])).ids
        found = self.regions_of(image, source)
        regions = PackedRegions(features=found.features, locations=found.locations)
        return with_image(text, image, tags, regions, source.vocabulary.unk)

    def regions_of(self, image: int, source: TableSource) -> ImageRegions:
        """The regions of a row's image as examples have them. Raises UserError."""
        found = source.regions(image)
        if found.features.shape[1] != self.region_size:
            raise UserError(
                f"{source.where(image)}: {found.features.shape[1]} features for each region; the "
                f"others have {self.region_size}"
            )
        whole = with_whole_image(found) if self.whole_image else found
        most, classes = self.max_regions, whole.classes
        return ImageRegions(
            features=whole.features[:most],
            locations=whole.locations[:most],
            classes=None if classes is None else classes[:most],
        )

    def _tag_lengths(self, image: np.ndarray, source: TableSource) -> np.ndarray:
        """(n,) tokens of the tags of these images (n,)."""
        if not self.max_tags or TAGS not in source.columns:
            return np.zeros_like(image)
        return np.minimum(source.encoded(TAGS).lengths[image], self.max_tags)


def with_whole_image(regions: ImageRegions) -> ImageRegions:
    """The regions after one of the whole image, the mean of them."""

    def after_mean(values: np.ndarray) -> np.ndarray:
        return np.concatenate([values.mean(0, keepdims=True), values])

    assert regions.locations.shape[1] == LOCATION_SIZE
    return ImageRegions(
        features=after_mean(regions.features),
        locations=np.concatenate([_WHOLE, regions.locations]),
        classes=None if regions.classes is None else after_mean(regions.classes),
    )


def overlaps(locations: np.ndarray, others: Sequence[int] | np.ndarray) -> np.ndarray:
    """(regions,) the largest share that each region has in common with one of `others`:
    intersection over union."""
    x1, y1, x2, y2, area = locations.T[:, :, None]
    a1, b1, a2, b2, other = locations[others].T[:, None, :]
    width = np.clip(np.minimum(x2, a2) - np.maximum(x1, a1), 0, None)
    height = np.clip(np.minimum(y2, b2) - np.maximum(y1, b1), 0, None)
    common = width * height
    return (common / np.maximum(area + other - common, 1e-12)).max(1, initial=0.0)
