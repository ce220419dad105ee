"""Predict masked tokens of a text from it and from a guess at its translation (BTMLM; ERNIE-M:
Ouyang et al. 2021, arXiv 2012.15674). It needs monolingual texts only.

    1  [CLS] the cat sat [SEP] [M] [M] [M] [SEP]    the encoder fills in placeholders,
    2  [CLS] the [M] sat [SEP] le chat - [SEP]      and predicts masked tokens from all of it

Placeholders are filled in together, each from the text and the other placeholders, by the weights
of this step and without gradient (model/heads/pseudo_tokens.py): cross_attention_masked_lm, with
which it has to `share` a head, teaches it. Then all tokens attend to all. Masking is that of
knowledge_masking.

    stages: [{translation_language_model: 9_000, cross_attention_masked_lm: 9_000},
             {cross_attention_masked_lm: 3_000, back_translation_masked_lm: 3_000}]

Baidu has not released its pretraining code. Our choices, which could not be checked against
the paper: a text is a sentence of the corpus; placeholders stand at the positions that follow it,
as many as its tokens times `pseudo_rate`; the unmasked tokens see the guess, too. What is masked,
and the keys of drawn pseudo tokens (`temperature`), belong to the n-th example.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pydantic import NonNegativeFloat, PositiveFloat

from palm_ds.common.errors import UserError
from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.tasks.example import Example, build_input, layouts
from palm_ds.data.tasks.masking import Unit
from palm_ds.data.tasks.task import CorpusTask
from palm_ds.model.inputs.visibility import full
from palm_ds.pretrain.shared.predictions import TokenPrediction
from palm_ds.pretrain.shared.unit_masking import UnitMasking
from palm_ds.text.tokens import TokenSpan

SHORTEST = 4
"""Tokens of the shortest sentence."""
_MOST_KEY = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class BackTranslationMaskedLM(UnitMasking, TokenPrediction, CorpusTask):
    pseudo_rate: PositiveFloat = 1.0
    """Placeholders of a text, as a share of its tokens; at least one."""
    temperature: NonNegativeFloat = 0.0
    """0: placeholders become the likeliest tokens, as in the paper. Above 0: tokens are drawn, from
    probabilities to the power of 1 / temperature."""
    units: tuple[Unit, ...] = ("token",)
    """Units to mask as a whole, as in knowledge_masking."""

    attends_partially = True

    @classmethod
    def labels_others(cls) -> bool:
        """Its labels need texts with placeholders."""
        return False

    @property
    def pseudo_tokens(self) -> float:
        return self.temperature

    def check(self, source: CorpusSource, max_length: int) -> None:
        if self._room(source, max_length) < SHORTEST:
            raise UserError(
                f"{self.where}: rows of {max_length} tokens have no room for a sentence of "
                f"{SHORTEST} with its placeholders; raise `length`, or lower pseudo_rate"
            )

    def _placeholders(self, tokens: np.ndarray) -> np.ndarray:
        return np.maximum(np.rint(tokens * self.pseudo_rate).astype(np.int64), 1)

    def _room(self, source: CorpusSource, max_length: int) -> int:
        """The tokens of the longest sentence whose example fits."""
        tokens = np.arange(max_length)
        fits = tokens + self._placeholders(tokens) + source.vocabulary.around(2) <= max_length
        return int(tokens[fits].max(initial=0))

    def items(self, source: CorpusSource, max_length: int) -> np.ndarray:
        """(sentences, 2) start and end of those that are long enough."""
        count = source.last_sentences - source.first_sentences
        inside = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        number = np.repeat(source.first_sentences, count) + inside
        starts = np.asarray(source.corpus.sentence_starts)
        spans = np.column_stack([starts[number], starts[number + 1]])
        return spans[spans[:, 1] - spans[:, 0] >= SHORTEST]

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: CorpusSource, max_length: int
    ) -> np.ndarray:
        """The `start` of the sentence and its `tokens`; the end of a long one is cut."""
        start, end = items.T
        tokens = np.minimum(end - start, self._room(source, max_length))
        length = tokens + self._placeholders(tokens) + source.vocabulary.around(2)
        return layouts(length, start=start, tokens=tokens)

    def example(self, layout: np.void, source: CorpusSource, rng: np.random.Generator) -> Example:
        start, tokens = int(layout["start"]), int(layout["tokens"])
        piece = source.read(start, start + tokens)
        many = int(layout["length"]) - tokens - source.vocabulary.around(2)
        nothing = {name: np.zeros(many, np.uint8) for name in piece.annotations}
        placeholders = TokenSpan(0, np.full(many, source.vocabulary.mask), nothing)
        example = build_input([piece, placeholders], source.vocabulary)
        where = np.arange(len(example) - 1 - many, len(example) - 1)
        example.source_offsets[where] = -1
        example.visibility = full(len(example))
        example.placeholders[self.name] = where, rng.integers(_MOST_KEY, size=many)
        return example

    def label(self, example: Example, source: CorpusSource, rng: np.random.Generator) -> None:
        where = self.mask(example, source, rng)
        example.labels[self.name] = where, example.unmasked_ids[where]
