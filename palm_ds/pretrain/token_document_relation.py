"""Does this token also occur elsewhere in its document? (ERNIE 2.0, section 4.2.1)

    ... a harbour seal ...  | the seal swam to the boat |  ... two other seals, a seal pup ...
        outside the text         0   1    0      0              outside the text

"Elsewhere" means the tokens of the document that are not in the example, up to `reach` of them on
either side of each of its texts, so that a document of a million tokens costs no more than one of
ten thousand. Special tokens are not labeled, nor stop words, which occur everywhere. Masked tokens
are labeled (by the original token), so the order of the tasks in a task group makes no difference.
If the document has hardly any other tokens, the answer would always be no; such texts are not
labeled either."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.common.rng import derive_key, keyed_generator, permutation_at
from palm_ds.common.settings import PositiveShare
from palm_ds.data.sources.corpus import CorpusSource, passages, split_corpus
from palm_ds.data.tasks.example import Example, build_input
from palm_ds.data.tasks.masking import class_prior_baseline
from palm_ds.pretrain.shared.predictions import ClassPrediction

_SAMPLE, _SAMPLE_ROOM = 512, 256  # examples, and tokens per example, that measure the baseline


@dataclass(frozen=True, kw_only=True)
class TokenDocumentRelation(ClassPrediction):
    reach: int = 4096
    """Tokens of the document that are searched before and after a text."""
    least: int = 128
    """A text is labeled only if at least this many tokens of its document are searched."""
    frequent: PositiveShare = 0.001
    """Tokens above this share of the corpus are stop words and get no label."""

    labels = ("nowhere else", "elsewhere too")
    of_texts = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.least <= self.reach:
            raise UserError(
                f"{self.where}: least {self.least} and reach {self.reach} must be positive, "
                f"and least must not exceed reach"
            )

    def items(self, source: CorpusSource, max_length: int) -> np.ndarray:
        """The default passages, if enough of their document is outside."""
        table = passages(source, max_length - 2)
        before, after = source.tokens_around(table[:, 0], table[:, 1])
        return table[np.minimum(before, self.reach) + np.minimum(after, self.reach) >= self.least]

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: CorpusSource, max_length: int
    ) -> np.ndarray:
        layout = super().layout(items, uniform, source, max_length)
        before, after = source.tokens_around(items[:, 0], items[:, 1])
        # A passage may start earlier as long as enough remains outside.
        most = before - np.maximum(self.least - after, 0)
        layout["spare"] = np.minimum(layout["spare"], most)
        return layout

    def label(self, example: Example, source: CorpusSource, rng: np.random.Generator) -> None:
        asked, answer = np.zeros(len(example), bool), np.zeros(len(example), np.int64)
        real = np.flatnonzero(example.source_offsets >= 0)
        document = source.document_of(example.source_offsets[real])
        for number in np.unique(document):
            here = real[document == number]
            pieces = list(self._elsewhere(example.source_offsets[here], source, int(number)))
            if sum(map(len, pieces)) < self.least:
                continue
            seen = np.zeros(source.vocabulary.size, bool)
            for ids in pieces:
                seen[ids] = True
            asked[here], answer[here] = True, seen[example.unmasked_ids[here]]
        where = np.flatnonzero(asked)
        where = where[~self._stop_words(source)[example.unmasked_ids[where]]]
        example.labels[self.name] = where, answer[where]

    def _elsewhere(
        self, origin: np.ndarray, source: CorpusSource, document: int
    ) -> Iterator[np.ndarray]:
        """The ids of one document around the contiguous spans of `origin`, without overlap."""
        places = np.sort(origin)
        breaks = np.flatnonzero(np.diff(places) > 1) + 1
        begins = places[np.concatenate([[0], breaks])].tolist()
        ends = (places[np.concatenate([breaks - 1, [len(places) - 1]])] + 1).tolist()
        upto, last = int(source.starts[document]), int(source.ends[document])
        for begin, end, following in zip(begins, ends, [*begins[1:], last], strict=True):
            first = max(upto, begin - self.reach)
            upto = min(end + self.reach, following)
            for a, b in ((first, begin), (end, upto)):
                if a < b:
                    yield source.corpus.read(a, b, ()).ids

    def _stop_words(self, source: CorpusSource) -> np.ndarray:
        """(vocabulary,) bool: from the whole corpus, so that training and held-out data agree."""

        def find() -> np.ndarray:
            everything, _ = split_corpus(source.corpus, 0.0, ())
            return everything.unigrams > self.frequent

        return source.reference.cached(f"tokens above {self.frequent}", find)

    def baseline(self, targets: np.ndarray, source: CorpusSource) -> tuple[np.ndarray, np.ndarray]:
        """The share of yes answers in passages of the source."""
        return class_prior_baseline(
            targets, source.cached(f"answers of {self}", lambda: self._counts(source))
        )

    def _counts(self, source: CorpusSource) -> np.ndarray:
        """(2,) counts of no and yes in some passages."""
        counts, items = np.zeros(2), self.items(source, _SAMPLE_ROOM)
        sample = np.arange(min(_SAMPLE, len(items)))
        for start, end, _ in items[permutation_at(derive_key(self.name), len(items), sample)]:
            example = build_input([source.read(start, end)], source.vocabulary)
            self.label(example, source, keyed_generator(0, 0))
            counts += np.bincount(example.labels[self.name][1], minlength=2)
        return counts
