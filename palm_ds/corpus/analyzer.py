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

from palm_ds.corpus.annotations import Document, find_function
from palm_ds.corpus.input.records import JOINT, BadRecordError, Record
from palm_ds.corpus.options import TextOptions
from palm_ds.text.phrases import Collocations, Lexicon, capital_runs, read_lexicon
from palm_ds.text.sentence_splitter import is_wrapped, paragraph_starts, sentence_starts
from palm_ds.text.simplified import find_simplifier
from palm_ds.text.word_cache import Column, Found, Table
from palm_ds.text.word_features import CAPITAL
from palm_ds.text.words import Segmenter, split_words

if TYPE_CHECKING:
    from palm_ds.text.tokenizer import Tokenizer

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
        labels: Sequence[str] = (),
    ) -> None:
        self.tokenizer, self.options = tokenizer, options
        self.labels = {name: number for number, name in enumerate(labels)}
        self.segment = find_segmenter(options)
        self.simplify = find_simplifier() if options.simplify else None
        self.tag = chinese_tagger() if options.language != "en" else None
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
        return self._parted(Record(name, (text,), 0, 0))

    def record(self, record: Record) -> Document:
        """The document of a record; BadRecordError says why it is none."""
        document = self._given(record) if record.tokens else self._parted(record)
        if not len(document):
            raise BadRecordError("no tokens in this text")
        if record.whole > 1 and (part := _empty_part(document)):
            raise BadRecordError(f"no tokens in text {part} of {len(record.parts)}")
        return document

    def _parted(self, record: Record) -> Document:
        parts = list(map(self.simplify, record.parts)) if self.simplify else record.parts
        text = JOINT.join(parts)
        ends = np.cumsum([len(part) + len(JOINT) for part in parts]) - len(JOINT)
        begins = np.append(0, ends[:-1])  # a part begins with the white space before it
        body = parts[-1] if record.titled else text
        if len(self.table) > MOST_WORDS:
            self.table = self._new_table()
        found = self.table.find(split_words(text, self.segment))
        newline = self.options.newline
        wrapped = newline == "space" or (newline == "auto" and "\n" in body and is_wrapped(body))
        starts = sentence_starts(found.flags, wrapped=wrapped)
        if self.tokenizer.by_word:
            ids, at, word_of = self.table.tokens(found)
        else:
            ids, at = self._encode_parts(parts)
            word_of = np.searchsorted(found.begins, at, side="right") - 1
        return Document(
            id=record.id,
            text=text,
            tokenizer=self.tokenizer,
            ids=ids,
            at=at,
            words=found.begins,
            sentences=_sentences(found.begins[starts], begins, ends, record.whole),
            paragraphs=found.begins[paragraph_starts(found.flags, wrapped=wrapped)],
            parts=begins if record.whole else begins[:0],
            titled=record.titled,
            columns=self._columns(record),
            word_of=word_of,
            capitals=(found.flags & CAPITAL) != 0,
            phrases=self._phrases(text, found, starts),
            entities=self._entities(text, found, starts),
        )

    def _columns(self, record: Record) -> dict[str, np.ndarray]:
        """(parts,) uint8 for each column that the record gives."""
        columns = {name: np.array(values, np.uint8) for name, values in record.columns.items()}
        if record.label is not None:
            columns["label"] = np.full(record.whole, self.labels[record.label], np.uint8)
        return columns

    def _given(self, record: Record) -> Document:
        """The document of tokens made elsewhere. Its text is their letters without spaces."""
        assert record.tokens is not None
        tokens, size = record.tokens, self.tokenizer.size
        if len(wrong := tokens.ids[(tokens.ids < 0) | (tokens.ids >= size)]):
            raise BadRecordError(f"token id {wrong[0]}, where the vocabulary has {size}")
        roles = (self.tokenizer.roles[role] for role in ("cls", "sep", "sep"))
        special = tuple(map(self.tokenizer.backend.token_to_id, roles))
        if tokens.specials != special:
            raise BadRecordError(
                f"special tokens {tokens.specials}, which are {special} in this vocabulary"
            )
        letters = [token.removeprefix("##") for token in self.tokenizer.tokens(tokens.ids)]
        ends = np.cumsum([len(token) for token in letters])
        at = np.append(0, ends[:-1])
        word = tokens.word.copy()
        word[[0, tokens.second]] = True
        texts = at[[0, tokens.second]]
        return Document(
            id=record.id,
            text="".join(letters),
            tokenizer=self.tokenizer,
            ids=tokens.ids,
            at=at,
            words=at[word],
            sentences=texts,
            paragraphs=texts,
            parts=texts,
            columns=self._columns(record),
            word_of=np.cumsum(word) - 1,
            capitals=np.zeros(int(word.sum()), bool),
        )

    def _encode_parts(self, parts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of each part by itself, and the characters at which they begin in the whole."""
        starts = np.cumsum([0, *(len(part) + len(JOINT) for part in parts[:-1])])
        encoded = self._encode(parts)
        ids = np.concatenate([ids for ids, _ in encoded])
        at = [start + at for start, (_, at) in zip(starts, encoded, strict=True)]
        return ids, np.concatenate(at)

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


def _sentences(found: np.ndarray, begins: np.ndarray, ends: np.ndarray, whole: int) -> np.ndarray:
    """Where sentences begin: the first `whole` parts are one each, what follows them is as found.
    `begins`, `ends`: (parts,) characters."""
    if not whole:
        return found
    after = found[found >= ends[whole - 1]]
    rest = begins[whole : whole + 1]  # what follows a title is a sentence, whatever it begins with
    return np.unique(np.concatenate([begins[:whole], rest, after]))


def _empty_part(document: Document) -> int:
    """The number, from 1, of the first part that has no tokens; 0: all have some."""
    edges = np.searchsorted(document.at, np.append(document.parts, len(document.text) + 1))
    empty = np.flatnonzero(np.diff(edges) == 0)
    return int(empty[0]) + 1 if len(empty) else 0


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


def chinese_tagger() -> Callable[[str], str]:
    """A word's part of speech in jieba's dictionary."""
    import rjieba

    def tag(word: str) -> str:
        found = rjieba.tag(word)
        return found[0][1] if len(found) == 1 else ""

    return tag
