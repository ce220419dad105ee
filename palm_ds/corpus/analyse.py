"""A text to a `Document`: tokens, words, sentences, phrases and entities.

    analyser = Analyser(tokenizer, TextOptions(language="mixed"), collocations=pairs)
    document = analyser.document("doc 1", "...")

An analyser keeps a table of the words it has met, which makes it fast and holds no more than
MOST_WORDS of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from palm_ds.corpus.knowledge import (
    Collocations,
    Lexicon,
    atoms_of,
    capital_runs,
    read_lexicon,
)
from palm_ds.corpus.lexemes import CAPITAL, flags_of, is_han
from palm_ds.corpus.marks import Document, find_function
from palm_ds.corpus.options import TextOptions
from palm_ds.corpus.sentences import is_wrapped, sentence_starts
from palm_ds.corpus.words import Grown, Ragged, Segmenter, WordTable, split_words
from palm_ds.errors import UserError

if TYPE_CHECKING:
    from palm_ds.tokenizer import Tokenizer

MOST_WORDS = 400_000  # distinct words in the table; about 150 MB
_CHINESE_ENTITIES = frozenset({"nr", "ns", "nt", "nz", "nrfg", "nrt"})
_NO_SPANS = np.zeros((0, 2), np.int64)


class Analyser:
    """Texts to documents, with one set of options."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: TextOptions,
        *,
        collocations: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.tokenizer, self.options = tokenizer, options
        self.segment = find_segmenter(options)
        self.simplify = find_simplifier() if options.simplify else None
        self.tag = _chinese_tagger() if options.language != "en" else None
        self.collocations = Collocations(collocations) if collocations else None
        self.phrase_lexicon = _lexicon(options.lexicon_phrase, exact=False)
        self.entity_lexicon = _lexicon(options.lexicon_entity, exact=True)
        self.lower = options.lower and not tokenizer.lower
        self._forget()

    def _forget(self) -> None:
        self.table = WordTable()
        self.lengths, self.flags = Grown(np.int64), Grown(np.int64)
        self.names = Grown(bool)  # a Chinese name, by its part of speech
        self.pairs = Grown(np.int64)  # number among the collocations' words
        self.tokens, self.offsets = Ragged(np.int64), Ragged(np.int64)
        self.atoms = {
            id(lexicon): Ragged(np.int64)
            for lexicon in (self.phrase_lexicon, self.entity_lexicon)
            if lexicon
        }
        self.atom_offsets = Ragged(np.int64)

    def document(self, name: str, text: str) -> Document:
        """The document of a text; it may turn out to have no tokens."""
        if self.simplify:
            text = self.simplify(text)
        words = split_words(text, self.segment)
        numbers = self._numbers(words)
        ends = np.cumsum(self.lengths.array[numbers])
        begins = ends - self.lengths.array[numbers]
        flags = self.flags.array[numbers]
        newline = self.options.newline
        wrapped = newline == "space" or (newline == "auto" and "\n" in text and is_wrapped(text))
        starts = sentence_starts(flags, wrapped=wrapped)
        if self.tokenizer.by_word:
            ids, word_of = self.tokens.gather(numbers)
            at = begins[word_of] + self.offsets.gather(numbers)[0]
        else:
            ids, at = self.tokenizer.encode_texts([_lowered(text) if self.lower else text])[0]
            word_of = np.searchsorted(begins, at, side="right") - 1
        found = self._knowledge(text, numbers, begins, ends, flags, starts)
        return Document(
            id=name,
            text=text,
            tokenizer=self.tokenizer,
            ids=ids,
            at=at,
            words=begins,
            sentences=begins[starts],
            word_of=word_of,
            capitals=(flags & CAPITAL) != 0,
            phrases=found[0],
            entities=found[1],
        )

    def _numbers(self, words: list[str]) -> np.ndarray:
        if len(self.table) > MOST_WORDS:
            self._forget()
        numbers = self.table.numbers(words)
        if self.table.fresh:
            self._learn(self.table.fresh)
            self.table.fresh = []
        return numbers

    def _learn(self, words: list[str]) -> None:
        """Works out, for new words, everything that does not depend on their place."""
        self.lengths.extend([len(word) for word in words])
        self.flags.extend([flags_of(word) for word in words])
        self.names.extend([self._is_name(word) for word in words])
        if self.collocations:
            known = self.collocations.numbers
            self.pairs.extend([known.get(word.lstrip().lower(), 0) for word in words])
        if self.tokenizer.by_word:
            given = [_lowered(word) for word in words] if self.lower else words
            encoded = self.tokenizer.encode_texts(given)
            self.tokens.extend([ids.tolist() for ids, _ in encoded])
            self.offsets.extend([at.tolist() for _, at in encoded])
        if self.atoms:
            self._learn_atoms(words)

    def _learn_atoms(self, words: list[str]) -> None:
        atoms = [atoms_of(word) for word in words]
        self.atom_offsets.extend([[at for _, at in some] for some in atoms])
        for lexicon in (self.phrase_lexicon, self.entity_lexicon):
            if lexicon:
                known = lexicon.numbers
                numbers = [[known.get(atom, 0) for atom, _ in some] for some in atoms]
                self.atoms[id(lexicon)].extend(numbers)

    def _is_name(self, word: str) -> bool:
        core = word.lstrip()
        if self.tag is None or len(core) < 2 or not is_han(core[0]):
            return False
        return self.tag(core) in _CHINESE_ENTITIES

    def _knowledge(
        self,
        text: str,
        numbers: np.ndarray,
        begins: np.ndarray,
        ends: np.ndarray,
        flags: np.ndarray,
        starts: np.ndarray,
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Phrases and entities as characters, each in order of precedence."""
        phrases, entities = [], []
        for lexicon, into in ((self.phrase_lexicon, phrases), (self.entity_lexicon, entities)):
            if lexicon:
                into.append(self._from_lexicon(lexicon, text, numbers, begins, starts))
        if self.collocations:
            phrases.append(
                _characters(
                    self.collocations.spans(self.pairs.array[numbers], starts), begins, ends
                )
            )
        names = np.flatnonzero(self.names.array[numbers])
        entities.append(np.stack([begins[names], ends[names]], axis=1))
        if self.options.language != "zh":
            entities.append(_characters(capital_runs(flags, starts), begins, ends))
        return phrases, entities

    def _from_lexicon(
        self,
        lexicon: Lexicon,
        text: str,
        numbers: np.ndarray,
        begins: np.ndarray,
        starts: np.ndarray,
    ) -> np.ndarray:
        atoms, of = self.atoms[id(lexicon)].gather(numbers)
        at = begins[of] + self.atom_offsets.gather(numbers)[0]
        first = np.append(True, np.diff(of) != 0) if len(of) else np.zeros(0, bool)
        return lexicon.spans(text, atoms, np.append(at, len(text)), first & starts[of])


def _characters(spans: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Spans of words to spans of characters."""
    if not len(spans):
        return _NO_SPANS
    return np.stack([begins[spans[:, 0]], ends[spans[:, 1] - 1]], axis=1)


def _lowered(text: str) -> str:
    """Lower case, character by character, so that places stay where they are."""
    low = text.lower()
    if len(low) == len(text):
        return low
    return "".join(c.lower() if len(c.lower()) == 1 else c for c in text)


def _lexicon(files: Iterable[str], *, exact: bool) -> Lexicon | None:
    entries = list(chain.from_iterable(read_lexicon(file) for file in files))
    return Lexicon(entries, exact=exact) if entries else None


def find_segmenter(options: TextOptions) -> Segmenter | None:
    """What cuts Chinese into words: the user's function, or rjieba; None for English."""
    if options.segmenter:
        return find_function(options.segmenter, "segmenter")
    if options.language == "en":
        return None
    import rjieba

    return rjieba.cut


def _chinese_tagger() -> Callable[[str], str]:
    """A word's part of speech in jieba's dictionary."""
    import rjieba

    def tag(word: str) -> str:
        found = rjieba.tag(word)
        return found[0][1] if len(found) == 1 else ""

    return tag


def find_simplifier() -> Callable[[str], str]:
    """Traditional to simplified Chinese, word by word as OpenCC does it."""
    try:
        from opencc import OpenCC
    except ImportError:
        raise UserError("--simplify needs the package opencc: pip install opencc") from None
    return OpenCC("t2s").convert
