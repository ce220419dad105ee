"""How far apart are two texts? 0 adjacent, 1 same document, 2 different documents
(ERNIE 2.0, section 4.2.2). Balanced; either text may come first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from palm_ds.errors import UserError
from palm_ds.example import Example, arrange
from palm_ds.source import Source
from palm_ds.task import Task

if TYPE_CHECKING:
    from torch import nn

    from palm_ds.backbone import Backbone

ADJACENT, SAME_DOCUMENT, OTHER_DOCUMENT = range(3)


@dataclass(frozen=True, kw_only=True)
class SentenceDistance(Task):
    shortest: float = 0.1
    """Each text is a run of whole sentences; its target is drawn between this share and the whole
    of half a row."""

    draws: ClassVar[int] = 6

    def __post_init__(self) -> None:
        if not 0 < self.shortest <= 1:
            raise UserError(f"tasks.{self.name}.shortest: {self.shortest} is not in (0, 1]")

    def items(self, source: Source, room: int) -> np.ndarray:
        """(anchors, 3): a sentence and its document's sentences [first, last), wherever each of the
        three answers is possible: an adjacent one after it, others at least one further away."""
        if len(source.documents) < 2:
            raise UserError(
                f"tasks.{self.name}: {source.corpus.path} has {len(source.documents)} document(s) "
                f"to read here; texts of different documents need at least 2"
            )
        count = source.last_sentences - source.first_sentences
        first = np.repeat(source.first_sentences, count)
        last = np.repeat(source.last_sentences, count)
        anchor = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + first
        table = np.column_stack([anchor, first, last])
        return table[(last - anchor >= 2) & (last - first >= 4)]

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: Source, room: int
    ) -> np.ndarray:
        anchor, first, last = items.T
        half = (room - 3) // 2
        target = ((self.shortest + (1 - self.shortest) * uniform[:, :2]) * half).astype(np.int64)
        label = (uniform[:, 2] * 3).astype(np.int64)
        # The anchor's run leaves a sentence for its neighbour, and one beyond where none is before.
        limit = np.where(anchor - 1 > first, last - 1, last - 2)
        end = source.sentence_end(anchor, limit, target[:, 0])
        other, limit = self._elsewhere(items, end, uniform[:, 3:5], label, source)
        other_end = source.sentence_end(other, limit, target[:, 1])
        offsets = source.corpus.sentence_starts
        start = offsets[np.column_stack([anchor, other])]
        stop = np.minimum(offsets[np.column_stack([end, other_end])], start + half)
        swap = uniform[:, 5] < 0.5
        start[swap], stop[swap] = start[swap, ::-1], stop[swap, ::-1]
        return np.column_stack([3 + (stop - start).sum(1), start, stop, label])

    @staticmethod
    def _elsewhere(
        items: np.ndarray, end: np.ndarray, draw: np.ndarray, label: np.ndarray, source: Source
    ) -> tuple[np.ndarray, np.ndarray]:
        """The other text's first sentence and the sentence before which it must end."""
        anchor, first, last = items.T
        # Same document, not adjacent: before the anchor, or after the sentence that follows it.
        before, after = np.maximum(anchor - 1 - first, 0), np.maximum(last - end - 1, 0)
        pick = (draw[:, 0] * (before + after)).astype(np.int64)
        far = np.where(pick < before, first + pick, end + 1 + pick - before)
        far_limit = np.where(pick < before, anchor - 1, last)
        # Another document: a sentence drawn over all, the next document's where it is our own.
        count = source.last_sentences - source.first_sentences
        upto = np.cumsum(count)
        stray = (draw[:, 1] * upto[-1]).astype(np.int64)
        document = np.searchsorted(upto, stray, side="right")
        mine = source.first_sentences[document] == first
        document = np.where(mine, (document + 1) % len(count), document)
        within = (stray - (upto - count)[document]) % np.maximum(count[document], 1)
        foreign = source.first_sentences[document] + within
        other = np.select([label == ADJACENT, label == SAME_DOCUMENT], [end, far], foreign)
        limits = [last, far_limit]
        limit = np.select(
            [label == ADJACENT, label == SAME_DOCUMENT], limits, source.last_sentences[document]
        )
        return other, limit

    def example(self, layout: np.ndarray, source: Source, rng: np.random.Generator) -> Example:
        a, b, a_end, b_end, label = (int(x) for x in layout[1:])
        example = arrange([source.read(a, a_end), source.read(b, b_end)], source.vocabulary)
        example.labels[self.name] = np.array([0]), np.array([label])
        return example

    def head(self, backbone: Backbone) -> nn.Module:
        from palm_ds.heads import ClassHead

        return ClassHead(backbone.config.width, classes=3, pooled=True)

    def baseline(self, targets: np.ndarray, source: Source) -> tuple[np.ndarray, np.ndarray]:
        return np.full(len(targets), np.log(3)), np.full(len(targets), 1 / 3)
