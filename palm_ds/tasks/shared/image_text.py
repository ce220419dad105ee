"""Bases of tasks on whole texts, alone or with images: a row's text, its object tags, and the
regions of an image.

    row ──> [CLS] text_a [SEP] tag tag | whole image, region, region ...

Regions are given, with the features of a detector (docs/images.md). They have places in their row
like tokens, so that texts with images are packed as others are.

A text alone is read as what the encoder's pooler makes of it, or as the mean over its tokens. The
mean is what sentence-transformers' encoders are trained to give; their pooler is left as it was
before that. A class of transformers always reads the pooler, so a head of means is written as a
CrossEncoder of sentence-transformers (palm_ds/weights/formats/huggingface/cross_encoder.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self, TypeAlias, TypeVar

import numpy as np
from pydantic import NonNegativeInt, PositiveInt

from palm_ds.common.errors import UserError
from palm_ds.data.reader.regions import ImageRegions
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.example import Example, layouts, with_image
from palm_ds.data.tasks.interfaces import PAIR, Form, FormField
from palm_ds.data.tasks.task import Task
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import Encoder, encoder_class
from palm_ds.model.heads.outputs import HeadOutputs
from palm_ds.model.inputs.regions import LOCATION_SIZE
from palm_ds.tasks.shared.text_task import ARRANGED_BY, TextTask, level

ImageTask = TypeVar("ImageTask", bound="ImageInput")
HeadPooling: TypeAlias = Literal["pooler", "mean"]
IMAGE, TAGS = "image", "object_tags"
IMAGE_FIELD = FormField(
    name=IMAGE,
    role=IMAGE,
    label='regions, {"width": 640, "height": 480, "boxes": [[x1, y1, x2, y2]], '
    '"features": [[...]]}',
    value="",
    parsed=True,
)
_WHOLE = np.array([[0, 0, 1, 1, 1]], np.float32)
"""The location of the whole image."""


@dataclass(frozen=True, kw_only=True)
class CutTexts:
    """The tokens of texts, and of images beside them, that fit."""

    length: np.ndarray
    """(n,) in all, with special tokens"""
    tokens: np.ndarray
    """(n, texts) of each text"""
    regions: np.ndarray
    """(n,)"""
    tags: np.ndarray
    """(n,) of object tags"""


@dataclass(frozen=True, kw_only=True)
class ImageInput(TextTask):
    """A task on rows of texts and an image."""

    max_regions: PositiveInt = 37
    """Maximum regions of an image, the whole image included; further ones are left out."""
    max_tags: NonNegativeInt = 50
    """Maximum tokens of object tags, if the table has them; 0: read none."""
    whole_image: bool = True
    """Put a region for the whole image first, with the mean of the other regions' features."""
    region_size: NonNegativeInt = 0
    """Number of features of a region; 0: as in the training rows."""

    about_image: ClassVar[str] = ""
    """What it does where it reads images, for the page; by default what it does."""

    @property
    def reads_images(self) -> bool:
        """Whether it does; otherwise the settings of images say nothing."""
        return True

    def check(self, source: TableSource, *, labeled: bool) -> None:
        super().check(source, labeled=labeled)
        if self.reads_images:
            source.need(IMAGE, self.where)
            source.region_counts()

    def resolved(self: ImageTask, source: TableSource) -> ImageTask:
        task: ImageTask = super().resolved(source)  # pyright: ignore[reportAssignmentType]
        if not self.reads_images:
            return task
        source.need(IMAGE, self.where)
        return replace(task, region_size=self.region_size or source.regions(0).features.shape[1])

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

    # ---- the page of the server ----

    def form(self) -> Form:
        form = super().form()
        if self.reads_images:
            own = self.texts or PAIR[:1]
            form = replace(form, fields=tuple(x for x in form.fields if x.role in own))
        return self.with_image(form)

    def with_image(self, form: Form) -> Form:
        """The form of its texts with a field for the regions, if it reads images."""
        if not self.reads_images:
            return form
        return replace(
            form, about=self.about_image or form.about, fields=(*form.fields, IMAGE_FIELD)
        )

    # ---- the input ----

    def image_items(
        self, items: np.ndarray, uniform: np.ndarray, source: TableSource
    ) -> np.ndarray:
        """(n,) the rows whose images stand beside the texts of these rows (n,)."""
        return items

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: TableSource, max_length: int
    ) -> np.ndarray:
        """`item`, `tokens` (texts,) of each text, `image`, `regions` and `tags`: the row of the
        image, its regions, and the tokens of its tags."""
        if not self.reads_images:
            return super().layout(items, uniform, source, max_length)
        item = items[:, 0]
        image = self.image_items(item, uniform, source)
        cut = self.cut_beside(item, image, source, self.input_length(max_length))
        return layouts(
            cut.length,
            item=item,
            tokens=cut.tokens,
            image=image,
            regions=cut.regions,
            tags=cut.tags,
        )

    def cut_beside(
        self, item: np.ndarray, image: np.ndarray, source: TableSource, most: int
    ) -> CutTexts:
        """Texts of rows `item` (n,) beside the images of rows `image` (n,), in `most` tokens."""
        lengths = [source.encoded(column).lengths[item] for column in self.columns_of(source)]
        special = source.vocabulary.around(len(lengths))
        regions, tags = self.image_lengths(image, source, most - special)
        added = special + regions + tags
        kept = level(np.stack(lengths, 1), most - added)
        return CutTexts(length=kept.sum(1) + added, tokens=kept, regions=regions, tags=tags)

    def image_lengths(
        self, image: np.ndarray, source: TableSource, room: int | np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(n,) the regions of these images (n,), and (n,) the tokens of their tags. Raises
        UserError if of `room` tokens they leave none for a text."""
        regions = np.minimum(source.region_counts()[image] + self.whole_image, self.max_regions)
        tags = np.zeros_like(image)
        if self.max_tags and TAGS in source.columns:
            tags = np.minimum(source.encoded(TAGS).lengths[image], self.max_tags)
        if len(full := np.flatnonzero(room - regions - tags < 1)):
            row, rows = full[0], image.tolist()
            raise UserError(
                f"{source.where(rows[row])}: {regions[row]} regions and {tags[row]} tokens of "
                f"tags leave no room for a text in {np.broadcast_to(room, len(image))[row]} "
                f"tokens; raise `length`, or lower {self.where}.max_regions or max_tags"
            )
        return regions, tags

    def example(self, layout: np.void, source: TableSource, rng: np.random.Generator) -> Example:
        text = super().example(layout, source, rng)
        if not self.reads_images:
            return text
        return self.beside_image(text, int(layout["image"]), int(layout["tags"]), source)

    def beside_image(self, text: Example, image: int, tags: int, source: TableSource) -> Example:
        """A text without labels, and then a row's image with that many tokens of its tags."""
        tokens = source.encoded(TAGS).read(image, 0, tags).ids if tags else np.zeros(0, np.int64)
        found = self.regions_of(image, source)
        regions = found.features, found.locations
        return with_image(text, image, tokens, regions, source.vocabulary.unk)

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
            size=whole.size,
        )

    def check_beside(self, example: Example, source: TableSource) -> None:
        """Raises UserError for an input without an image, or with other regions of it."""
        beside = example.regions
        if beside is None or len(beside) != len(self.regions_of(example.image, source)):
            raise UserError(
                f"{self.where}: the first task of its group builds inputs without images, or with "
                "another max_regions or whole_image; name it first, or make them equal"
            )


@dataclass(frozen=True, kw_only=True)
class ImageTextTask(ImageInput):
    """A task whose labels are of images and texts, not of a column."""

    edits_text = True

    def label_roles(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True, kw_only=True)
class OptionalImages(ImageInput):
    """A task on whole texts, each of which may be read with the image of its row: its head then
    reads the product of what two poolers make of [CLS] and of the first region."""

    images: bool = False
    """Read the image of each row beside its texts (docs/images.md)."""

    @property
    def reads_images(self) -> bool:
        return self.images

    def with_head_of(self, origin: Task) -> Task:
        task = super().with_head_of(origin)
        if getattr(origin, "images", False) != self.images:
            raise UserError(
                f"{self.where}.images: {str(self.images).lower()}, but the head is that of "
                f"tasks.{origin.name}, whose texts are read the other way; they must be equal"
            )
        return task

    def text_width(self, backbone: Encoder) -> int:
        """Width of what its head reads. Raises UserError for an encoder that reads no images."""
        if not self.images:
            return backbone.hidden_size
        self.check_encoder(backbone)
        return backbone.match_width

    def label_text(self, example: Example, targets: np.ndarray) -> None:
        """Label a text at its [CLS], or several of one example, each at its own. Raises UserError
        for an input without the image that the head reads."""
        if self.images and example.regions is None:
            raise UserError(
                f"{self.where}: reads images, but the first task of its group builds inputs "
                "without; name it first"
            )
        first = np.cumsum([0, *example.sub_lengths[:-1]]) if example.sub_lengths else [0]
        example.labels[self.name] = np.array(first, np.int64), targets

    def input_key(self) -> str:
        """Without images that of texts."""
        kind = type(self)
        if any(getattr(kind, x) is not getattr(OptionalImages, x) for x in ARRANGED_BY):
            return super().input_key()
        return self.image_key()

    def image_key(self) -> str:
        """The `input_key` of a task that arranges texts and images as this class does."""
        images = self.max_regions, self.max_tags, self.whole_image, self.region_size
        return repr((self.text_key(), images if self.images else ()))


@dataclass(frozen=True, kw_only=True)
class WholeTextTask(OptionalImages):
    """A task on whole texts, one vector each."""

    pooling: HeadPooling | None = None
    """The input of the head: the output of the encoder's `pooler`, or the `mean` over the tokens.
    Default: `pooler`; for `classification` without `lora`, `mean` if `init_from` was trained with
    mean pooling, as most encoders of sentence-transformers are."""

    head_settings = ("pooling",)
    prefers_means: ClassVar[bool] = False
    """Whether means are the default if the encoder was trained to give them: only where they were
    seen to help (docs/finetuning.md)."""

    @property
    def averaged(self) -> bool:
        """Whether the head reads means."""
        return self.pooling == "mean"

    def why_no_mean(self, config: EncoderConfig) -> str:
        """The reason why the head cannot read means; empty if it can."""
        if encoder_class(config).memory_length(config):
            return f"{config.kind} reads windows of texts"
        return "`images` are read by poolers" if self.images else ""

    def text_width(self, backbone: Encoder) -> int:
        """Also raises UserError if it cannot read means."""
        if self.averaged and (why := self.why_no_mean(backbone.config)):
            raise UserError(f"{self.where}.pooling: no mean, as {why}; use pooler")
        return super().text_width(backbone)

    def describe_rows(self, source: TableSource, max_length: int) -> str:
        line = super().describe_rows(source, max_length)
        return f"{line}; read as the mean over tokens (pooling)" if self.averaged else line

    def with_head_like(self, stored: HeadOutputs) -> Self:
        return replace(self, pooling="mean" if stored.averaged else "pooler")

    def with_head_of(self, origin: Task) -> Task:
        """With the pooling of the task that owns the shared head, by default."""
        if self.pooling is None and (given := getattr(origin, "pooling", None)):
            return replace(self, pooling=given).with_head_of(origin)
        return super().with_head_of(origin)


def image_numbers(source: TableSource) -> np.ndarray:
    """(rows,) int64, equal for rows that name the same image."""

    def numbered() -> np.ndarray:
        names = [source.image_name(item) or item for item in range(len(source))]
        number = {name: i for i, name in enumerate(dict.fromkeys(names))}
        return np.array([number[name] for name in names], np.int64)

    return source.cached("pictures", numbered)


def with_whole_image(regions: ImageRegions) -> ImageRegions:
    """The regions after one of the whole image, the mean of them."""

    def after_mean(values: np.ndarray) -> np.ndarray:
        return np.concatenate([values.mean(0, keepdims=True), values])

    assert regions.locations.shape[1] == LOCATION_SIZE
    return ImageRegions(
        features=after_mean(regions.features),
        locations=np.concatenate([_WHOLE, regions.locations]),
        classes=None if regions.classes is None else after_mean(regions.classes),
        size=regions.size,
    )


def overlaps(locations: np.ndarray, others: np.ndarray) -> np.ndarray:
    """(regions,) the largest share that each of these locations (regions, 5) has in common with one
    of `others` (any, 5): intersection over union."""
    x1, y1, x2, y2, area = locations.T[:, :, None]
    a1, b1, a2, b2, other = others.T[:, None, :]
    width = np.clip(np.minimum(x2, a2) - np.maximum(x1, a1), 0, None)
    height = np.clip(np.minimum(y2, b2) - np.maximum(y1, b1), 0, None)
    common = width * height
    return (common / np.maximum(area + other - common, 1e-12)).max(1, initial=0.0)
