"""The table of all words met: what is true of a word wherever it stands, as arrays.

A word comes with the white space before it. What depends on that is kept for each word; all else
for its *core*, the word without it, so that " the", "the" and "\\n    the" are worked out once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from palm_ds.text.phrases import atoms_of
from palm_ds.text.word_features import core_flags, is_han, lead_flags
from palm_ds.text.words import Grown, Ragged, WordTable

Encode = Callable[[Sequence[str]], list[tuple[np.ndarray, np.ndarray]]]


@dataclass(frozen=True, kw_only=True)
class Column:
    """How a table's further columns are made from a core."""

    encode: Encode | None  # tokens and where they begin, for tokenizers that go word by word
    is_name: Callable[[str], bool]  # of a Chinese word
    pairs: Mapping[str, int]  # lower-case word -> number among the collocations' words
    lexicons: Sequence[Mapping[str, int]]  # atom -> number, for each lexicon


@dataclass(frozen=True)
class Found:
    """What the table has of a text's words. Arrays are (words,) unless they say otherwise."""

    cores: np.ndarray  # number of the word's core in the table
    begins: np.ndarray  # character
    leads: np.ndarray  # characters of white space before the core
    flags: np.ndarray
    length: int  # of the text

    @property
    def ends(self) -> np.ndarray:
        return np.append(self.begins[1:], self.length)


class Table:
    """Grows with the words it is asked for."""

    def __init__(self, column: Column) -> None:
        self.column = column
        self.words, self.cores = WordTable(), WordTable()
        self._core, self._lead, self._length = (Grown(np.int64) for _ in range(3))
        self._lead_flags, self._core_flags = Grown(np.int64), Grown(np.int64)
        self._names, self._pairs = Grown(bool), Grown(np.int64)
        self._tokens, self._token_at = Ragged(np.int64), Ragged(np.int64)
        self._atoms = [Ragged(np.int64) for _ in column.lexicons]
        self._atom_at = Ragged(np.int64)
        self._encoded: dict[str, tuple[list[int], list[int]]] = {}

    def __len__(self) -> int:
        return len(self.words)

    def find(self, words: Sequence[str]) -> Found:
        """The words of a text, in order."""
        numbers = self.words.numbers(words)
        if self.words.fresh:
            self._learn(self.words.fresh)
            self.words.fresh = []
        cores, ends = self._core.array[numbers], np.cumsum(self._length.array[numbers])
        return Found(
            cores=cores,
            begins=ends - self._length.array[numbers],
            leads=self._lead.array[numbers],
            flags=self._lead_flags.array[numbers] | self._core_flags.array[cores],
            length=int(ends[-1]) if len(ends) else 0,
        )

    def tokens(self, found: Found) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens,) ids, the characters at which they begin, and the words they are of."""
        ids, of = self._tokens.gather(found.cores)
        at, _ = self._token_at.gather(found.cores)
        return ids, (found.begins + found.leads)[of] + at, of

    def names(self, found: Found) -> np.ndarray:
        """(words,) bool: Chinese names."""
        return self._names.array[found.cores]

    def pairs(self, found: Found) -> np.ndarray:
        """(words,) numbers among the collocations' words, 0 for none."""
        return self._pairs.array[found.cores]

    def atoms(self, found: Found, lexicon: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(atoms,) numbers in a lexicon, the characters at which they begin, and their words. A
        word's first atom begins with the white space before it."""
        numbers, of = self._atoms[lexicon].gather(found.cores)
        inside, _ = self._atom_at.gather(found.cores)
        return numbers, found.begins[of] + np.where(inside > 0, found.leads[of] + inside, 0), of

    def _learn(self, words: Sequence[str]) -> None:
        cores = [word.lstrip() for word in words]
        lengths = [len(word) for word in words]
        leads = [length - len(core) for length, core in zip(lengths, cores, strict=True)]
        spaces = [word[:n] for word, n in zip(words, leads, strict=True)]
        self._core.extend(self.cores.numbers(cores))
        self._lead.extend(leads)
        self._length.extend(lengths)
        self._lead_flags.extend([lead_flags(space) for space in spaces])
        if self.cores.fresh:
            self._learn_cores(self.cores.fresh)
            self.cores.fresh = []

    def _learn_cores(self, cores: Sequence[str]) -> None:
        column = self.column
        chinese = [is_han(core[:1]) for core in cores]
        self._core_flags.extend([core_flags(core) for core in cores])
        self._names.extend(
            [han and column.is_name(core) for core, han in zip(cores, chinese, strict=True)]
        )
        self._pairs.extend([column.pairs.get(core.lower(), 0) for core in cores])
        if column.encode:
            self._learn_tokens(cores, chinese, column.encode)
        if column.lexicons:
            atoms = [atoms_of(core) for core in cores]
            self._atom_at.extend([[at for _, at in some] for some in atoms])
            for known, into in zip(column.lexicons, self._atoms, strict=True):
                into.extend([[known.get(atom, 0) for atom, _ in some] for some in atoms])

    def _learn_tokens(self, cores: Sequence[str], chinese: Sequence[bool], encode: Encode) -> None:
        """A Chinese word's tokens are its characters', which are soon all known."""
        pieces = [list(core) if han else [core] for core, han in zip(cores, chinese, strict=True)]
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
        self._token_at.extend(places)
