"""A small corpus of numbers: documents of sentences of words, with every annotation, in a
second."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import processors

from palm_ds.corpus.store import Corpus, open_corpus
from palm_ds.corpus.writer import write_corpus
from palm_ds.text.tokenizer import wordpiece

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
FIRST = len(SPECIALS)


def write_small_corpus(
    folder: Path,
    *,
    documents: int = 40,
    words: int = 60,
    seed: int = 0,
    separators: int = 1,
    copies: int = 1,
) -> Corpus:
    """Documents of 1 to 25 sentences of 3 to 20 tokens; `words` regular words. `separators`: 2 for
    RoBERTa's way to join texts. `copies`: of each document."""
    tokenizer = wordpiece([*SPECIALS, *(f"w{i}" for i in range(words))], lower=False)
    if separators == 2:
        ends = [(token, SPECIALS.index(token)) for token in ("[SEP]", "[CLS]")]
        tokenizer.backend.post_processor = processors.RobertaProcessing(*ends)
    made = list(_documents(documents, words, np.random.default_rng(seed))) * copies
    write_corpus(folder, made, tokenizer)
    return open_corpus(folder)


def _documents(
    documents: int, words: int, rng: np.random.Generator
) -> Iterator[tuple[str, np.ndarray, dict[str, np.ndarray]]]:
    for number in range(documents):
        lengths = rng.integers(3, 20, rng.integers(1, 26))
        size = int(lengths.sum())
        sentence = np.zeros(size, np.uint8)
        sentence[np.cumsum(lengths) - lengths] = 1
        word = (rng.random(size) < 0.7).astype(np.uint8) | sentence
        spans = {}
        for name, every in (("phrase", 11), ("entity", 17)):
            spans[name] = np.zeros(size, np.uint8)
            for start in range(int(rng.integers(0, every)), size - 3, every):
                spans[name][start : start + 3] = 1, 2, 2
        # A drifting counter, so that neighboring sentences are alike.
        ids = FIRST + (rng.integers(0, 5, size) + np.arange(size) // 4 + number) % words
        yield f"doc{number}", ids, {"sentence": sentence, "word": word, **spans}
