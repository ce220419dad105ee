"""Token annotations: one uint8 per token, each computed by a function of a document.

    def sentence(document: Document) -> np.ndarray     # 1 at the first token of a sentence

A task that needs a custom annotation declares such a function, and
`palm-ds corpus annotate CORPUS INPUT --annotation module:function` adds it to a corpus.
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
    """A text with its tokens, words, sentences and spans. Positions are characters of `text`; words
    and sentences include the white space before them, so that they cover the text."""

    id: str
    text: str  # as it was given (simplified if asked), before any lower-casing
    tokenizer: Tokenizer
    ids: np.ndarray  # (tokens,) int64
    token_starts: np.ndarray  # (tokens,) int64: where each token begins
    word_starts: np.ndarray  # (words,) int64: where each word begins
    sentence_starts: np.ndarray  # (sentences,) int64: where each sentence begins
    paragraph_starts: (
        np.ndarray
    )  # (paragraphs,) int64: where each paragraph begins, if at a sentence
    # In order of precedence, (n, 2) int64 first and one past the last character:
    phrases: Sequence[np.ndarray] = field(default=())
    entities: Sequence[np.ndarray] = field(default=())
    word_of: np.ndarray  # (tokens,) int64: the word each token begins in
    capitals: np.ndarray  # (words,) bool: begins with a capital letter
    # Of a text put together from parts (a title and a text, a pair, a dialogue's turns):
    part_starts: np.ndarray = field(default_factory=_none)  # (parts,) int64: where each begins
    has_title: bool = False  # the first part is a title
    part_values: Mapping[str, np.ndarray] = field(default_factory=dict)  # (parts,) uint8 each

    def __len__(self) -> int:
        return len(self.ids)

    def first_tokens(self, places: np.ndarray) -> np.ndarray:
        """(tokens,) uint8: 1 at the first token at or after each position."""
        values = np.zeros(len(self), np.uint8)
        first = np.searchsorted(self.token_starts, places)
        values[first[first < len(self)]] = 1
        return values

    def first_and_inside(self, groups: Sequence[np.ndarray]) -> np.ndarray:
        """(tokens,) uint8: 1 at the first token of each span, 2 inside, 0 outside. A span that
        overlaps one of an earlier group, or an earlier one of its own group, is skipped."""
        values = np.zeros(len(self), np.uint8)
        for group in groups:
            if len(group):
                self._add_spans(values, group)
        return values

    def _add_spans(self, values: np.ndarray, group: np.ndarray) -> None:
        first, last = (
            np.searchsorted(self.token_starts, group[:, 0]),
            np.searchsorted(self.token_starts, group[:, 1]),
        )
        taken = np.append(0, np.cumsum(values > 0))
        before = np.append(0, np.maximum.accumulate(last)[:-1])
        free = (taken[last] == taken[first]) & (last > first) & (first >= before)
        first, last = first[free], last[free]
        steps = np.zeros(len(values) + 1, np.int8)
        steps[first] += 1
        np.subtract.at(steps, last, 1)
        values[np.cumsum(steps[:-1]) > 0] = 2
        values[first] = 1

    def per_word(self, values: np.ndarray) -> np.ndarray:
        """(tokens,) the value of the word that each token begins in."""
        return values[self.word_of]

    def per_part(self, name: str) -> np.ndarray:
        """(tokens,) uint8: the value of each token's part, of an annotation given by the input."""
        if name not in self.part_values:
            raise UserError(
                f"annotation {name!r}: document {self.id!r} has none; only input of --format "
                f"{' or '.join(INPUT_ANNOTATIONS[name])} gives it"
            )
        return self.part_values[name][
            np.searchsorted(self.part_starts, self.token_starts, side="right") - 1
        ]


TokenAnnotation = Callable[[Document], np.ndarray]


def sentence(document: Document) -> np.ndarray:
    """1 at the first token of a sentence, 2 if it also begins a paragraph."""
    values = document.first_tokens(document.sentence_starts)
    values[(values == 1) & (document.first_tokens(document.paragraph_starts) == 1)] = 2
    values[0] = 2
    return values


def word(document: Document) -> np.ndarray:
    """1 at the first token of a word, 0 inside it."""
    values = np.ones(len(document), np.uint8)
    values[1:] = np.diff(document.word_of) != 0
    return values


def phrase(document: Document) -> np.ndarray:
    """Phrases: 0 outside, 1 at the first token, 2 inside."""
    return document.first_and_inside(document.phrases)


def entity(document: Document) -> np.ndarray:
    """Named entities: 0 outside, 1 at the first token, 2 inside."""
    return document.first_and_inside(document.entities)


def capital(document: Document) -> np.ndarray:
    """1 on every token of a word that began with a capital letter in the original text."""
    return document.per_word(document.capitals.astype(np.uint8))


def heading(document: Document) -> np.ndarray:
    """Headings: 0 outside, 1 at the first token, 2 inside. A heading is the title given with a
    text, or a short line between paragraphs (`palm_ds.text.headings`), and is a whole sentence."""
    headings: list[tuple[int, int]] = []
    start = 0
    if document.has_title:
        start = int(document.part_starts[1])
        headings.append((0, start))
    if document.has_title or not len(document.part_starts):
        headings += [
            (first, last)
            for first, last in find_headings(document.text, start)
            if not _within(document.sentence_starts, first, last)
        ]
    return document.first_and_inside([np.array(headings, np.int64).reshape(-1, 2)])


def _within(starts: np.ndarray, first: int, last: int) -> bool:
    """Whether a sentence begins inside a span, after its start."""
    return bool(np.searchsorted(starts, last) > np.searchsorted(starts, first, side="right"))


def label(document: Document) -> np.ndarray:
    """The label of a pair, as a number, on every token of both texts."""
    return document.per_part("label")


def role(document: Document) -> np.ndarray:
    """The speaker of a dialogue turn, as a number, on every token of the turn."""
    return document.per_part("role")


def mask_word(document: Document) -> np.ndarray:
    """For ERNIE's lines: the percentage of passes over the file in which whole words are masked."""
    return document.per_part("mask_word")


BUILT_IN: Mapping[str, TokenAnnotation] = {
    "sentence": sentence,
    "word": word,
    "phrase": phrase,
    "entity": entity,
    "capital": capital,
    "heading": heading,
}
_PART_ANNOTATIONS: Mapping[str, TokenAnnotation] = {
    "label": label,
    "role": role,
    "mask_word": mask_word,
}
INPUT_ANNOTATIONS = {"label": ("pairs", "ernie"), "role": ("dialogues",), "mask_word": ("ernie",)}
"""Annotations that the input itself gives, and the formats that give them."""
DEFAULT_ANNOTATIONS = ("sentence", "word", "phrase", "entity")


def find_annotation(name: str) -> tuple[str, TokenAnnotation]:
    """The name and function of an annotation: a built-in name, or a user-defined `module:function`
    (named after the function) or `name=module:function`."""
    if ":" not in name:
        known = {**BUILT_IN, **_PART_ANNOTATIONS}
        if name not in known:
            raise UserError(
                f"unknown annotation {name!r}{suggest(name, BUILT_IN)}; give your own as "
                "module:function"
            )
        return name, known[name]
    given, _, path = name.rpartition("=")
    function = find_function(path, "annotation")
    short = given or path.rpartition(":")[2].rpartition(".")[2]
    if short in BUILT_IN or short in INPUT_ANNOTATIONS or short in ("id", "ids"):
        raise UserError(
            f"annotation {name!r}: {short!r} is a built-in name; choose another with name=..."
        )
    return short, function


def how_to_add(names: Sequence[str], corpus: object) -> str:
    """Instructions for adding annotations that a corpus lacks."""
    for name in names:
        if name in INPUT_ANNOTATIONS:
            formats = " or ".join(f"--format {each}" for each in INPUT_ANNOTATIONS[name])
            return f"only the input gives {name}: prepare a corpus with palm-ds prepare {formats}"
    given = [name if name in BUILT_IN else f"{name}=MODULE:FUNCTION" for name in names]
    options = " ".join(f"--annotation {value}" for value in given)
    return f"add it with: palm-ds corpus annotate {corpus} INPUT... {options}"


def find_function(name: str, what: str) -> Callable:
    """Imports the function named `module:function`; `what` names its use in errors."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise UserError(f"{what} {name!r}: must be module:function")
    try:
        target: object = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f"{what} {name!r}: cannot import {module_name!r}: {error}") from None
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise UserError(f"{what} {name!r}: {module_name!r} has no {attribute!r}")
        target = getattr(target, part)
    if not callable(target):
        raise UserError(f"{what} {name!r}: {attribute!r} is not a function")
    return target


def apply_annotation(name: str, function: TokenAnnotation, document: Document) -> np.ndarray:
    """Computes an annotation of a document and checks it: (tokens,) uint8. Raises UserError if a
    function of the user fails."""
    try:
        values = np.asarray(function(document))
    except Exception as error:
        if name in BUILT_IN or isinstance(error, UserError):
            raise
        raise UserError(
            f"annotation {name!r}: failed on document {document.id!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if values.shape != document.ids.shape:
        raise UserError(
            f"annotation {name!r}: document {document.id!r}: values of shape {values.shape}, "
            f"expected one for each of {len(document)} tokens"
        )
    if values.dtype == np.uint8:
        return values
    whole = values.dtype.kind in "bui"
    if not whole or (len(values) and not 0 <= values.min() <= values.max() < 256):
        raise UserError(
            f"annotation {name!r}: document {document.id!r}: values of type {values.dtype}, "
            "expected whole numbers from 0 to 255"
        )
    return values.astype(np.uint8)
