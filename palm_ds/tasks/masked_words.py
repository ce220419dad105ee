"""Masked language modeling on the texts of a table: PaddlePALM's MaskLM, to continue pretraining
on the texts of a task or alongside it.

Alone it reads the texts of each row; in a task group (`sentiment + masked_words`) it masks words in
the input of the first task, which then sees them masked too. Predictions: `word_id`, as in
PaddlePALM, and `words`, one per masked token in order; `right`, the number of correct ones; and
`loss`, summed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from palm_ds.common.settings import InnerShare, Share
from palm_ds.data.sources.source import unigram_frequencies
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.example import Example
from palm_ds.data.tasks.masking import check_mask_rates, choose_units, mask_tokens
from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.heads.heads import MaskedLMHead
from palm_ds.tasks.shared.text_task import TextTask
from palm_ds.text.display import token_texts
from palm_ds.text.tokenizer import Tokenizer

_MEASURED = {"word_id", "right", "loss"}
_TEXTS = ("text_a", "text_b", "question", "context")


@dataclass(frozen=True, kw_only=True)
class MaskedWords(TextTask):
    """Predicts masked words."""

    rate: InnerShare = 0.15
    """Share of the tokens to predict, special tokens excluded; at least one word."""
    whole_words: bool = True
    """Mask whole words instead of single tokens."""
    mask_rate: Share = 0.8
    """Share of the predicted tokens replaced by [MASK]."""
    random_rate: Share = 0.1
    """Share of the predicted tokens replaced by a random token; the rest stays unchanged."""

    edits_text = True
    prediction_key = "words"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_mask_rates(self.mask_rate, self.random_rate, self.where)

    def check(self, source: TableSource, *, labeled: bool) -> None:
        if self.texts:  # in a task group another task builds the input, from any columns
            self.columns_of(source)

    def label(self, example: Example, source: TableSource, rng: np.random.Generator) -> None:
        unit = self.units(example, source)
        if not (unit >= 0).any():
            return  # no words to mask
        where = np.flatnonzero(choose_units(unit, self.rate, rng))
        mask_tokens(
            example,
            self.name,
            where,
            source.vocabulary,
            rng,
            mask_rate=self.mask_rate,
            random_rate=self.random_rate,
        )

    def units(self, example: Example, source: TableSource) -> np.ndarray:
        """(tokens,) index of the word of each token, ascending; -1 for special tokens."""
        inside = example.source_offsets >= 0
        begins = inside.copy()
        if self.whole_words:
            continues = source.cached("word pieces", lambda: _continues_word(source.tokenizer))
            follows = (
                np.diff(example.source_offsets, prepend=-1) == 1
            )  # the previous token of its text
            follows[0] = False
            follows[1:] &= inside[:-1]
            begins &= ~(continues[example.unmasked_ids] & follows)
        return np.where(inside, np.cumsum(begins) - 1, -1)

    def head(self, backbone: Encoder) -> MaskedLMHead:
        return MaskedLMHead(backbone)

    def baseline(self, targets: np.ndarray, source: TableSource) -> tuple[np.ndarray, np.ndarray]:
        """Unigram baseline: token frequencies of the source's texts, with add-one smoothing."""
        share = source.cached(f"unigrams {self.name}", lambda: self._unigrams(source))
        return -np.log(share[targets]), (targets == share.argmax()).astype(float)

    def _unigrams(self, source: TableSource) -> np.ndarray:
        columns = self.texts or [c for c in _TEXTS if c in source.columns]
        texts = (source.encoded(column).ids for column in columns)
        return unigram_frequencies(texts, source.vocabulary.size)

    def decode(self, scores: np.ndarray, example: Example, source: TableSource) -> dict[str, Any]:
        words = scores.argmax(-1)
        targets = example.labels[self.name][1]
        best = scores.max(-1)
        totals = best + np.log(np.exp(scores - best[:, None]).sum(-1, dtype=np.float64))
        losses = totals - np.take_along_axis(scores, targets[:, None], 1)[:, 0]
        return {
            "word_id": words.tolist(),
            "words": source.tokenizer.tokens(words),
            "right": int((words == targets).sum()),
            "loss": float(losses.sum()),
        }

    def label_roles(self) -> tuple[str, ...]:
        return ()

    def submission_value(self, prediction: Mapping[str, Any]) -> str:
        return " ".join(prediction.get("words", ()))

    def metrics(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> dict[str, float]:
        """Accuracy (the main metric, as higher is better) and perplexity over all masked tokens;
        empty for predictions of a file without them."""
        if not all(prediction.keys() >= _MEASURED for prediction in predictions.values()):
            return {}
        many = sum(len(prediction["word_id"]) for prediction in predictions.values())
        loss = sum(prediction["loss"] for prediction in predictions.values()) / many
        right = sum(prediction["right"] for prediction in predictions.values()) / many
        return {"accuracy": right, "perplexity": math.exp(min(loss, 700.0))}


def _continues_word(tokenizer: Tokenizer) -> np.ndarray:
    """(vocabulary,) bool: whether a token continues the word of the previous token.

    WordPiece marks these with `##`; in other vocabularies they are the tokens that neither start
    with a space nor are Chinese or punctuation. In byte-level vocabularies that is only seen in the
    text of a token, as its bytes are written as letters."""
    return np.array([more for _, more in token_texts(tokenizer, range(tokenizer.size))])
