"""Finds phrases and entities, the spans that knowledge masking masks as a whole.

    Lexicon        the user's lists, longest match
    Collocations   chains of word pairs that occur together more often than by chance
    capital_runs   English names: runs of capitalized words

Spans are (n, 2) arrays of start and end, in words unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.text.word_features import Flag, has, is_han
from palm_ds.text.words import split_words

LONGEST_NAME = 8  # words; a longer run of capitalized words is a heading
LONGEST_CHAIN = 5  # words in a chain of collocations


def lexicon_units(word: str) -> list[tuple[str, int]]:
    """The units that lexicons are matched by, and the character offset of each: every Chinese
    character (so that matches do not depend on the segmenter), or the word in lower case."""
    surface = word.lstrip()
    leading = len(word) - len(surface)
    if surface and is_han(surface[0]):
        return [(c, leading + i if i else 0) for i, c in enumerate(surface)]
    return [(surface.lower(), 0)] if surface else []


class Lexicon:
    """A trie over lexicon units, matched at all positions of a document in parallel.

    English matches case-insensitively; with `exact`, an entry with capitals matches only as written
    (the entity "US" is not the word "us").
    """

    def __init__(self, entries: Iterable[str], *, exact: bool = False) -> None:
        self.numbers: dict[str, int] = {}  # unit -> number from 1; 0 means in no entry
        self._exact: set[str] = set()
        self._any_case: set[str] = set()
        edges: dict[tuple[int, int], int] = {}
        final: set[int] = set()
        for entry in entries:
            units = [unit for word in split_words(entry) for unit, _ in lexicon_units(word)]
            cased = exact and entry != entry.lower()
            (self._exact if cased else self._any_case).add(_key(entry, cased))
            state = 0
            for unit in units:
                number = self.numbers.setdefault(unit, len(self.numbers) + 1)
                state = edges.setdefault((state, number), len(edges) + 1)
            final.add(state)
        self._freeze(edges, final)

    def _freeze(self, edges: dict[tuple[int, int], int], final: set[int]) -> None:
        width = len(self.numbers) + 1
        pairs = sorted((state * width + number, to) for (state, number), to in edges.items())
        self._width = width
        self._keys = np.array([k for k, _ in pairs], np.int64)
        self._to = np.array([to for _, to in pairs], np.int64)
        self._final = np.zeros(len(edges) + 1, bool)
        self._final[list(final)] = True

    def match(self, units: np.ndarray, barriers: np.ndarray) -> np.ndarray:
        """(units,) length of the longest entry starting at each unit, 0 for none. No match crosses
        a barrier: `barriers` (units,) bool is true where a sentence begins."""
        longest = np.zeros(len(units), np.int64)
        if not len(self._keys):
            return longest
        at = np.flatnonzero(units)
        state = np.zeros(len(at), np.int64)
        depth = 0
        while len(at):
            key = state * self._width + units[at + depth]
            where = np.minimum(np.searchsorted(self._keys, key), len(self._keys) - 1)
            known = self._keys[where] == key
            at, state = at[known], self._to[where[known]]
            depth += 1
            longest[at[self._final[state]]] = depth
            on = at + depth < len(units)
            at, state = at[on], state[on]
            on = ~barriers[at + depth] & (units[at + depth] != 0)
            at, state = at[on], state[on]
        return longest

    def spans(
        self, text: str, units: np.ndarray, starts: np.ndarray, barriers: np.ndarray
    ) -> np.ndarray:
        """(n, 2) characters of the entries found, left to right and without overlap. `starts`:
        (units + 1,) the start character of each unit, and the text's length."""
        longest = self.match(units, barriers)
        out, free = [], 0
        for at in np.flatnonzero(longest).tolist():
            if at < free:
                continue
            start = int(starts[at])
            for free_after in range(at + int(longest[at]), at, -1):
                end = int(starts[free_after])
                if self._ends(units[at:free_after]) and self._holds(text[start:end]):
                    out.append((start, end))
                    free = free_after
                    break  # the longer ones are entries that have other capitals
        return np.array(out, np.int64).reshape(-1, 2)

    def _ends(self, units: np.ndarray) -> bool:
        """Whether an entry has these units, with which some entry begins."""
        state = 0
        for unit in units.tolist():
            state = int(self._to[np.searchsorted(self._keys, state * self._width + unit)])
        return bool(self._final[state])

    def _holds(self, text: str) -> bool:
        return _key(text, True) in self._exact or _key(text, False) in self._any_case


def _key(text: str, cased: bool) -> str:
    joined = "".join(text.split())
    return joined if cased else joined.lower()


def read_lexicon(file: str | Path) -> list[str]:
    """Reads one entry per line; a tab and the text after it are ignored."""
    file = Path(file)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UserError(f"lexicon {file}: cannot be read: {error.strerror}") from None
    entries = []
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        try:
            entry = line.decode("utf-8").partition("\t")[0].strip()
        except UnicodeDecodeError:
            raise UserError(f"lexicon {file}: line {number}: not UTF-8 text") from None
        if entry:
            entries.append(entry)
    if not entries:
        raise UserError(f"lexicon {file}: has no entries; give one per line")
    return entries


class Collocations:
    """Pairs of words found by phrase mining; adjacent pairs chain into phrases."""

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        words = sorted({word for pair in pairs for word in pair})
        self.numbers = {word: i for i, word in enumerate(words, 1)}
        self._width = len(words) + 1
        keys = (self.numbers[a] * self._width + self.numbers[b] for a, b in pairs)
        self._keys = np.unique(np.fromiter(keys, np.int64))

    def spans(self, numbers: np.ndarray, barriers: np.ndarray) -> np.ndarray:
        """(n, 2) words: chains of pairs, split after LONGEST_CHAIN words and at `barriers`."""
        if not len(self._keys) or len(numbers) < 2:
            return np.zeros((0, 2), np.int64)
        candidates = np.flatnonzero((numbers[:-1] > 0) & (numbers[1:] > 0) & ~barriers[1:])
        key = numbers[candidates] * self._width + numbers[candidates + 1]
        where = np.minimum(np.searchsorted(self._keys, key), len(self._keys) - 1)
        links = candidates[self._keys[where] == key]  # words i and i + 1 are a pair
        if not len(links):
            return np.zeros((0, 2), np.int64)
        new = np.append(True, np.diff(links) != 1)
        first = links[np.maximum.accumulate(np.where(new, np.arange(len(links)), 0))]
        keep = (links - first) % LONGEST_CHAIN != LONGEST_CHAIN - 1  # split before the sixth word
        links, first = links[keep], first[keep]
        block = first + (links - first) // LONGEST_CHAIN * LONGEST_CHAIN
        starts = np.append(True, (np.diff(links) != 1) | (np.diff(block) != 0))
        heads = np.flatnonzero(starts)
        tails = np.append(heads[1:], len(links)) - 1
        return np.stack([links[heads], links[tails] + 2], axis=1)


def capital_runs(flags: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """(n, 2) words: runs of capitalized words, with their connectors (of, van, the full stop of an
    initial). The first word of a sentence alone is not a run: any word is capitalized there."""
    capital = has(flags, Flag.CAPITAL) & ~has(flags, Flag.PRONOUN_I | Flag.HAN | Flag.BEFORE_NUMBER)
    before = np.append(0, flags[:-1])
    opening = starts | has(before, Flag.OPENER | Flag.END | Flag.CLOSER)
    may_open = opening | has(before, Flag.COLON)  # "They said: The end"
    capital &= ~(may_open & has(flags, Flag.STARTER))
    capital &= ~_in_headings(flags, starts)
    inside = _joined(flags, capital, starts)
    run = capital | inside
    heads = np.flatnonzero(run & ~(np.append(False, run[:-1]) & ~starts))
    ends = np.flatnonzero(run & ~np.append(run[1:] & ~starts[1:], False)) + 1
    length = ends - heads
    keep = (length > 1) | ~opening[heads]
    keep &= length <= LONGEST_NAME
    keep &= ~((length == 1) & has(flags[heads], Flag.INITIAL | Flag.TITLE))
    return np.stack([heads[keep], ends[keep]], axis=1)


def _in_headings(flags: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """(words,) bool: in a sentence of three or more words that is all in capitals."""
    sentence = np.cumsum(starts) - 1
    letters = has(flags, Flag.LETTER)
    capitals = letters & has(flags, Flag.ALL_CAPITALS)
    words = np.bincount(sentence, letters)
    heading = (np.bincount(sentence, capitals) == words) & (words > 2)
    return heading[sentence]


def _joined(flags: np.ndarray, capital: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """(words,) bool: connects two capitalized words of one name."""
    after = np.append(capital[1:], False) & np.append(~starts[1:], False)
    previous = np.append(False, capital[:-1]) & ~starts
    connector = has(flags, Flag.CONNECTOR)
    short = np.append(0, flags[:-1]) & (Flag.INITIAL | Flag.TITLE)
    stop = has(flags, Flag.PERIOD) & (short != 0) & ~has(flags, Flag.SPACE)
    single = (connector | stop) & previous & after & ~capital
    # two connectors in a row: Bank of the West
    left = connector & previous & ~capital
    right = connector & after & ~capital & ~starts
    pair = left & np.append(right[1:], False)
    return single | pair | np.append(False, pair[:-1])
