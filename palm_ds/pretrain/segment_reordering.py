"""Predict the permutation of a document's segments (ERNIE-Doc, Ding et al. 2021, section 3.4).

A document is cut at random sentence boundaries into 1 to `most` segments, which are shuffled: one
of the sum of n! orders, 33 for up to 4 segments, all alike. An encoder with memories reads the
shuffled document window by window, and predicts its order at the end of the last reading, from
what it remembers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.tasks.example import Example, build_input, layouts
from palm_ds.pretrain.shared.predictions import SegmentOrderTask
from palm_ds.text.tokens import TokenSpan


@dataclass(frozen=True, kw_only=True)
class SegmentReordering(SegmentOrderTask):
    most: Annotated[int, Field(ge=2, le=6)] = 4
    """Maximum number of segments. Documents of fewer sentences are left out."""

    documents = "only"

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
