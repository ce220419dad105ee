"""How far apart are two texts? 0 adjacent, 1 same document, 2 different documents
(ERNIE 2.0, section 4.2.2). Balanced; either text may come first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.common.messages import counted
from palm_ds.common.settings import PositiveShare
from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.tasks.example import Example, layouts
from palm_ds.pretrain.shared.sentence_pairs import PairTask, anchors, arrange_pair

ADJACENT, SAME_DOCUMENT, OTHER_DOCUMENT = range(3)


@dataclass(frozen=True, kw_only=True)
class SentenceDistance(PairTask):
    shortest: PositiveShare = 0.2
    """The two texts together have a random length between this share of a row and a whole row."""

    labels = ("adjacent", "same document", "other document")
    num_uniforms = 6

    def check(self, source: CorpusSource, max_length: int) -> None:
        if (many := len(source.documents)) < 2:
            raise UserError(
                f"{self.where}: {source.corpus.path} has {counted(many, 'document')} in this "
                "split; pairs of different documents need at least 2"
            )

    def items(self, source: CorpusSource, max_length: int) -> np.ndarray:
        """(anchors, 3): a sentence and its document's sentences [first, last), if all three classes
        are possible: a sentence follows it, and others are further away."""
        table = anchors(source)
        anchor, first, last = table.T
        return table[(last - anchor >= 2) & (last - first >= 4)]

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: CorpusSource, max_length: int
    ) -> np.ndarray:
        anchor, first, last = items.T
        special = source.vocabulary.around(2)
        most = max_length - special
        target = (self.shortest + (1 - self.shortest) * uniform[:, 0]) * most
        share = 0.3 + 0.4 * uniform[:, 1]
        label = (uniform[:, 2] * 3).astype(np.int64)
        # The anchor's text leaves a sentence for its neighbor, and one more if none comes before.
        limit = np.where(anchor - 1 > first, last - 1, last - 2)
        end = source.sentence_end(anchor, limit, (target * share).astype(np.int64))
        other, limit = self._elsewhere(items, end, uniform[:, 3:5], label, source)
        offsets = source.corpus.sentence_starts
        # A sentence that is longer than most of a row is cut.
        tokens = np.minimum(offsets[end] - offsets[anchor], int(0.7 * most))
        wanted = np.maximum(target.astype(np.int64) - tokens, 1)
        other_end = source.sentence_end(other, limit, wanted)
        other_tokens = np.minimum(offsets[other_end] - offsets[other], most - tokens)
        length = special + tokens + other_tokens
        # In free space of the row the other text gets longer, then the anchor's starts earlier,
        # unless the other text comes before it.
        most_other = offsets[limit] - offsets[other]
        before = np.where(other < anchor, 0, offsets[anchor] - offsets[first])
        before = np.where(label == OTHER_DOCUMENT, offsets[anchor] - offsets[first], before)
        spare = np.minimum(max_length - length, most_other - other_tokens + before)
        return layouts(
            length,
            spare,
            first=offsets[anchor],
            first_tokens=tokens,
            second=offsets[other],
            second_tokens=most_other,
            swapped=uniform[:, 5] < 0.5,
            label=label,
        )

    @staticmethod
    def _elsewhere(
        items: np.ndarray,
        end: np.ndarray,
        draw: np.ndarray,
        label: np.ndarray,
        source: CorpusSource,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The other text's first sentence, and the sentence at which it must end (exclusive)."""
        anchor, first, last = items.T
        # Same document, not adjacent: before the anchor, or beyond its next sentence.
        before, after = np.maximum(anchor - 1 - first, 0), np.maximum(last - end - 1, 0)
        pick = (draw[:, 0] * (before + after)).astype(np.int64)
        far = np.where(pick < before, first + pick, end + 1 + pick - before)
        far_limit = np.where(pick < before, anchor - 1, last)
        # Another document: a random sentence, moved to the next document if it is in the own one.
        count = source.last_sentences - source.first_sentences
        upto = np.cumsum(count)
        drawn = (draw[:, 1] * upto[-1]).astype(np.int64)
        document = np.searchsorted(upto, drawn, side="right")
        own = source.first_sentences[document] == first
        document = np.where(own, (document + 1) % len(count), document)
        within = (drawn - (upto - count)[document]) % np.maximum(count[document], 1)
        foreign = source.first_sentences[document] + within
        other = np.select([label == ADJACENT, label == SAME_DOCUMENT], [end, far], foreign)
        limits = [last, far_limit]
        limit = np.select(
            [label == ADJACENT, label == SAME_DOCUMENT], limits, source.last_sentences[document]
        )
        return other, limit

    def example(self, layout: np.void, source: CorpusSource, rng: np.random.Generator) -> Example:
        example = arrange_pair(layout, source, swap=bool(layout["swapped"]))
        example.labels[self.name] = np.array([0]), np.array([layout["label"]])
        return example
