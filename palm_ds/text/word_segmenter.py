"""ERNIE tiny's tokenizer splits a text into words before SentencePiece sees it.

    "她说ERNIE 好"  ──words──> 她 说 ERNIE 好  ──lower, join──> "她 说 ernie 好"  ──> pieces

Which words, `word_segmenter` in tokenizer_config.json says:

    maximum_match   the longest word of a dictionary, of at most 5 characters, again and again
                    (`dict.wordseg.pickle` of the release: ERNIE's `WSSPTokenizer`)
    jieba           jieba's, of the lower-cased text (ERNIE's develop branch: `ErnieTinyTokenizer`)
    characters      each character and each run of Latin letters and digits, looked up with the sign
                    of a word start: how ERNIE tiny labels sequences (`CharTokenizer`)
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from palm_ds.common.errors import UserError, suggest
from palm_ds.common.files import hash_of_text
from palm_ds.text.chinese import simplify_in_place
from palm_ds.text.sentencepiece_model import WORD_START
from palm_ds.text.vocabulary_file import read_bytes, read_text

MAXIMUM_MATCH, JIEBA, CHARACTERS = "maximum_match", "jieba", "characters"
KEY, SIMPLIFY = "word_segmenter", "simplify"
DICTIONARY = "dict.wordseg.pickle"
_WORDS = "words.txt"  # the dictionary as palm_ds saves it
_WINDOW = 5  # characters of the longest word that is looked for
_MAX_RUN_LENGTH = 100  # letters and digits in a row; longer ones are unknown
_CONTAINERS = {
    ("builtins", "set"): set,
    ("__builtin__", "set"): set,
    ("builtins", "frozenset"): set,
    ("__builtin__", "frozenset"): set,
    ("collections", "OrderedDict"): dict,
}
"""All that a pickled dictionary may name."""


@dataclass(frozen=True, kw_only=True)
class WordSegmenter:
    """Splits a text into words, and knows where in the text the characters of a prepared one
    are."""

    kind: str
    """maximum_match or jieba."""
    words: frozenset[str] = field(default=frozenset(), repr=False)
    """The dictionary of maximum_match."""
    simplify: bool = False
    """Chinese is written in simplified characters before its words are looked up."""

    def cut(self, text: str) -> Sequence[str]:
        """The words of a text; joined they are the text."""
        if self.kind == JIEBA:
            import rjieba

            return rjieba.cut(text)
        return list(self._longest(text))

    def _longest(self, text: str) -> Iterator[str]:
        words, at = self.words, 0
        while at < len(text):
            for size in range(_WINDOW, 1, -1):
                if (word := text[at : at + size]) in words:
                    break
            else:
                word = text[at]
            yield word
            at += len(word)

    def prepare(self, text: str) -> tuple[str, np.ndarray]:
        """The words in lower case, joined by spaces, and (characters,) the place in the text of
        each of its characters; that of a joint is -1."""
        text = simplify_in_place(text) if self.simplify else text
        places = np.arange(len(text))
        if self.kind == JIEBA:
            text, places = _lowered(text, places)
        out: list[str] = []
        origin: list[np.ndarray] = []
        start = 0
        for word in self.cut(text):
            if word != " ":
                low, at = _lowered(word, places[start : start + len(word)])
                if out:
                    origin.append(_JOINT)
                out.append(low)
                origin.append(at)
            start += len(word)
        return " ".join(out), np.concatenate(origin) if origin else places[:0]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of what determines the words."""
        how = [SIMPLIFY] if self.simplify else []
        return hash_of_text("\n".join([self.kind, *how, *sorted(self.words)]))

    def save(self, folder: Path) -> dict[str, Any]:
        """Writes the dictionary; returns the entries of tokenizer_config.json."""
        if self.kind == MAXIMUM_MATCH:
            lines = "".join(f"{word}\n" for word in sorted(self.words))
            (folder / _WORDS).write_text(lines, "utf-8")
        return {KEY: self.kind, **({SIMPLIFY: True} if self.simplify else {})}


_JOINT = np.array([-1])


def _lowered(text: str, places: np.ndarray) -> tuple[str, np.ndarray]:
    """In lower case, with the place of each character: a few become two."""
    low = text.lower()
    if len(low) == len(text):
        return low, places
    return low, np.repeat(places, [len(character.lower()) for character in text])


def in_text(spans: np.ndarray, origin: np.ndarray) -> np.ndarray:
    """(tokens, 2) the characters [start, end) in a text, given those in the prepared one. A word's
    sign by itself covers none."""
    numbers = np.zeros_like(spans)
    for number, (start, end) in enumerate(spans):
        places = origin[start:end]
        places = places[places >= 0]
        if len(places):
            numbers[number] = places[0], places[-1] + 1
        else:
            after = origin[start:]
            numbers[number] = next(iter(after[after >= 0]), origin.max(initial=-1) + 1)
    return numbers


# ---- files ----


def find_word_segmenter(folder: Path, kind: str) -> WordSegmenter | None:
    """The segmenter of a tokenizer's folder: of the given kind, or that of ERNIE tiny if its
    dictionary is there. None: there is none. Raises UserError."""
    if kind == CHARACTERS:
        return None
    if kind == JIEBA:
        return WordSegmenter(kind=JIEBA)
    places = [folder / _WORDS, folder / DICTIONARY, folder / "subword" / DICTIONARY]
    segmenter_file = next((file for file in places if file.is_file()), None)
    if segmenter_file is not None and (kind or segmenter_file.name == DICTIONARY):
        return WordSegmenter(kind=MAXIMUM_MATCH, words=_read_words(segmenter_file))
    if kind:
        raise UserError(
            f"tokenizer {folder}: {KEY} is {kind}, but its dictionary is missing: {DICTIONARY} or "
            f"{_WORDS}"
        )
    return None


def check_kind(kind: object, where: str) -> str:
    """The value of `word_segmenter`; raises UserError, with `where` in front, for another."""
    known = (MAXIMUM_MATCH, JIEBA, CHARACTERS)
    if kind in ("", None):
        return ""
    if kind not in known:
        raise UserError(f"{where}: {KEY}: no {kind!r}{suggest(str(kind), known)}")
    return str(kind)


def _read_words(file: Path) -> frozenset[str]:
    """The words that can be found; longer ones are in the dictionary but never matched."""
    words = _unpickled(file) if file.name == DICTIONARY else read_text(file).split("\n")
    usable = frozenset(word for word in words if isinstance(word, str) and 0 < len(word) <= _WINDOW)
    if not usable:
        raise UserError(f"tokenizer {file}: lists no words of at most {_WINDOW} characters")
    return usable


class _WordsUnpickler(pickle.Unpickler):
    """Containers of texts and numbers; anything else that a file names is refused, not imported."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _CONTAINERS:
            raise pickle.UnpicklingError(f"names {module}.{name}")
        return _CONTAINERS[module, name]


def _unpickled(file: Path) -> Iterable[object]:
    data = read_bytes(file)
    try:
        value = _WordsUnpickler(io.BytesIO(data), encoding="utf-8").load()
    except Exception as error:  # a damaged pickle may raise anything
        raise UserError(f"tokenizer {file}: not a list of words: {error or 'damaged'}") from None
    if not isinstance(value, set | dict | list | tuple):
        raise UserError(f"tokenizer {file}: not a list of words, but {type(value).__name__}")
    return value


# ---- characters ----


def compile_characters(
    tokens: Sequence[str], *, unknown: str, special: Sequence[str], lower: bool
) -> Backend:
    """ERNIE's CharTokenizer over a vocabulary of pieces: the longest ones first, from left to
    right, the first one with the sign of a word start; a word that does not come out is unknown."""
    # The sign by itself is never the first piece; no text has this token.
    known = {
        token if token != WORD_START else f"{WORD_START} ": i for i, token in enumerate(tokens)
    }
    model = models.WordPiece(
        known,
        unk_token=unknown,
        continuing_subword_prefix="",
        max_input_chars_per_word=_MAX_RUN_LENGTH + len(WORD_START),
    )
    backend = Backend(model)
    if lower:
        backend.normalizer = normalizers.Lowercase()
    each = pre_tokenizers.Split(Regex(r"[a-zA-Z0-9]+|\S"), "removed", invert=True)
    sign = pre_tokenizers.Metaspace(WORD_START, prepend_scheme="always", split=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([each, sign])
    backend.decoder = decoders.Metaspace(WORD_START, prepend_scheme="always")
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return backend
