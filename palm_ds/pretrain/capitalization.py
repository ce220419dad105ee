"""Was this word capitalized in the original text? (ERNIE 2.0, section 4.2.1)

    paris is the capital of france .        the input of an uncased vocabulary
      1   0   0     0    0    1             labels at the first token of each word with letters

For uncased vocabularies. Masked words are labeled too, since their position and context may give
the answer; so the order of the tasks in a task group makes no difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.tasks.example import Example
from palm_ds.data.tasks.masking import class_prior_baseline
from palm_ds.pretrain.shared.predictions import ClassPrediction
from palm_ds.text.display import token_texts


@dataclass(frozen=True, kw_only=True)
class Capitalization(ClassPrediction):
    labels = ("small", "capital")
    of_texts = False

    def annotations(self) -> tuple[str, ...]:
        return ("capital", "word")

    def describe(self, source: CorpusSource) -> str:
        small, capital = self._label_counts(source)
        if not small + capital:
            found = "no word begins with a letter that may be a capital; there is nothing to learn"
        elif not capital:
            found = "no word is capitalized; was the text lowercased before it was prepared?"
        else:
            return ""
        return f"{self.name}: {source.corpus.path}: {found}"

    def label(self, example: Example, source: CorpusSource, rng: np.random.Generator) -> None:
        asked = (example.source_offsets >= 0) & self._asked(
            example.unmasked_ids, example.annotations["word"], source
        )
        where = np.flatnonzero(asked)
        example.labels[self.name] = where, example.annotations["capital"][where]

    def _asked(self, ids: np.ndarray, word: np.ndarray, source: CorpusSource) -> np.ndarray:
        """(tokens,) bool: the first token of a word that starts with a letter. Digits, full stops
        and Chinese are never capitals; labeling them would only inflate the accuracy."""
        letters, spaces = source.reference.cached("letters", lambda: self._letters(source))
        return _first_tokens(word == 1, spaces[ids]) & letters[ids]

    def _letters(self, source: CorpusSource) -> np.ndarray:
        """(2, vocabulary) bool: the token starts with a letter that has a capital form; it is space
        alone."""
        tokenizer = source.corpus.tokenizer()
        lowered = source.corpus.manifest.options.get("text", {}).get("lower", False)
        if not (tokenizer.lower or lowered):
            raise UserError(
                f"{self.where}: {source.corpus.path} was prepared with a tokenizer that keeps "
                f"capitals, so the input contains the answer; prepare it with --lower"
            )
        regular = source.vocabulary.regular
        texts = [text.replace("▁", " ") for text, _ in token_texts(tokenizer, regular)]
        found = np.zeros((2, source.vocabulary.size), bool)
        found[0, regular] = [text[:1].upper() != text[:1].lower() for text in texts]
        found[1, regular] = [text.isspace() for text in texts]
        return found

    def baseline(self, targets: np.ndarray, source: CorpusSource) -> tuple[np.ndarray, np.ndarray]:
        """The share of capitalized words."""
        return class_prior_baseline(targets, self._label_counts(source))

    def _label_counts(self, source: CorpusSource) -> np.ndarray:
        """(2,) words without and with a capital, in a sample of the source."""
        return source.cached("capitals", lambda: self._counts(source))

    def _counts(self, source: CorpusSource) -> np.ndarray:
        counts = np.zeros(2)
        for piece in source.sample(self.annotations()):
            asked = self._asked(piece.ids, piece.annotations["word"], source)
            counts += np.bincount(piece.annotations["capital"][asked], minlength=2)
        return counts


def _first_tokens(starts: np.ndarray, spaces: np.ndarray) -> np.ndarray:
    """(tokens,) bool: the first token of a word behind the space that it begins with, which small
    vocabularies have as tokens of its own."""
    at = np.arange(len(starts))
    word_start = np.maximum.accumulate(np.where(starts, at, -1))
    read = np.maximum.accumulate(np.where(spaces, -1, at))
    return ~spaces & (np.append(-1, read[:-1]) < word_start)
