"""Marks: one uint8 a token, each a function of a document.

    def sentence(document: Document) -> np.ndarray     # 1 at the first token of a sentence

A task that needs a mark of its own declares such a function (`columns` of a task), and
`palm-ds corpus annotate CORPUS INPUT --annotation module:function` writes its column.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from palm_ds.common.errors import UserError, suggest
from palm_ds.text.headings import find_headings

if TYPE_CHECKING:
    from palm_ds.text.tokenizer import Tokenizer


def _none() -> np.ndarray:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, kw_only=True)
class Document:
    """All that is known of one text. Places are characters of `text`; a word and a sentence begin
    with the white space before them, so that they leave nothing out."""

    id: str
    text: str  # as it was given (simplified if asked), before any lower-casing
    tokenizer: Tokenizer
    ids: np.ndarray  # (tokens,) int64
    at: np.ndarray  # (tokens,) int64: where each token begins
    words: np.ndarray  # (words,) int64: where each word begins
    sentences: np.ndarray  # (sentences,) int64: where each sentence begins
    paragraphs: np.ndarray  # (paragraphs,) int64: where each paragraph begins, if at a sentence
    # In order of precedence, (n, 2) int64 first and one past the last character:
    phrases: Sequence[np.ndarray] = field(default=())
    entities: Sequence[np.ndarray] = field(default=())
    word_of: np.ndarray  # (tokens,) int64: the word each token begins in
    capitals: np.ndarray  # (words,) bool: begins with a capital letter
    # Of a text put together from parts (a title and a text, a pair, a dialogue's turns):
    parts: np.ndarray = field(default_factory=_none)  # (parts,) int64: where each begins
    titled: bool = False  # the first part is a title
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)  # (parts,) uint8 each

    def __len__(self) -> int:
        return len(self.ids)

    def first_tokens(self, places: np.ndarray) -> np.ndarray:
        """(tokens,) uint8: 1 at the first token at or after each place."""
        mark = np.zeros(len(self), np.uint8)
        first = np.searchsorted(self.at, places)
        mark[first[first < len(self)]] = 1
        return mark

    def spans(self, groups: Sequence[np.ndarray]) -> np.ndarray:
        """(tokens,) uint8: 1 at the first token of each span, 2 inside, 0 outside. A span that
        touches one of an earlier group, or an earlier one of its own, is left out."""
        mark = np.zeros(len(self), np.uint8)
        for group in groups:
            if len(group):
                self._fill(mark, group)
        return mark

    def _fill(self, mark: np.ndarray, group: np.ndarray) -> None:
        first, last = np.searchsorted(self.at, group[:, 0]), np.searchsorted(self.at, group[:, 1])
        taken = np.append(0, np.cumsum(mark > 0))
        before = np.append(0, np.maximum.accumulate(last)[:-1])
        free = (taken[last] == taken[first]) & (last > first) & (first >= before)
        first, last = first[free], last[free]
        steps = np.zeros(len(mark) + 1, np.int8)
        steps[first] += 1
        np.subtract.at(steps, last, 1)
        mark[np.cumsum(steps[:-1]) > 0] = 2
        mark[first] = 1

    def per_word(self, values: np.ndarray) -> np.ndarray:
        """(tokens,): to each token the value of the word it begins in."""
        return values[self.word_of]

    def per_part(self, column: str) -> np.ndarray:
        """(tokens,) uint8: to each token its part's value in a column that the input gives."""
        if column not in self.columns:
            raise UserError(
                f"mark {column!r}: comes with --format {' and '.join(GIVEN[column])}; document "
                f"{self.id!r} has none"
            )
        return self.columns[column][np.searchsorted(self.parts, self.at, side="right") - 1]


Mark = Callable[[Document], np.ndarray]


def sentence(document: Document) -> np.ndarray:
    """1 at the first token of a sentence, 2 where a paragraph begins with it."""
    mark = document.first_tokens(document.sentences)
    mark[(mark == 1) & (document.first_tokens(document.paragraphs) == 1)] = 2
    mark[0] = 2
    return mark


def word(document: Document) -> np.ndarray:
    """1 at the first token of a word, 0 where a word goes on."""
    mark = np.ones(len(document), np.uint8)
    mark[1:] = np.diff(document.word_of) != 0
    return mark


def phrase(document: Document) -> np.ndarray:
    """Phrases: 0 outside, 1 first token, 2 inside."""
    return document.spans(document.phrases)


def entity(document: Document) -> np.ndarray:
    """Named entities: 0 outside, 1 first token, 2 inside."""
    return document.spans(document.entities)


def capital(document: Document) -> np.ndarray:
    """1 on every token of a word that began with a capital in the text as it was given."""
    return document.per_word(document.capitals.astype(np.uint8))


def heading(document: Document) -> np.ndarray:
    """Headings, each a sentence of its own: 0 outside, 1 first token, 2 inside. They are a title
    that came with the text, and short lines that stand alone in it."""
    found: list[tuple[int, int]] = []
    start = 0
    if document.titled:
        start = int(document.parts[1])
        found.append((0, start))
    if document.titled or not len(document.parts):
        found += [
            (first, last)
            for first, last in find_headings(document.text, start)
            if not _within(document.sentences, first, last)
        ]
    return document.spans([np.array(found, np.int64).reshape(-1, 2)])


def _within(starts: np.ndarray, first: int, last: int) -> bool:
    """Whether a sentence begins inside a span that begins with a sentence."""
    return bool(np.searchsorted(starts, last) > np.searchsorted(starts, first, side="right"))


def label(document: Document) -> np.ndarray:
    """The number of a pair's label, on every token of both texts."""
    return document.per_part("label")


def role(document: Document) -> np.ndarray:
    """The number of the speaker of a dialogue's turn, on every token of it."""
    return document.per_part("role")


def mask_word(document: Document) -> np.ndarray:
    """Of ERNIE's lines: in so many percent of passes over the file whole words are masked."""
    return document.per_part("mask_word")


BUILT_IN: Mapping[str, Mark] = {
    "sentence": sentence,
    "word": word,
    "phrase": phrase,
    "entity": entity,
    "capital": capital,
    "heading": heading,
}
_OF_PARTS: Mapping[str, Mark] = {"label": label, "role": role, "mask_word": mask_word}
GIVEN = {"label": ("pairs", "ernie"), "role": ("dialogues",), "mask_word": ("ernie",)}
"""Marks that the input itself gives, and the formats that do."""
ALWAYS = ("sentence", "word", "phrase", "entity")


def find_mark(name: str) -> tuple[str, Mark]:
    """A mark's name and function: a built-in one, or `module:function` of the user's own, named as
    the function is or as `name=module:function` says."""
    if ":" not in name:
        known = {**BUILT_IN, **_OF_PARTS}
        if name not in known:
            raise UserError(
                f"unknown mark {name!r}{suggest(name, BUILT_IN)}; a mark of your own is "
                "module:function"
            )
        return name, known[name]
    given, _, path = name.rpartition("=")
    function = find_function(path, "mark")
    short = given or path.rpartition(":")[2].rpartition(".")[2]
    if short in BUILT_IN or short in GIVEN or short in ("id", "ids"):
        raise UserError(f"mark {name!r}: {short!r} is the name of a column there is already")
    return short, function


def find_function(name: str, what: str) -> Callable:
    """The function that `module:function` names."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise UserError(f"{what} {name!r}: give it as module:function")
    try:
        found: object = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f"{what} {name!r}: cannot import {module_name!r}: {error}") from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UserError(f"{what} {name!r}: {module_name!r} has no {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise UserError(f"{what} {name!r}: {attribute!r} is not a function")
    return found


def apply_mark(name: str, function: Mark, document: Document) -> np.ndarray:
    """The mark of a document, checked: one uint8 a token."""
    values = np.asarray(function(document))
    if values.shape != document.ids.shape:
        raise UserError(
            f"mark {name!r}: document {document.id!r}: {values.shape} values for "
            f"{len(document)} tokens; one a token is due"
        )
    if values.dtype == np.uint8:
        return values
    whole = values.dtype.kind in "bui"
    if not whole or (len(values) and not 0 <= values.min() <= values.max() < 256):
        raise UserError(
            f"mark {name!r}: document {document.id!r}: values of type {values.dtype}; whole "
            "numbers 0 to 255 are due"
        )
    return values.astype(np.uint8)
