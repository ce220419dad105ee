"""A cache of the features of every word seen so far, as arrays.

Words include the white space before them. Features that depend on it are stored per word, all
others per *surface* (the word without that white space), so that " the", "the" and "\\n    the" are
analyzed once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from palm_ds.text.phrases import lexicon_units
from palm_ds.text.word_features import is_han, leading_space_flags, surface_flags
from palm_ds.text.words import GrowableArray, RaggedArray, WordIndex

Encode = Callable[[Sequence[str]], list[tuple[np.ndarray, np.ndarray]]]


@dataclass(frozen=True, kw_only=True)
class WordResources:
    """Resources that the features of a surface are derived from."""

    encode: Encode | None  # ids and start characters; None if tokenization depends on context
    is_name: Callable[[str], bool]  # for Chinese words
    pairs: Mapping[str, int]  # lower-case word -> its number in the collocations
    lexicons: Sequence[Mapping[str, int]]  # for each lexicon: unit -> number
    language: str


@dataclass(frozen=True)
class WordLookup:
    """The words of a text as found in the cache; arrays are (words,)."""

    surfaces: np.ndarray  # index of the surface in the cache
    starts: np.ndarray  # start character in the text, white space included
    leading: np.ndarray  # characters of white space before the surface
    flags: np.ndarray
    length: int  # characters of the text

    @property
    def ends(self) -> np.ndarray:
        return np.append(self.starts[1:], self.length)


class WordCache:
    """Word features, computed when a word is first looked up."""

    def __init__(self, resources: WordResources) -> None:
        self.resources = resources
        self.words, self.surfaces = WordIndex(), WordIndex()
        self._surface_index, self._leading, self._length = (
            GrowableArray(np.int64) for _ in range(3)
        )
        self._space_flags, self._surface_flags = GrowableArray(np.int64), GrowableArray(np.int64)
        self._names, self._pairs = GrowableArray(bool), GrowableArray(np.int64)
        self._tokens, self._token_starts = RaggedArray(np.int64), RaggedArray(np.int64)
        self._lexicon_units = [RaggedArray(np.int64) for _ in resources.lexicons]
        self._unit_starts = RaggedArray(np.int64)
        self._encoded: dict[str, tuple[list[int], list[int]]] = {}

    def __len__(self) -> int:
        return len(self.words)

    def look_up(self, words: Sequence[str]) -> WordLookup:
        """Looks up the words of a text, in order."""
        numbers = self.words.numbers(words)
        if self.words.new:
            self._learn(self.words.new)
            self.words.new = []
        surfaces, ends = self._surface_index.array[numbers], np.cumsum(self._length.array[numbers])
        return WordLookup(
            surfaces=surfaces,
            starts=ends - self._length.array[numbers],
            leading=self._leading.array[numbers],
            flags=self._space_flags.array[numbers] | self._surface_flags.array[surfaces],
            length=int(ends[-1]) if len(ends) else 0,
        )

    def tokens(self, lookup: WordLookup) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens,) ids, start characters, and word indices."""
        ids, of = self._tokens.gather(lookup.surfaces)
        at, _ = self._token_starts.gather(lookup.surfaces)
        return ids, (lookup.starts + lookup.leading)[of] + at, of

    def names(self, lookup: WordLookup) -> np.ndarray:
        """(words,) bool: whether the word is a Chinese name."""
        return self._names.array[lookup.surfaces]

    def pairs(self, lookup: WordLookup) -> np.ndarray:
        """(words,) the word's number in the collocations, 0 for none."""
        return self._pairs.array[lookup.surfaces]

    def lexicon_units(
        self, lookup: WordLookup, lexicon: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(units,) numbers in a lexicon, start characters, and word indices. The first unit of a
        word includes the white space before it."""
        numbers, of = self._lexicon_units[lexicon].gather(lookup.surfaces)
        inside, _ = self._unit_starts.gather(lookup.surfaces)
        return numbers, lookup.starts[of] + np.where(inside > 0, lookup.leading[of] + inside, 0), of

    def _learn(self, words: Sequence[str]) -> None:
        surfaces = [word.lstrip() for word in words]
        lengths = [len(word) for word in words]
        leading = [length - len(surface) for length, surface in zip(lengths, surfaces, strict=True)]
        spaces = [word[:n] for word, n in zip(words, leading, strict=True)]
        self._surface_index.extend(self.surfaces.numbers(surfaces))
        self._leading.extend(leading)
        self._length.extend(lengths)
        self._space_flags.extend([leading_space_flags(space) for space in spaces])
        if self.surfaces.new:
            self._learn_surfaces(self.surfaces.new)
            self.surfaces.new = []

    def _learn_surfaces(self, surfaces: Sequence[str]) -> None:
        resources = self.resources
        chinese = [is_han(surface[:1]) for surface in surfaces]
        self._surface_flags.extend(
            [surface_flags(surface, resources.language) for surface in surfaces]
        )
        self._names.extend(
            [
                han and resources.is_name(surface)
                for surface, han in zip(surfaces, chinese, strict=True)
            ]
        )
        self._pairs.extend([resources.pairs.get(surface.lower(), 0) for surface in surfaces])
        if resources.encode:
            self._learn_tokens(surfaces, chinese, resources.encode)
        if resources.lexicons:
            units = [lexicon_units(surface) for surface in surfaces]
            self._unit_starts.extend([[start for _, start in some] for some in units])
            for known, into in zip(resources.lexicons, self._lexicon_units, strict=True):
                into.extend([[known.get(unit, 0) for unit, _ in some] for some in units])

    def _learn_tokens(
        self, surfaces: Sequence[str], chinese: Sequence[bool], encode: Encode
    ) -> None:
        """Chinese words are encoded character by character: few characters are ever new."""
        pieces = [
            list(surface) if han else [surface]
            for surface, han in zip(surfaces, chinese, strict=True)
        ]
        known = self._encoded
        fresh = list(dict.fromkeys(p for some in pieces for p in some if p not in known))
        for piece, (ids, at) in zip(fresh, encode(fresh), strict=True):
            known[piece] = ids.tolist(), at.tolist()
        tokens, places = [], []
        for some in pieces:
            if len(some) == 1:
                ids, at = known[some[0]]
            else:
                ids = [i for piece in some for i in known[piece][0]]
                at = [n for n, piece in enumerate(some) for _ in known[piece][0]]
            tokens.append(ids)
            places.append(at)
        self._tokens.extend(tokens)
        self._token_starts.extend(places)
