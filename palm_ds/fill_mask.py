"""What an exported model puts in place of a hidden word: a look at what was learned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from palm_ds import keyed
from palm_ds.source import Source

_SENTENCE = (8, 30)  # tokens


class Filler:
    """A Hugging Face folder with a masked-word head, opened as anybody would open it."""

    def __init__(self, folder: Path):
        from transformers import AutoModelForMaskedLM
        from transformers.utils import logging

        shown, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            self.model = AutoModelForMaskedLM.from_pretrained(folder).eval()
        finally:
            logging.set_verbosity(shown)
            if bar:
                logging.enable_progress_bar()

    def guesses(self, ids: np.ndarray, at: int, top: int) -> list[tuple[int, float]]:
        """The most likely ids at one position of a text (with its special tokens), and their
        probabilities."""
        with torch.no_grad():
            logits = self.model(input_ids=torch.from_numpy(ids[None])).logits[0, at]
        best = logits.float().softmax(-1).topk(top)
        return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def examples(folder: Path, source: Source, *, count: int = 3, top: int = 3) -> list[str]:
    """Sentences of a source with one word hidden, and the guesses, a line each. None where the
    export has no masked-word head."""
    if not _has_head(folder):
        return []
    filler = Filler(folder)
    tokenizer, vocabulary = source.corpus.tokenizer(), source.vocabulary
    lines = []
    for number, (start, end) in enumerate(_sentences(source, count)):
        ids = np.array([vocabulary.cls, *source.read(start, end).ids, vocabulary.sep])
        rng = keyed.generator(keyed.key("hidden word"), number)
        hidden = int(rng.choice(np.flatnonzero(np.isin(ids, vocabulary.regular))))
        truth, ids[hidden] = int(ids[hidden]), vocabulary.mask
        best = filler.guesses(ids, hidden, top)
        said = ", ".join(f"{tokenizer.tokens([word])[0]} {100 * p:.0f} %" for word, p in best)
        text = tokenizer.decode(ids[1:-1], skip_special=False)
        lines.append(f"{text}  ->  {said}  (it was: {tokenizer.tokens([truth])[0]})")
    return lines


def _has_head(folder: Path) -> bool:
    from transformers import AutoConfig

    architectures = AutoConfig.from_pretrained(folder).architectures or []
    return any(name.endswith("ForMaskedLM") for name in architectures)


def _sentences(source: Source, count: int) -> list[tuple[int, int]]:
    """Some sentences of middling length, the same ones every time."""
    starts = source.corpus.sentence_starts
    first = [
        np.arange(a, b) for a, b in zip(source.first_sentences, source.last_sentences, strict=True)
    ]
    numbers = np.concatenate(first)
    size = starts[numbers + 1] - starts[numbers]
    fitting = numbers[(size >= _SENTENCE[0]) & (size <= _SENTENCE[1])]
    order = keyed.permute(keyed.key("sentences"), len(fitting), np.arange(min(count, len(fitting))))
    return [(int(starts[n]), int(starts[n + 1])) for n in fitting[order]]
