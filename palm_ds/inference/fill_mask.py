"""Predicts masked tokens with a trained model.

    filler = TrainedModel.open("runs/mine").filler()
    filler.fill("The capital of [MASK] is Paris.", top=5)

Several [MASK]s in one text are predicted independently. A model that reads from left to right
predicts one, from the text before it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.text import Text

from palm_ds.common.errors import UserError
from palm_ds.common.rng import derive_key, keyed_generator, permutation_at
from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.tasks.example import Example, collate
from palm_ds.model.heads.outputs import Reading
from palm_ds.model.inputs.visibility import causal
from palm_ds.model.multi_task_model import Model
from palm_ds.text.display import LETTER, display_tokens
from palm_ds.text.tokenizer import Tokenizer
from palm_ds.weights.formats.huggingface.architecture import MASKED_WORDS

MASK = "[MASK]"
_SENTENCE = (8, 30)  # tokens
_ANCHORS = (",", "。", "-")


@dataclass(frozen=True, kw_only=True)
class Hidden:
    """One masked token: its position, the best guesses, and the true token with its probability
    (-1 and 0 if unknown)."""

    position: int
    guesses: Sequence[tuple[int, float]]
    truth: int = -1
    truth_probability: float = 0.0


@dataclass(frozen=True)
class Filled:
    """A text as the model sees it, and its masked tokens."""

    ids: np.ndarray
    hidden: Sequence[Hidden]


@dataclass(frozen=True)
class MaskedText:
    """The ids of a text with its special tokens, the positions of its masks, and the tokens that
    were there (-1 if unknown)."""

    ids: np.ndarray
    at: np.ndarray
    truths: np.ndarray


@dataclass(frozen=True)
class Filler:
    """A model with a masked-LM head and its tokenizer. `task` names the task whose row of the task
    embedding is used; empty if the checkpoint names none."""

    model: Model
    tokenizer: Tokenizer
    folder: Path
    task: str = ""
    task_id: int = 0
    reading: Reading = "masked"
    """Where the head predicts a token."""

    def label(self, example: Example, at: np.ndarray, head: str) -> None:
        """Add labels for a head where it predicts the tokens `at` some positions; what they attend
        to is as in training."""
        places = at - (self.reading != "masked")
        example.labels[head] = places, np.zeros(len(at), np.int64)
        if self.reading == "causal":
            example.visibility = causal(len(example))

    def probabilities(self, ids: np.ndarray, at: np.ndarray) -> torch.Tensor:
        """(len(at), vocab_size) float32: token probabilities at these positions of a text, whose
        ids include the special tokens."""
        nothing = np.zeros(len(ids), np.int64)
        example = Example(
            input_ids=ids, token_type_ids=nothing, source_offsets=nothing, annotations={}
        )
        self.label(example, at, MASKED_WORDS)
        batch = collate([[(example, self.task_id)]], length=len(ids), pad=0)
        device = next(self.model.parameters()).device
        with torch.no_grad():
            return self.model.logits(batch.to(device), MASKED_WORDS).float().softmax(-1)

    def fill(self, text: str, *, top: int, hide: str = "") -> Filled:
        """Guesses for every [MASK] of a text and every token of the word `hide`. Raises
        UserError."""
        masked = self.masked(text, hide=hide)
        return Filled(masked.ids, self.guess(masked.ids, masked.at, masked.truths, top=top))

    def masked(self, text: str, *, hide: str = "") -> MaskedText:
        """The tokens of a text with `[MASK]`s, and of one whose word `hide` is masked. Raises
        UserError."""
        vocabulary = self.tokenizer.vocabulary
        parts = self._parts(text)
        if hide:
            parts = [piece for part in parts for piece in self._hidden(part, hide)]
        ids = np.array([vocabulary.cls, *(i for part in parts for i in part.ids), vocabulary.sep])
        truths = np.array([-1, *(i for part in parts for i in part.truths), -1])
        at = np.flatnonzero(ids == vocabulary.mask)
        if not len(at):
            missing = f"the word {hide!r} is not in" if hide else f"there is no {MASK} in"
            raise UserError(
                f"{missing} {_short(text)!r}; write {MASK} for a missing word, such as "
                f"'The capital of {MASK} is Paris.'"
            )
        if len(at) > 1 and self.reading == "causal":
            raise UserError(
                f"{len(at)} tokens are masked in {_short(text)!r}: the model reads from left to "
                "right and predicts one, from the text before it"
            )
        longest = self.model.backbone.config.max_length
        if len(ids) > longest:
            raise UserError(
                f"{len(ids)} tokens in {_short(text)!r}: the model reads at most {longest}, "
                "including [CLS] and [SEP]; shorten it"
            )
        return MaskedText(ids, at, truths[at])

    def guess(
        self, ids: np.ndarray, at: np.ndarray, truths: np.ndarray, *, top: int
    ) -> list[Hidden]:
        """Guesses at some positions of a text, with the true tokens' probabilities."""
        return self.best_guesses(self.probabilities(ids, at), at, truths, top=top)

    def best_guesses(
        self, probabilities: torch.Tensor, at: np.ndarray, truths: np.ndarray, *, top: int
    ) -> list[Hidden]:
        """The most probable tokens at each of the positions `at`, given probabilities
        (len(at), vocab_size); never a special token, which no text can have there."""
        words = torch.from_numpy(self.tokenizer.vocabulary.regular).to(probabilities.device)
        best = probabilities[:, words].topk(min(top, len(words)))
        ids = words[best.indices]
        return [
            Hidden(
                position=int(place),
                guesses=list(zip(ids[k].tolist(), best.values[k].tolist(), strict=True)),
                truth=int(truth),
                truth_probability=float(probabilities[k, truth]) if truth >= 0 else 0.0,
            )
            for k, (place, truth) in enumerate(zip(at, truths, strict=True))
        ]

    def _parts(self, text: str) -> list[_Part]:
        """The text between its masks, and the masks."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"a text is not Unicode: {error}") from None
        annotations = {MASK, self.tokenizer.roles["mask"]}
        cut = re.split("|".join(map(re.escape, sorted(annotations))), text)
        mask = self.tokenizer.vocabulary.mask
        parts: list[_Part] = []
        for number, piece in enumerate(cut):
            if number:
                parts.append(_Part("", [mask], [-1], [0]))
            # SentencePiece and byte-level tokens include the space before a word.
            if number + 1 < len(cut) and not self.tokenizer.by_word:
                piece = piece.rstrip()
            ids, starts = self._encode(piece, inside=number > 0)
            parts.append(_Part(piece, ids, [-1] * len(ids), starts))
        return parts

    def _encode(self, text: str, *, inside: bool) -> tuple[list[int], list[int]]:
        """Token ids of a text and their character offsets. SentencePiece prepends a space to a
        text; with `inside`, after a mask, it must not."""
        ids, starts = self.tokenizer.encode_texts([text])[0]
        starts_word = inside and len(ids) and text[:1].strip()
        glued = starts_word and self.tokenizer.tokens(ids[:1])[0].startswith("▁")
        for anchor in _ANCHORS if glued else ():
            more, places = self.tokenizer.encode_texts([anchor + text])[0]
            if (places == len(anchor)).any():
                own = places >= len(anchor)
                return more[own].tolist(), (places[own] - len(anchor)).tolist()
        return ids.tolist(), starts.tolist()

    def _hidden(self, part: _Part, word: str) -> list[_Part]:
        """The part with every token of every occurrence of a word masked."""
        inside = [False] * len(part.ids)
        for match in _whole_word(word, any_case=self.tokenizer.lower).finditer(part.text):
            first, last = match.span()
            first -= part.text[first - 1 : first] == " "  # a space may belong to the token after it
            inside = [
                old or first <= at < last for old, at in zip(inside, part.starts, strict=True)
            ]
        mask = self.tokenizer.vocabulary.mask
        ids = [mask if hide else i for i, hide in zip(part.ids, inside, strict=True)]
        truths = [
            i if hide else t for i, t, hide in zip(part.ids, part.truths, inside, strict=True)
        ]
        return [_Part(part.text, ids, truths, part.starts)]


@dataclass(frozen=True)
class _Part:
    """A piece of a text: its ids, the ids before masking (-1 if unchanged), and the character
    offset of each token."""

    text: str
    ids: list[int]
    truths: list[int]
    starts: list[int] = field(default_factory=list)


def _whole_word(word: str, *, any_case: bool) -> re.Pattern[str]:
    """Matches a word that is not part of a longer one; Chinese has no such boundaries."""
    before = r"(?<![^\W_])" if LETTER.match(word[:1]) else ""
    after = r"(?![^\W_])" if LETTER.match(word[-1:]) else ""
    return re.compile(before + re.escape(word) + after, re.IGNORECASE if any_case else 0)


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


# Showing it --------------------------------------------------------------------------------------


def named(filler: Filler, hidden: Hidden) -> list[tuple[str, float]]:
    """[(token, probability)] of the guesses for a masked token."""
    words = display_tokens(filler.tokenizer, [word for word, _ in hidden.guesses])
    return [(word, p) for word, (_, p) in zip(words, hidden.guesses, strict=True)]


def as_text(filler: Filler, filled: Filled) -> Text:
    """The text as the model sees it, followed by a line of guesses per masked token."""
    seen = Text(filler.tokenizer.decode(filled.ids[1:-1], skip_special=False))
    seen.highlight_regex(re.escape(filler.tokenizer.roles["mask"]), "bold yellow")
    for number, hidden in enumerate(filled.hidden, 1):
        seen.append("\n  " + (f"{number}  " if len(filled.hidden) > 1 else ""), "dim")
        for rank, (word, p) in enumerate(named(filler, hidden)):
            seen.append("   " if rank else "")
            seen.append(word, "" if rank else "bold green")
            seen.append(f" {100 * p:.1f} %", "dim")
        if hidden.truth >= 0:
            was = display_tokens(filler.tokenizer, [hidden.truth])[0]
            seen.append(f"   (it was: {was}, {100 * hidden.truth_probability:.1f} %)", "cyan")
    return seen


def as_record(filler: Filler, text: str, filled: Filled) -> dict[str, Any]:
    """The same as JSON values. `position` counts the model's tokens; [CLS] is 0."""
    masks = []
    for hidden in filled.hidden:
        guesses = [
            {"token": word, "id": i, "probability": p}
            for (word, p), (i, _) in zip(named(filler, hidden), hidden.guesses, strict=True)
        ]
        mask: dict[str, Any] = {"position": hidden.position, "guesses": guesses}
        if hidden.truth >= 0:
            was = display_tokens(filler.tokenizer, [hidden.truth])[0]
            mask |= {"was": was, "was_probability": hidden.truth_probability}
        masks.append(mask)
    return {"text": text, "task": filler.task, "masks": masks}


# Examples at the end of a run -------------------------------------------------------------


def example_lines(
    filler: Filler, source: CorpusSource, *, count: int = 3, top: int = 3
) -> list[str]:
    """Sentences of a source with one token masked, and the guesses, one line each."""
    vocabulary = source.vocabulary
    lines = []
    for number, (start, end) in enumerate(_sentences(source, count)):
        ids = np.array([vocabulary.cls, *source.read(start, end).ids, vocabulary.sep])
        words = np.flatnonzero(np.isin(ids, vocabulary.regular))
        if not len(words):
            continue  # all are [UNK]
        hidden = keyed_generator(derive_key("hidden word"), number).choice(words, 1)
        truth, ids[hidden] = ids[hidden], vocabulary.mask
        (guess,) = filler.guess(ids, hidden, truth, top=top)
        text = filler.tokenizer.decode(ids[1:-1], skip_special=False)
        guesses = ", ".join(f'"{word}" {100 * p:.0f} %' for word, p in named(filler, guess))
        was = display_tokens(filler.tokenizer, truth)[0]
        lines.append(f'example: {text}  ->  {guesses}; it was "{was}"')
    return lines


def _sentences(source: CorpusSource, count: int) -> list[tuple[int, int]]:
    """Sentences of medium length, the same ones every time."""
    starts = source.corpus.sentence_starts
    first = [
        np.arange(a, b) for a, b in zip(source.first_sentences, source.last_sentences, strict=True)
    ]
    numbers = np.concatenate(first)
    size = starts[numbers + 1] - starts[numbers]
    fitting = numbers[(size >= _SENTENCE[0]) & (size <= _SENTENCE[1])]
    order = permutation_at(
        derive_key("sentences"), len(fitting), np.arange(min(count, len(fitting)))
    )
    return [(int(starts[n]), int(starts[n + 1])) for n in fitting[order]]
