"""Predict the permutation of a document's segments (ERNIE-Doc, Ding et al. 2021, section 3.4).

A document is cut at random sentence boundaries into 1 to `most` segments, which are shuffled: one
of the sum of n! orders, 33 for up to 4 segments, all alike. An encoder with memories reads the
shuffled document window by window, and predicts its order at the end of the last reading, from
what it remembers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.tasks.example import Example, build_input, layouts
from palm_ds.data.tasks.task import CorpusTask
from palm_ds.pretrain.shared.paragraphs import segment_orders
from palm_ds.text.tokens import TokenSpan

if TYPE_CHECKING:
    from torch import nn

    from palm_ds.model.encoder.encoder import Encoder


@dataclass(frozen=True, kw_only=True)
class SegmentReordering(CorpusTask):
    most: Annotated[int, Field(ge=2, le=6)] = 4
    """Maximum number of segments. Documents of fewer sentences are left out."""

    documents: ClassVar[Literal["no", "also", "only"]] = "only"
    num_uniforms: ClassVar[int] = 1
    head_settings: ClassVar[Sequence[str]] = ("most",)

    @cached_property
    def orders(self) -> list[tuple[int, ...]]:
        """The permutation of every class."""
        return segment_orders(self.most)

    def items(self, source: CorpusSource, max_length: int) -> np.ndarray:
        """(documents, 2): their sentences [first, last)."""
        whole = np.column_stack([source.first_sentences, source.last_sentences])
        return whole[whole[:, 1] - whole[:, 0] >= self.most]

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: CorpusSource, max_length: int
    ) -> np.ndarray:
        first, last = source.corpus.sentence_starts[items].T
        label = (uniform[:, 0] * len(self.orders)).astype(np.int64)
        length = last - first + source.vocabulary.around(1)
        return layouts(length, first=items[:, 0], last=items[:, 1], label=label)

    def example(self, layout: np.void, source: CorpusSource, rng: np.random.Generator) -> Example:
        label = int(layout["label"])
        order = self.orders[label]
        inside = np.arange(layout["first"] + 1, layout["last"])
        cuts = np.sort(rng.choice(inside, len(order) - 1, replace=False))
        ends = source.corpus.sentence_starts[np.array([layout["first"], *cuts, layout["last"]])]
        pieces = [source.read(ends[i], ends[i + 1]) for i in order]
        example = build_input([_joined(pieces)], source.vocabulary)
        example.source_offsets[1:-1] = np.concatenate(
            [np.arange(piece.start, piece.start + len(piece)) for piece in pieces]
        )
        example.labels[self.name] = np.array([0]), np.array([label])
        return example

    @classmethod
    def labels_others(cls) -> bool:
        return False

    def head(self, backbone: Encoder) -> nn.Module:
        from palm_ds.model.heads.heads import ClassHead

        return ClassHead(
            backbone.config.hidden_size, classes=len(self.orders), pooled=True, truncated=True
        )

    def baseline(self, targets: np.ndarray, source: CorpusSource) -> tuple[np.ndarray, np.ndarray]:
        """Guesses one of all orders."""
        chance = np.full(len(targets), 1 / len(self.orders))
        return -np.log(chance), chance

    def class_name(self, label: int) -> str:
        """`2 1 3`: the document's second segment comes first."""
        return " ".join(str(segment + 1) for segment in self.orders[label])


def _joined(pieces: Sequence[TokenSpan]) -> TokenSpan:
    """Texts one after another as one."""
    return TokenSpan(
        pieces[0].start,
        np.concatenate([piece.ids for piece in pieces]),
        {
            name: np.concatenate([piece.annotations[name] for piece in pieces])
            for name in pieces[0].annotations
        },
    )
