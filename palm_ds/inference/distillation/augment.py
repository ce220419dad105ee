"""More rows for a teacher to label, made from those of a table (PaddlePaddle/ERNIE, `distill/`).

    row ──copies──> words replaced by an unknown one, by others of the same class, by the guesses of
                    a masked-LM model; or a piece of the text
        ──> {text_a, text_b, label: null, source_row, copy}

ERNIE replaces each word by [UNK] and by a word of the same part of speech with a probability of 0.1
each, and samples pieces of any length. Here each copy is either a piece or the whole text, and then
each word is replaced in at most one way. Every copy is a pure function of (seed, row, copy).

A coarse class of each word says which words can take one another's place:

    Chinese   the part of speech that the segmenter (rjieba) gives: n, v, a, ...
    others    the ending and the case: -ing, -ed, -ly, ..., capital, number

There is no tagger of English here. Words without a known ending, short words and function words
have no class, so that no other takes their place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import PositiveInt

from palm_ds.common.errors import UserError
from palm_ds.common.files import check_rows_file
from palm_ds.common.rng import derive_key, keyed_generator
from palm_ds.common.settings import Settings, Share
from palm_ds.common.version import __version__
from palm_ds.data.reader import Table
from palm_ds.inference.fill_mask import MASK, Filler, Hidden, named
from palm_ds.inference.parts import OutputParts, model_files
from palm_ds.text.english_lists import FUNCTION_WORDS
from palm_ds.text.tokenizer import CHINESE

UNKNOWN = "\ua66e"
"""A letter that no vocabulary has: a word of it becomes the vocabulary's [UNK]."""
_ROWS = 256  # of a part, without their copies
_TOP = 10  # guesses to choose from
_TEXTS = ("text_a", "text_b")
_ENDINGS = (
    *("ations", "ation", "nesses", "ness", "ments", "ment", "ities", "ity", "isms", "ism"),
    *("ings", "ing", "ists", "ist", "able", "ible", "less", "ful", "ous", "ive", "ish", "est"),
    *("ally", "ly", "ies", "ers", "er", "ed", "al", "ic", "y", "s"),
)
_SHORTEST = 5  # letters of a word whose ending says something
_CONTINUES = "##"  # of a token that continues a word, as it is displayed

Guesser = Callable[[Sequence[str]], Sequence[Sequence[tuple[str, float]]]]
"""For each [MASK] among the words of a text, [(word, probability)]."""


@dataclass(frozen=True, kw_only=True)
class AugmentSettings(Settings, option="--"):
    """Settings for augmenting rows."""

    copies: PositiveInt = 10
    """Rows made of each row."""
    unknown: Share = 0.1
    """Probability of a word to become unknown."""
    same_class: Share = 0.1
    """Probability of a word to become another one of its class, from the same table."""
    guess: Share = 0.0
    """Probability of a word to become a guess of the model."""
    piece: Share = 0.25
    """Share of the copies that are a piece of the text, of any number of words."""
    seed: int = 1
    keep_labels: bool = False
    """Give copies the label of their row, too. Otherwise only a teacher labels them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unknown + self.same_class + self.guess > 1:
            raise UserError("--unknown, --same_class, --guess: add up to more than 1")


def guesser_of(filler: Filler) -> Guesser:
    """The best guesses of a model that are whole words. It reads a text that is too long for it in
    halves."""
    longest = filler.model.backbone.config.max_length
    own = filler.tokenizer.roles["mask"]

    def guess(words: Sequence[str]) -> Sequence[Sequence[tuple[str, float]]]:
        if MASK not in words:
            return []
        text, half = "".join(words), len(words) // 2
        if own != MASK:
            text = text.replace(own, " ")  # one of the row's own would shift the guesses
        tokens = 2 + len(filler.tokenizer.encode_texts([text])[0][0])
        if half and tokens > longest:
            return [*guess(words[:half]), *guess(words[half:])]
        return [_whole_words(filler, hidden) for hidden in filler.fill(text, top=_TOP).hidden]

    return guess


def _whole_words(filler: Filler, hidden: Hidden) -> list[tuple[str, float]]:
    special = filler.tokenizer.roles.values()
    guesses = named(filler, hidden)
    return [(x, p) for x, p in guesses if x not in special and not x.startswith(_CONTINUES)]


def augment(
    table: Table,
    output: Path,
    settings: AugmentSettings,
    guesser: Guesser | None = None,
    *,
    model: Path | None = None,
    done: Callable[[int, int], None] = lambda rows, of: None,
) -> int:
    """Write the rows of a table and their copies as JSON lines; returns their number. The file is
    complete or absent; rows that an interrupted run has finished are not copied again. `model`: the
    guesser's. `done(rows, of)` reports the progress. Raises UserError."""
    if settings.guess and guesser is None:
        raise UserError("--guess: needs --model, a masked-LM model that guesses")
    if settings.keep_labels and "label" not in table.columns:
        raise UserError(f"--keep_labels: {', '.join(table.names)}: no column has the role label")
    check_rows_file(output, table.names)
    texts = [column for column in _TEXTS if column in table.columns]
    if not texts:
        raise UserError(f"{', '.join(table.names)}: no text column (text_a, text_b)")
    known = words_by_class([text for column in texts for text in table.column(column)])
    guessing = model_files(model) if model else []
    key = [asdict(settings), table.fingerprint, guessing, __version__]
    starts = range(0, len(table), _ROWS)
    with OutputParts.opened(output, output.suffix, key) as parts:
        for first in starts:
            numbers = range(first, min(first + _ROWS, len(table)))
            if not parts.path(first).exists():
                rows = [*_rows(table, numbers, texts, known, settings, guesser)]
                parts.write(first, partial(_write_lines, rows))
            done(numbers.stop, len(table))
        parts.join(map(parts.path, starts), output)
    return len(table) * (1 + settings.copies)


def _write_lines(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8", newline="\n")


def _rows(
    table: Table,
    numbers: Iterable[int],
    texts: Sequence[str],
    known: Mapping[str, Sequence[str]],
    settings: AugmentSettings,
    guesser: Guesser | None,
) -> Iterator[dict[str, Any]]:
    keys = [derive_key(settings.seed, "augment", copy) for copy in range(settings.copies + 1)]
    has_label = "label" in table.columns
    for number in numbers:
        row = table[number]
        own = {column: row[column] for column in texts} | {"label": row.get("label")}
        yield own | {"source_row": number, "copy": 0}
        label = row.get("label") if settings.keep_labels and has_label else None
        for copy in range(1, settings.copies + 1):
            rng = keyed_generator(keys[copy], number)
            try:
                changed = {
                    text: changed_text(row[text], known, settings, rng, guesser) for text in texts
                }
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
    return _guessed(out, guesser(out), rng)


def _piece(text: str, words: Sequence[str], rng: np.random.Generator) -> str:
    """Some consecutive words: 1 to all."""
    size = int(rng.integers(1, max(len(words), 1) + 1))
    first = int(rng.integers(0, max(len(words) - size, 0) + 1))
    return "".join(words[first : first + size]).strip() or text


def _guessed(
    words: Sequence[str], guesses: Sequence[Sequence[tuple[str, float]]], rng: np.random.Generator
) -> str:
    """The words with a guess for each mask, drawn by its probability; unknown if there is none."""
    out, left = [], iter(guesses)
    for word in words:
        if word == MASK:
            candidates = next(left) or [(UNKNOWN, 1.0)]
            weights = np.array([p for _, p in candidates])
            out.append(candidates[int(rng.choice(len(candidates), p=weights / weights.sum()))][0])
        else:
            out.append(word)
    return "".join(out)


def tagged_words(text: str) -> list[tuple[str, str]]:
    """[(word, class)]; the words joined are the text, and white space, punctuation and words that
    are never replaced have the class ""."""
    if re.search(f"[{CHINESE}]", text):
        import rjieba

        return [(word, _chinese_tag(word, tag)) for word, tag in rjieba.tag(text)]
    return [(word, english_class(word)) for word in re.findall(r"\w+|\W", text)]


def _chinese_tag(word: str, tag: str) -> str:
    """Function words (u: particles, x: punctuation, ...) keep their place."""
    return tag if re.fullmatch(f"[{CHINESE}]+", word) and tag[:1] in set("nvadm") else ""


def english_class(word: str) -> str:
    """The class of a word of a language with letters."""
    if word.isdecimal():
        return "number"
    lower = word.lower()
    if not word.isalpha() or len(word) < _SHORTEST or lower in FUNCTION_WORDS:
        return ""
    ending = next((ending for ending in _ENDINGS if lower.endswith(ending)), "")
    if not ending:
        return ""
    return f"-{ending}, capital" if word[:1].isupper() else f"-{ending}"


def words_by_class(texts: Sequence[str]) -> dict[str, list[str]]:
    """{class: its words in these texts, each once, sorted}."""
    by_class: dict[str, set[str]] = {}
    for text in texts:
        for word, tag in tagged_words(text):
            if tag:
                by_class.setdefault(tag, set()).add(word)
    return {tag: sorted(words) for tag, words in by_class.items()}
