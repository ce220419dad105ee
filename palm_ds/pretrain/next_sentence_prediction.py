"""Does the second text follow the first in its document? (BERT, section 3.1; ERNIE 1.0's code)

1: it does, 0: it is from another document; half of each. A corpus of ready-made pairs (ERNIE 1.0's
own lines, `palm-ds prepare --format ernie`; or `--format pairs` with the labels 0 and 1) is taken
as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.data.corpus_source import Source
from palm_ds.data.example import Example
from palm_ds.data.layout import layouts
from palm_ds.data.task import CorpusTask, guess
from palm_ds.pretrain.shared import sentence_pairs as pairs

if TYPE_CHECKING:
    from torch import nn

    from palm_ds.model.encoder import Encoder

RANDOM, NEXT = range(2)


@dataclass(frozen=True, kw_only=True)
class NextSentencePrediction(CorpusTask):
    shortest: float = 0.2
    """The two texts together are drawn to be between this share and the whole of a row (not where
    the pairs are ready-made)."""

    segments: ClassVar[int] = 2
    class_names: ClassVar[Sequence[str]] = ("another text", "the next")
    draws: ClassVar[int] = 4

    def __post_init__(self) -> None:
        if not 0 < self.shortest <= 1:
            raise UserError(f"tasks.{self.name}.shortest: {self.shortest} is not in (0, 1]")

    def items(self, source: Source, room: int) -> np.ndarray:
        """Of ready-made pairs (pairs, 4): starts of the two texts, end, class. Of running text
        (sentences, 3): one that another follows, and its document's sentences [first, last)."""
        if pairs.is_ready_made(source):
            return self._ready_made(source)
        table = pairs.anchors(source)
        anchor, first, last = table.T
        table = table[last - anchor >= 2]
        if len(table) and (table[:, 1] == table[0, 1]).all():
            raise UserError(
                f"tasks.{self.name}: {source.corpus.path} has one document of two sentences or "
                f"more to read here; texts of different documents need at least 2"
            )
        return table

    def _ready_made(self, source: Source) -> np.ndarray:
        table = pairs.ready_made(source)
        known = {"0": RANDOM, "1": NEXT}
        classes = pairs.classes_of_labels(source, known, f"tasks.{self.name}")
        return np.column_stack([table[:, :3], classes[table[:, 3]]])

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: Source, room: int
    ) -> np.ndarray:
        if pairs.is_ready_made(source):
            return pairs.lay_out(items, room)
        anchor, first, last = items.T
        offsets, most = source.corpus.sentence_starts, room - 3
        target = (self.shortest + (1 - self.shortest) * uniform[:, 0]) * most
        first_target = (target * (0.3 + 0.4 * uniform[:, 1])).astype(np.int64)
        label = np.where(uniform[:, 2] < 0.5, RANDOM, NEXT)
        end = source.sentence_end(anchor, last - 1, first_target)
        strange, strange_last = self._after_another(first, first_target, uniform[:, 3], source)
        other = np.where(label == NEXT, end, strange)
        limit = np.where(label == NEXT, last, strange_last)
        # One sentence that is longer than most of a row is cut.
        tokens = np.minimum(offsets[end] - offsets[anchor], int(0.7 * most))
        wanted = np.maximum(target.astype(np.int64) - tokens, 1)
        other_end = source.sentence_end(other, limit, wanted)
        other_tokens = np.minimum(offsets[other_end] - offsets[other], most - tokens)
        # Free space of the row: the second text goes on, then the first begins earlier.
        most_other = offsets[limit] - offsets[other]
        length = 3 + tokens + other_tokens
        more = most_other - other_tokens + offsets[anchor] - offsets[first]
        spare = np.minimum(room - length, more)
        return layouts(
            length,
            spare,
            first=offsets[anchor],
            first_tokens=tokens,
            second=offsets[other],
            second_tokens=most_other,
            label=label,
        )

    @staticmethod
    def _after_another(
        first: np.ndarray, tokens: np.ndarray, draw: np.ndarray, source: Source
    ) -> tuple[np.ndarray, np.ndarray]:
        """What follows a text of so many tokens in another document: its first sentence, and one
        past the last it may have. Being chosen as a true next text is, its length and its place in
        its document say nothing."""
        own = np.searchsorted(source.first_sentences, first)
        followed = source.last_sentences - source.first_sentences - 1
        sentence, document = pairs.elsewhere(own, followed, draw, source)
        last = source.last_sentences[document]
        return source.sentence_end(sentence, last - 1, tokens), last

    def example(self, layout: np.void, source: Source, rng: np.random.Generator) -> Example:
        example = pairs.arrange_pair(layout, source)
        example.labels[self.name] = np.array([0]), np.array([layout["label"]])
        return example

    def head(self, backbone: Encoder) -> nn.Module:
        from palm_ds.model.heads import ClassHead

        return ClassHead(backbone.config.hidden_size, classes=2, pooled=True)

    def baseline(self, targets: np.ndarray, source: Source) -> tuple[np.ndarray, np.ndarray]:
        """Evens; of ready-made pairs, knowing how many are of either class."""
        if not pairs.is_ready_made(source):
            return np.full(len(targets), np.log(2)), np.full(len(targets), 1 / 2)
        count = lambda: np.bincount(self._ready_made(source)[:, 3], minlength=2)  # noqa: E731
        return guess(targets, source.cached("classes of pairs", count))
