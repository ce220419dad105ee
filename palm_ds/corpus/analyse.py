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
    capital_runs,
    read_lexicon,
)
from palm_ds.corpus.lexemes import CAPITAL
from palm_ds.corpus.marks import Document, find_function
from palm_ds.corpus.options import TextOptions
from palm_ds.corpus.sentences import is_wrapped, sentence_starts
from palm_ds.corpus.table import Column, Found, Table
from palm_ds.corpus.words import Segmenter, split_words
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
        self.table = self._new_table()

    def _new_table(self) -> Table:
        encode = self._encode if self.tokenizer.by_word else None
        lexicons = [lexicon.numbers for lexicon in self._lexicons()]
        pairs = self.collocations.numbers if self.collocations else {}
        return Table(Column(encode=encode, is_name=self._is_name, pairs=pairs, lexicons=lexicons))

    def _lexicons(self) -> list[Lexicon]:
        return [lexicon for lexicon in (self.phrase_lexicon, self.entity_lexicon) if lexicon]

    def document(self, name: str, text: str) -> Document:
        """The document of a text; it may turn out to have no tokens."""
        if self.simplify:
            text = self.simplify(text)
        if len(self.table) > MOST_WORDS:
            self.table = self._new_table()
        found = self.table.find(split_words(text, self.segment))
        newline = self.options.newline
        wrapped = newline == "space" or (newline == "auto" and "\n" in text and is_wrapped(text))
        starts = sentence_starts(found.flags, wrapped=wrapped)
        if self.tokenizer.by_word:
            ids, at, word_of = self.table.tokens(found)
        else:
            ids, at = self._encode([text])[0]
            word_of = np.searchsorted(found.begins, at, side="right") - 1
        return Document(
            id=name,
            text=text,
            tokenizer=self.tokenizer,
            ids=ids,
            at=at,
            words=found.begins,
            sentences=found.begins[starts],
            word_of=word_of,
            capitals=(found.flags & CAPITAL) != 0,
            phrases=self._phrases(text, found, starts),
            entities=self._entities(text, found, starts),
        )

    def _encode(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        given = [_lowered(text) for text in texts] if self.lower else texts
        return self.tokenizer.encode_texts(given)

    def _is_name(self, core: str) -> bool:
        return self.tag is not None and len(core) > 1 and self.tag(core) in _CHINESE_ENTITIES

    def _phrases(self, text: str, found: Found, starts: np.ndarray) -> list[np.ndarray]:
        """As characters, in order of precedence."""
        out = []
        if self.phrase_lexicon:
            out.append(self._from_lexicon(self.phrase_lexicon, text, found, starts))
        if self.collocations:
            spans = self.collocations.spans(self.table.pairs(found), starts)
            out.append(_characters(spans, found))
        return out

    def _entities(self, text: str, found: Found, starts: np.ndarray) -> list[np.ndarray]:
        """As characters, in order of precedence."""
        out = []
        if self.entity_lexicon:
            out.append(self._from_lexicon(self.entity_lexicon, text, found, starts))
        names = np.flatnonzero(self.table.names(found))
        out.append(_characters(np.stack([names, names + 1], axis=1), found))
        if self.options.language != "zh":
            out.append(_characters(capital_runs(found.flags, starts), found))
        return out

    def _from_lexicon(
        self, lexicon: Lexicon, text: str, found: Found, starts: np.ndarray
    ) -> np.ndarray:
        atoms, at, of = self.table.atoms(found, self._lexicons().index(lexicon))
        first = np.append(True, np.diff(of) != 0) if len(of) else np.zeros(0, bool)
        return lexicon.spans(text, atoms, np.append(at, len(text)), first & starts[of])


def _characters(spans: np.ndarray, found: Found) -> np.ndarray:
    """Spans of words to spans of characters."""
    if not len(spans):
        return _NO_SPANS
    return np.stack([found.begins[spans[:, 0]], found.ends[spans[:, 1] - 1]], axis=1)


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
