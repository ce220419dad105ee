"""Base class of tasks that train the vectors of texts: each text of a row by itself.

row ──texts──> [CLS] text [SEP] | [CLS] text [SEP] | ...    each cut to `max_length`
                  vector             vector

The texts of a row share a packed row and do not attend to one another.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np
from pydantic import PositiveInt

from palm_ds.common.config import Several
from palm_ds.common.errors import UserError
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.example import Example, build_input, join, layouts
from palm_ds.data.tasks.task import Task
from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.heads.embedding import VectorSettings
from palm_ds.model.pooling import TextPooling
from palm_ds.tasks.shared.text_task import RowTexts, TextTask, tokenize

AnyDenseTask = TypeVar("AnyDenseTask", bound="DenseEmbeddingTask")


@dataclass(frozen=True, kw_only=True)
class EmbeddingTask(TextTask):
    """A task whose head compares vectors of texts."""

    max_length: int = 0
    """Maximum tokens of one text, including [CLS] and [SEP]; 0: the recipe's `length`. All texts of
    a table row share a row of the batch, so `length` should be as long as they are together."""

    eval_only = ("vectors",)

    @classmethod
    def labels_others(cls) -> bool:
        return False

    def longest_text(self, length: int) -> int:
        return self.max_length or length

    @abstractmethod
    def text_pooling(self) -> TextPooling:
        """How a text becomes a vector, in the files of the trained model."""

    # -- examples --

    @abstractmethod
    def row_texts(self, source: TableSource, item: int) -> list[str]:
        """The texts of a row, in the order of its vectors."""

    def encoded(self, source: TableSource) -> RowTexts:
        """The texts of all rows, tokenized on first use."""
        return source.cached(f"texts of {self.name}", lambda: self._encode(source))

    def _encode(self, source: TableSource) -> RowTexts:
        rows = [self.row_texts(source, item) for item in range(len(source))]
        return tokenize(rows, source, "texts")

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: TableSource, max_length: int
    ) -> np.ndarray:
        """`item`, and `tokens` (most texts,) of each text, special ones included; where the texts
        of a row are too long for it, the longest are cut."""
        item = items[:, 0]
        special = np.full(len(item), source.vocabulary.around(1))
        most = self.input_length(max_length)
        kept = self.encoded(source).cut(item, special, source, most, max_length)
        return layouts(kept.sum(1), item=item, tokens=kept)

    def example(self, layout: np.void, source: TableSource, rng: np.random.Generator) -> Example:
        item = int(layout["item"])
        texts, special = self.encoded(source), source.vocabulary.around(1)
        pieces = [
            build_input([texts.tokens.read(text, 0, int(tokens) - special)], source.vocabulary)
            for text, tokens in zip(texts.of(item), layout["tokens"], strict=False)
        ]
        example = join(pieces)
        example.item = item
        return example

    def add_labels(self, example: Example, targets: np.ndarray) -> None:
        """Label the texts of an example, each at its [CLS]."""
        first = np.cumsum([0, *example.sub_lengths[:-1]])
        example.labels[self.name] = first, targets
        example.grouped_labels.add(self.name)


@dataclass(frozen=True, kw_only=True)
class DenseEmbeddingTask(EmbeddingTask):
    """A task over vectors as wide as the encoder's."""

    pooling: Literal["mean", "cls"] = "mean"
    """A text's vector: the mean over its tokens, or that of [CLS]."""
    similarity: Literal["cosine", "dot"] = "cosine"
    """How two vectors are compared."""
    matryoshka: Several[PositiveInt] = ()
    """Train the leading dimensions of vectors too: after [64, 128], vectors can be truncated to 64
    or 128 dimensions (Kusupati et al. 2022)."""
    matryoshka_weights: Several[float] = ()
    """Weight of the loss of each of these sizes (default: 1 each); that of whole vectors is 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes, weights = self.matryoshka, self.matryoshka_weights
        if len(set(sizes)) < len(sizes):
            raise UserError(f"{self.where}.matryoshka: {list(sizes)}: expected different numbers")
        if weights and len(weights) != len(sizes):
            raise UserError(
                f"{self.where}.matryoshka_weights: {len(weights)}, for {len(sizes)} sizes in "
                "`matryoshka`; give one each"
            )

    def with_head_of(self: AnyDenseTask, origin: Task) -> AnyDenseTask:
        """With the vectors of the task that owns the shared head."""
        super().with_head_of(origin)
        assert isinstance(origin, DenseEmbeddingTask)
        return replace(self, pooling=origin.pooling, similarity=origin.similarity)

    def text_pooling(self) -> TextPooling:
        return TextPooling(
            pooling=self.pooling,
            normalize=self.similarity == "cosine",
            similarity=self.similarity,
            max_length=self.max_length,
            trained=True,
        )

    def vector_settings(self, backbone: Encoder) -> VectorSettings:
        """For its head. Raises UserError if vectors have too few numbers."""
        sizes = self.matryoshka
        if any(size >= backbone.hidden_size for size in sizes):
            raise UserError(
                f"{self.where}.matryoshka: {max(sizes)}, but vectors have {backbone.hidden_size} "
                "numbers; give fewer"
            )
        weights = self.matryoshka_weights or (1.0,) * len(sizes)
        return VectorSettings(
            pooling=self.pooling,
            similarity=self.similarity,
            matryoshka=dict(zip(sizes, weights, strict=True)),
        )

    def compare(self, vectors: np.ndarray) -> np.ndarray:
        """(n, hidden) vectors whose dot products are the similarity."""
        if self.similarity == "dot":
            return vectors
        return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def need_text(value: object, source: TableSource, item: int, column: str) -> str:
    """The text of a cell. Raises UserError if there is none."""
    if not isinstance(value, str):
        got = "nothing" if value is None else repr(value)
        raise UserError(f"{source.where(item)}: {column}: expected a text, got {got}")
    if not value.strip():
        raise UserError(f"{source.where(item)}: {column} is empty; remove the row")
    return value
