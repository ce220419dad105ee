"""More rows for a teacher to label, made from those of a table (PaddlePaddle/ERNIE, `distill/`).

    row ──copies──> words replaced by an unknown one, by others of the same class, by the guesses of
                    a masked-LM model; or a piece of the text
        ──> {text_a, text_b, label: null, source_row, copy}

ERNIE replaces each word by [UNK] and by a word of the same part of speech with a probability of 0.1
each, and samples pieces of any length. Here each copy is either a piece or the whole text, and then
each word is replaced in at most one way. Every copy is a pure function of (seed, row, copy).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from palm_ds.common.atomic import write_file_atomically
from palm_ds.common.errors import UserError
from palm_ds.common.rng import derive_key, keyed_generator
from palm_ds.data.reader import Table
from palm_ds.inference.fill_mask import MASK, Filler, named
from palm_ds.text.word_tags import tagged_words, words_by_class

UNKNOWN = "\ua66e"
"""A letter that no vocabulary has: a word of it becomes the vocabulary's [UNK]."""
_TOP = 10  # guesses to choose from
_TEXTS = ("text_a", "text_b")

Guesser = Callable[[str], Sequence[Sequence[tuple[str, float]]]]
"""For each [MASK] of a text, [(word, probability)]."""


@dataclass(frozen=True, kw_only=True)
class AugmentSettings:
    """How rows are changed."""

    copies: int = 10
    """Rows made of each row."""
    unknown: float = 0.1
    """Probability of a word to become unknown."""
    same_class: float = 0.1
    """Probability of a word to become another one of its class, from the same table."""
    guess: float = 0.0
    """Probability of a word to become a guess of the model."""
    piece: float = 0.25
    """Share of the copies that are a piece of the text, of any number of words."""
    seed: int = 1
    keep_labels: bool = False
    """Give copies the label of their row, too. Otherwise only a teacher labels them."""

    def __post_init__(self) -> None:
        for name in ("unknown", "same_class", "guess", "piece"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"--{name}: {getattr(self, name)} is not from 0 to 1")
        if self.unknown + self.same_class + self.guess > 1:
            raise UserError("--unknown, --same_class, --guess: add up to more than 1")
        if self.copies < 1:
            raise UserError(f"--copies: {self.copies}; expected at least 1")


def guesser_of(filler: Filler) -> Guesser:
    """The best guesses of a model."""
    return lambda text: [named(filler, x) for x in filler.fill(text, top=_TOP).hidden]


def augment(
    table: Table, output: Path, settings: AugmentSettings, guesser: Guesser | None = None
) -> int:
    """Write the rows of a table and their copies as JSON lines; returns their number. The file is
    complete or absent. Raises UserError."""
    if settings.guess and guesser is None:
        raise UserError("--guess: needs --model, a masked-LM model that guesses")
    texts = [column for column in _TEXTS if column in table.columns]
    if not texts:
        raise UserError(f"{', '.join(table.names)}: no column of texts (text_a, text_b)")
    known = words_by_class([text for column in texts for text in table.column(column)])
    lines = [
        json.dumps(row, ensure_ascii=False) + "\n"
        for row in _rows(table, texts, known, settings, guesser)
    ]
    write_file_atomically(output, "".join(lines))
    return len(lines)


def _rows(
    table: Table,
    texts: Sequence[str],
    known: Mapping[str, Sequence[str]],
    settings: AugmentSettings,
    guesser: Guesser | None,
) -> Iterator[dict[str, Any]]:
    key = derive_key(settings.seed, "augment")
    has_label = "label" in table.columns
    for number in range(len(table)):
        row = table[number]
        own = {column: row[column] for column in texts} | {"label": row.get("label")}
        yield own | {"source_row": number, "copy": 0}
        label = row.get("label") if settings.keep_labels and has_label else None
        for copy in range(1, settings.copies + 1):
            rng = keyed_generator(key, number * settings.copies + copy - 1)
            try:
                changed = {x: changed_text(row[x], known, settings, rng, guesser) for x in texts}
            except UserError as error:
                raise UserError(f"{table.where(number)}: {error}") from None
            yield changed | {"label": label, "source_row": number, "copy": copy}


def changed_text(
    text: str,
    known: Mapping[str, Sequence[str]],
    settings: AugmentSettings,
    rng: np.random.Generator,
    guesser: Guesser | None = None,
) -> str:
    """One copy of a text."""
    words = tagged_words(text.replace(MASK, " "))
    if rng.random() < settings.piece:
        return _piece(text, [word for word, _ in words], rng)
    draws, out, masked = rng.random(len(words)), [], False
    limits = np.cumsum([settings.unknown, settings.same_class, settings.guess])
    for (word, tag), draw in zip(words, draws, strict=True):
        if not any(map(str.isalnum, word)) or draw >= limits[2]:
            out.append(word)
        elif draw < limits[0]:
            out.append(UNKNOWN)
        elif draw < limits[1]:
            out.append(str(rng.choice(known[tag])) if tag else word)
        else:
            out.append(MASK)
            masked = True
    if not masked or guesser is None:
        return "".join(out)
    return _guessed(out, guesser("".join(out)), rng)


def _piece(text: str, words: Sequence[str], rng: np.random.Generator) -> str:
    """Some consecutive words: 1 to all."""
    size = int(rng.integers(1, max(len(words), 1) + 1))
    first = int(rng.integers(0, max(len(words) - size, 0) + 1))
    return "".join(words[first : first + size]).strip() or text


def _guessed(
    words: Sequence[str], guesses: Sequence[Sequence[tuple[str, float]]], rng: np.random.Generator
) -> str:
    """The words with a guess for each mask, drawn by its probability."""
    out, left = [], iter(guesses)
    for word in words:
        if word == MASK:
            found = next(left)
            weights = np.array([p for _, p in found])
            out.append(found[int(rng.choice(len(found), p=weights / weights.sum()))][0])
        else:
            out.append(word)
    return "".join(out)
