"""Does the second text follow the first in its document? (BERT, section 3.1; ERNIE 1.0's code)

1: it does; 0: it is from another document; half of each. Ready-made pairs (ERNIE 1.0's files,
`palm-ds prepare --format ernie`; or `--format pairs` with the labels 0 and 1) are used unchanged.
If all of them are labeled 1, as in ERNIE's files for `generate_neg_sample`, half get the second
text of another pair, another one in every pass.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.common.settings import PositiveShare
from palm_ds.data.sources.corpus import CorpusSource, split_corpus
from palm_ds.data.tasks.example import layouts
from palm_ds.data.tasks.masking import class_prior_baseline
from palm_ds.pretrain.shared import sentence_pairs

log = logging.getLogger(__name__)

RANDOM, NEXT = range(2)


@dataclass(frozen=True, kw_only=True)
class NextSentencePrediction(sentence_pairs.PairTask):
    shortest: PositiveShare = 0.2
    """The two texts together have a random length between this share of a row and a whole row
    (ready-made pairs are not affected)."""

    labels = ("another text", "the next")
    num_uniforms = 4

    def check(self, source: CorpusSource, max_length: int) -> None:
        if sentence_pairs.is_ready_made(source) and self._makes_negatives(source):
            log.info(
                "tasks.%s: %s: all pairs have the label 1; half get the second text of another",
                self.name,
                source.corpus.path,
            )
        several = source.last_sentences - source.first_sentences >= 2
        if not sentence_pairs.is_ready_made(source) and several.sum() == 1:
            raise UserError(
                f"{self.where}: {source.corpus.path} has one document with two "
                f"sentences or more in this split; pairs of different documents need at least 2"
            )

    def items(self, source: CorpusSource, max_length: int) -> np.ndarray:
        """Ready-made pairs (pairs, 4): starts of the two texts, end, class. Running text
        (sentences, 3): a sentence with a successor, and its document's sentences [first, last)."""
        if sentence_pairs.is_ready_made(source):
            return self._ready_made(source)
        table = sentence_pairs.anchors(source)
        anchor, first, last = table.T
        return table[last - anchor >= 2]

    def _ready_made(self, source: CorpusSource) -> np.ndarray:
        return sentence_pairs.labeled_pairs(source, {"0": RANDOM, "1": NEXT}, self.where)

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: CorpusSource, max_length: int
    ) -> np.ndarray:
        if sentence_pairs.is_ready_made(source):
            return self._lay_out_ready_made(items, uniform, source, max_length)
        anchor, first, last = items.T
        offsets, special = source.corpus.sentence_starts, source.vocabulary.around(2)
        most = max_length - special
        target = (self.shortest + (1 - self.shortest) * uniform[:, 0]) * most
        first_target = (target * (0.3 + 0.4 * uniform[:, 1])).astype(np.int64)
        label = np.where(uniform[:, 2] < 0.5, RANDOM, NEXT)
        end = source.sentence_end(anchor, last - 1, first_target)
        random, random_last = self._after_another(first, first_target, uniform[:, 3], source)
        other = np.where(label == NEXT, end, random)
        limit = np.where(label == NEXT, last, random_last)
        # A sentence that is longer than most of a row is cut.
        tokens = np.minimum(offsets[end] - offsets[anchor], int(0.7 * most))
        wanted = np.maximum(target.astype(np.int64) - tokens, 1)
        other_end = source.sentence_end(other, limit, wanted)
        other_tokens = np.minimum(offsets[other_end] - offsets[other], most - tokens)
        # In free space of the row the second text gets longer, then the first starts earlier.
        most_other = offsets[limit] - offsets[other]
        length = special + tokens + other_tokens
        more = most_other - other_tokens + offsets[anchor] - offsets[first]
        spare = np.minimum(max_length - length, more)
        return layouts(
            length,
            spare,
            first=offsets[anchor],
            first_tokens=tokens,
            second=offsets[other],
            second_tokens=most_other,
            label=label,
        )

    def _lay_out_ready_made(
        self, items: np.ndarray, uniform: np.ndarray, source: CorpusSource, max_length: int
    ) -> np.ndarray:
        if not self._makes_negatives(source):
            return sentence_pairs.lay_out(items, source, max_length)
        pairs = source.cached("pairs that follow", lambda: self._ready_made(source))
        own = np.searchsorted(pairs[:, 0], items[:, 0])
        step = 1 + (uniform[:, 0] * (len(pairs) - 1)).astype(np.int64)
        random = (uniform[:, 1] < 0.5)[:, None]
        seconds = np.where(random, pairs[(own + step) % len(pairs), 1:3], items[:, 1:3])
        pairs = np.where(random & (np.arange(4) == 3), RANDOM, items)
        return sentence_pairs.lay_out(pairs, source, max_length, seconds)

    def _makes_negatives(self, source: CorpusSource) -> bool:
        """Whether every ready-made pair is a true one, of the whole corpus, so that training and
        held-out data agree, and there are others here to take texts from."""

        def find() -> bool:
            everything, _ = split_corpus(source.corpus, 0.0, ())
            return not self._counts(everything)[RANDOM]

        return source.reference.cached("true pairs alone", find) and len(source) > 1

    def _counts(self, source: CorpusSource) -> np.ndarray:
        return np.bincount(self._ready_made(source)[:, 3], minlength=2)

    @staticmethod
    def _after_another(
        first: np.ndarray, tokens: np.ndarray, draw: np.ndarray, source: CorpusSource
    ) -> tuple[np.ndarray, np.ndarray]:
        """The successor of a text of `tokens` in another document: its first sentence, and the end
        (exclusive) of the sentences it may have. It is chosen like a true successor, so that its
        length and its place in its document reveal nothing."""
        own = np.searchsorted(source.first_sentences, first)
        followed = source.last_sentences - source.first_sentences - 1
        sentence, document = sentence_pairs.elsewhere(own, followed, draw, source)
        last = source.last_sentences[document]
        return source.sentence_end(sentence, last - 1, tokens), last

    def baseline(self, targets: np.ndarray, source: CorpusSource) -> tuple[np.ndarray, np.ndarray]:
        """Even odds; for ready-made pairs of both classes their prior."""
        if not sentence_pairs.is_ready_made(source) or self._makes_negatives(source):
            return np.full(len(targets), np.log(2)), np.full(len(targets), 1 / 2)
        count = source.cached("classes of pairs", lambda: self._counts(source))
        return class_prior_baseline(targets, count)
