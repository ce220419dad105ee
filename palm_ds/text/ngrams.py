"""N-grams of tokens: a lexicon of them in a file, and texts cut into segments by it (ERNIE-Gram,
Xiao et al. 2021, arXiv 2010.12148).

    # palm-ds n-grams of the tokenizer 3f0c...
    tokens      text        count   t
    2047 2259   new york    153     12.310000

Maximum matching cuts a text into the fewest segments, each an n-gram of the lexicon or one token;
of several ways to do so it takes the one whose segments are the longest from the left. An n-gram's
number is its place in the file, from 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from palm_ds.common.atomic import write_file_atomically
from palm_ds.common.errors import UserError
from palm_ds.common.files import make_folder
from palm_ds.common.messages import printable

Ngram = tuple[int, ...]
_FIRST_LINE = "# palm-ds n-grams of the tokenizer "
_ID = re.compile("[0-9]{1,9}")
_COLUMNS = "tokens\ttext\tcount\tt"
SINGLE = -1
"""The number of a segment that is one token."""


@dataclass(frozen=True, kw_only=True)
class ScoredNgram:
    """A line of the file."""

    tokens: Ngram
    text: str
    count: int
    t: float

    def line(self) -> str:
        ids = " ".join(map(str, self.tokens))
        return f"{ids}\t{printable(self.text)}\t{self.count}\t{self.t:.6f}"


def write_ngrams(path: Path, ngrams: Sequence[ScoredNgram], fingerprint: str) -> None:
    """Write a lexicon, complete or not at all. `fingerprint`: of the tokenizer."""
    make_folder(path.parent)
    lines = [f"{_FIRST_LINE}{fingerprint}", _COLUMNS, *(ngram.line() for ngram in ngrams)]
    write_file_atomically(path, "\n".join(lines) + "\n")


def read_ngrams(path: str | Path) -> tuple[NgramLexicon, str]:
    """The lexicon in a file, and the fingerprint of its tokenizer; lines may have been removed.
    Raises UserError, with the line, if it is no such file."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UserError(
            f"{path}: {reason}; `palm-ds corpus ngrams CORPUS FILE` writes n-grams"
        ) from None
    if not lines[0].startswith(_FIRST_LINE) or lines[1:2] != [_COLUMNS]:
        raise UserError(f"{path}: no file of n-grams; `palm-ds corpus ngrams CORPUS FILE` makes it")
    line_of: dict[Ngram, int] = {}
    for number, line in enumerate(lines[2:], 3):
        if not line:
            continue
        words = line.partition("\t")[0].split(" ")
        tokens = tuple(int(word) for word in words if _ID.fullmatch(word))
        if len(tokens) < 2 or len(tokens) != len(words):
            raise UserError(f"{path}: line {number}: expected two token ids or more, got {line!r}")
        if tokens in line_of:
            raise UserError(f"{path}: line {number}: repeats line {line_of[tokens]}")
        line_of[tokens] = number
    if not line_of:
        raise UserError(f"{path}: has no n-grams; lower --least of `palm-ds corpus ngrams`")
    return NgramLexicon(list(line_of)), lines[0].removeprefix(_FIRST_LINE)


class NgramLexicon:
    """Numbered n-grams of two tokens or more, matched at all places of a text."""

    def __init__(self, ngrams: Sequence[Ngram]):
        self.ngrams = tuple(ngrams)
        self.longest = max(map(len, ngrams))
        """Tokens of the longest n-gram."""
        self.largest_id = max(map(max, ngrams))
        self._width = self.largest_id + 2  # tokens above are all the last one, which is in none
        edges: dict[int, int] = {}
        self._number = [SINGLE]  # of each node of the trie: 0 is its root
        for number, tokens in enumerate(ngrams):
            node = 0
            for token in tokens:
                key = node * self._width + token
                if key not in edges:
                    edges[key] = len(self._number)
                    self._number.append(SINGLE)
                node = edges[key]
            self._number[node] = number
        keys = np.fromiter(edges, np.int64, len(edges))
        order = np.argsort(keys)
        self._keys, self._nodes = keys[order], np.fromiter(edges.values(), np.int64)[order]
        self._of_node = np.array(self._number)

    def __len__(self) -> int:
        return len(self.ngrams)

    def matches(self, ids: np.ndarray) -> np.ndarray:
        """(longest - 1, tokens) int64: the number of the n-gram of 2, 3, ... tokens that begins at
        each token, SINGLE for none."""
        tokens = np.minimum(np.asarray(ids, np.int64), self._width - 1)
        numbers = np.full((self.longest - 1, len(tokens)), SINGLE)
        at, node = np.arange(len(tokens)), np.zeros(len(tokens), np.int64)
        for depth in range(self.longest):
            on = at + depth < len(tokens)
            at, node = at[on], node[on]
            key = node * self._width + tokens[at + depth]
            where = np.minimum(np.searchsorted(self._keys, key), len(self._keys) - 1)
            known = self._keys[where] == key
            at, node = at[known], self._nodes[where[known]]
            if depth:
                numbers[depth - 1, at] = self._of_node[node]
        return numbers

    def cut(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The segments of a text (tokens,): their first tokens (segments,), ascending, and the
        numbers of the n-grams that they are (segments,)."""
        matches = self.matches(ids)
        least = [0] * (len(ids) + 1)  # segments of the text from each token on
        size = [1] * len(ids)
        columns = [(2 + row, numbers.tolist()) for row, numbers in enumerate(matches)]
        for at in range(len(ids) - 1, -1, -1):
            best = least[at + 1]
            for length, numbers in columns:
                if numbers[at] >= 0 and least[at + length] <= best:
                    best, size[at] = least[at + length], length
            least[at] = best + 1
        firsts, at = [], 0
        while at < len(ids):
            firsts.append(at)
            at += size[at]
        first = np.array(firsts, np.int64)
        sizes = np.diff(first, append=len(ids))
        numbers = np.full(len(first), SINGLE)
        several = sizes > 1
        numbers[several] = matches[sizes[several] - 2, first[several]]
        return first, numbers
