"""Turns a text into a `Document`: tokens, words, sentences, phrases and entities.

    analyzer = DocumentAnalyzer(tokenizer, TextOptions(language="mixed"), collocations=pairs)
    document = analyzer.document("doc 1", "...")

An analyzer keeps a cache of the words it has met, which makes it fast and holds no more than
MOST_WORDS of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.common.rows.lines import BadRecordError
from palm_ds.corpus.annotations import Document, find_function
from palm_ds.corpus.input.records import JOINT, Record
from palm_ds.corpus.options import TextOptions
from palm_ds.text.chinese import find_simplifier, is_name
from palm_ds.text.phrases import Collocations, Lexicon, capital_runs, read_lexicon
from palm_ds.text.sentence_splitter import is_wrapped, paragraph_starts, sentence_starts
from palm_ds.text.unspaced import more_word_starts, whole_runs
from palm_ds.text.word_cache import WordCache, WordLookup, WordResources
from palm_ds.text.word_features import Flag, has
from palm_ds.text.words import Segmenter, split_words

if TYPE_CHECKING:
    from palm_ds.text.tokenizer import Tokenizer
    from palm_ds.text.word_segmenter import WordSegmenter

MOST_WORDS = 400_000  # distinct words in the cache; about 150 MB
_NO_SPANS = np.zeros((0, 2), np.int64)


class DocumentAnalyzer:
    """Turns texts into documents, with one set of options."""

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
        self.segment = find_segmenter(options, tokenizer.segmenter)
        self.simplify = find_simplifier() if options.simplify else None
        self.is_name = find_names(options)
        self.collocations = Collocations(collocations) if collocations else None
        self.phrase_lexicon = _lexicon(options.lexicon_phrase, exact=False)
        self.entity_lexicon = _lexicon(options.lexicon_entity, exact=True)
        self.lower = options.lower and not tokenizer.lower
        self.cache = self._new_cache()

    def _new_cache(self) -> WordCache:
        encode = self._encode if self.tokenizer.by_word else None
        lexicons = [lexicon.numbers for lexicon in self._lexicons()]
        pairs = self.collocations.numbers if self.collocations else {}
        return WordCache(
            WordResources(
                encode=encode,
                is_name=self.is_name,
                pairs=pairs,
                lexicons=lexicons,
                language=self.options.language,
            )
        )

    def _lexicons(self) -> list[Lexicon]:
        return [lexicon for lexicon in (self.phrase_lexicon, self.entity_lexicon) if lexicon]

    def document(self, name: str, text: str) -> Document:
        """The document of a text, which may have no tokens."""
        return self._analyze_parts(Record(name, (text,), 0, 0))

    def record(self, record: Record) -> Document:
        """The document of a record. Raises BadRecordError with the reason if it has no tokens."""
        document = self._from_tokens(record) if record.tokens else self._analyze_parts(record)
        if not len(document):
            raise BadRecordError("no tokens in this text")
        if record.unsplit_parts > 1 and (part := _empty_part(document)):
            raise BadRecordError(f"no tokens in text {part} of {len(record.parts)}")
        return document

    def _analyze_parts(self, record: Record) -> Document:
        parts = list(map(self.simplify, record.parts)) if self.simplify else record.parts
        text = JOINT.join(parts)
        ends = np.cumsum([len(part) + len(JOINT) for part in parts]) - len(JOINT)
        part_starts = np.append(0, ends[:-1])  # a part begins with the white space before it
        body = parts[-1] if record.has_title else text
        if len(self.cache) > MOST_WORDS:
            self.cache = self._new_cache()
        words = self.cache.look_up(split_words(text, self.segment))
        newline = self.options.newline
        wrapped = newline == "space" or (newline == "auto" and "\n" in body and is_wrapped(body))
        starts = sentence_starts(words.flags, wrapped=wrapped)
        if self.tokenizer.by_word:
            ids, at, word_of = self.cache.tokens(words)
        else:
            ids, at = self._encode_parts(parts)
            word_of = np.searchsorted(words.starts, at, side="right") - 1
        more = more_word_starts(text, at, word_of, self.options.language)
        word_starts = np.union1d(words.starts, more) if len(more) else words.starts
        around = np.searchsorted(words.starts, word_starts, side="right") - 1
        if len(more):
            word_of = np.searchsorted(word_starts, at, side="right") - 1
        return Document(
            id=record.id,
            text=text,
            tokenizer=self.tokenizer,
            ids=ids,
            token_starts=at,
            word_starts=word_starts,
            sentence_starts=_sentences(
                words.starts[starts], part_starts, ends, record.unsplit_parts
            ),
            paragraph_starts=words.starts[paragraph_starts(words.flags, wrapped=wrapped)],
            part_starts=part_starts if record.unsplit_parts else part_starts[:0],
            has_title=record.has_title,
            part_values=self._part_values(record),
            word_of=word_of,
            capitals=has(words.flags[around], Flag.CAPITAL),
            phrases=self._phrases(text, words, starts),
            entities=self._entities(text, words, starts),
        )

    def _part_values(self, record: Record) -> dict[str, np.ndarray]:
        """Name -> (parts,) uint8: the annotations that the record itself gives."""
        values = {name: np.array(numbers, np.uint8) for name, numbers in record.part_values.items()}
        if record.label is not None:
            values["label"] = np.full(record.unsplit_parts, self.labels[record.label], np.uint8)
        return values

    def _from_tokens(self, record: Record) -> Document:
        """The document of a pretokenized pair. Its text is the tokens joined without spaces."""
        assert record.tokens is not None
        tokens, size = record.tokens, self.tokenizer.size
        if len(wrong := tokens.ids[(tokens.ids < 0) | (tokens.ids >= size)]):
            raise BadRecordError(f"token id {wrong[0]}, but the vocabulary has {size} tokens")
        roles = (self.tokenizer.roles[role] for role in ("cls", "sep", "sep"))
        special = tuple(map(self.tokenizer.backend.token_to_id, roles))
        if tokens.special_ids != special:
            raise BadRecordError(
                f"special tokens {tokens.special_ids}, which are {special} in this vocabulary"
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
            token_starts=at,
            word_starts=at[word],
            sentence_starts=texts,
            paragraph_starts=texts,
            part_starts=texts,
            part_values=self._part_values(record),
            word_of=np.cumsum(word) - 1,
            capitals=np.zeros(int(word.sum()), bool),
        )

    def _encode_parts(self, parts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encodes each part separately; returns all ids and their start characters in the text."""
        starts = np.cumsum([0, *(len(part) + len(JOINT) for part in parts[:-1])])
        encoded = self._encode(parts)
        ids = np.concatenate([ids for ids, _ in encoded])
        at = [start + at for start, (_, at) in zip(starts, encoded, strict=True)]
        return ids, np.concatenate(at)

    def _encode(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        given = [_lowered(text) for text in texts] if self.lower else texts
        return self.tokenizer.encode_texts(given)

    def _phrases(self, text: str, words: WordLookup, starts: np.ndarray) -> list[np.ndarray]:
        """As characters, in order of precedence."""
        out = []
        if self.phrase_lexicon:
            out.append(self._from_lexicon(self.phrase_lexicon, text, words, starts))
        if self.collocations:
            spans = self.collocations.spans(self.cache.pairs(words), starts)
            out.append(_characters(spans, words))
        return out

    def _entities(self, text: str, words: WordLookup, starts: np.ndarray) -> list[np.ndarray]:
        """As characters, in order of precedence."""
        out = []
        if self.entity_lexicon:
            out.append(self._from_lexicon(self.entity_lexicon, text, words, starts))
        names = np.flatnonzero(self.cache.names(words))
        out.append(_characters(np.stack([names, names + 1], axis=1), words))
        if self.options.capitals_name:
            runs = capital_runs(words.flags, starts)
            if self.options.language == "de":  # any noun has a capital
                runs = runs[np.diff(runs)[:, 0] > 1]
            out.append(_characters(runs, words))
        return out

    def _from_lexicon(
        self, lexicon: Lexicon, text: str, words: WordLookup, starts: np.ndarray
    ) -> np.ndarray:
        units, at, of = self.cache.lexicon_units(words, self._lexicons().index(lexicon))
        first = np.append(True, np.diff(of) != 0) if len(of) else np.zeros(0, bool)
        return lexicon.spans(text, units, np.append(at, len(text)), first & starts[of])


def _sentences(
    detected: np.ndarray, part_starts: np.ndarray, ends: np.ndarray, unsplit: int
) -> np.ndarray:
    """Start characters of sentences: the first `unsplit` parts are one each, and the rest are split
    as detected. `starts`, `ends`: (parts,) characters."""
    if not unsplit:
        return detected
    after = detected[detected >= ends[unsplit - 1]]
    rest = part_starts[unsplit : unsplit + 1]  # the text after a title always starts one
    return np.unique(np.concatenate([part_starts[:unsplit], rest, after]))


def _empty_part(document: Document) -> int:
    """The number, from 1, of the first part without tokens; 0 if all parts have some."""
    edges = np.searchsorted(
        document.token_starts, np.append(document.part_starts, len(document.text) + 1)
    )
    empty = np.flatnonzero(np.diff(edges) == 0)
    return int(empty[0]) + 1 if len(empty) else 0


def _characters(spans: np.ndarray, words: WordLookup) -> np.ndarray:
    """Converts spans of words to spans of characters."""
    if not len(spans):
        return _NO_SPANS
    return np.stack([words.starts[spans[:, 0]], words.ends[spans[:, 1] - 1]], axis=1)


def _lowered(text: str) -> str:
    """Lower-cases without changing the length, so that character offsets stay valid, and each
    character by itself, as the exported tokenizer does: Python's Σ depends on its neighbors."""
    low = text.replace("Σ", "σ").lower()
    if len(low) == len(text):
        return low
    return "".join(c.lower() if len(c.lower()) == 1 else c for c in text)


def _lexicon(files: Iterable[str], *, exact: bool) -> Lexicon | None:
    entries = list(chain.from_iterable(read_lexicon(file) for file in files))
    return Lexicon(entries, exact=exact) if entries else None


def find_segmenter(options: TextOptions, own: WordSegmenter | None) -> Segmenter | None:
    """The segmenter of Chinese characters: the user's function, `own` of the tokenizer, or rjieba
    for Chinese; None takes each as a word."""
    if options.segmenter:
        return _of_the_user(find_function(options.segmenter, "segmenter"), options.segmenter)
    if own is not None:
        return own.cut
    if not options.chinese:
        return whole_runs if options.language == "ja" else None
    import rjieba

    return rjieba.cut


def chinese_tagger() -> Callable[[str], str]:
    """A function from a word to its part of speech in jieba's dictionary."""
    import rjieba

    def tag(word: str) -> str:
        words = rjieba.tag(word)
        return words[0][1] if len(words) == 1 else ""

    return tag


def find_names(options: TextOptions) -> Callable[[str], bool]:
    """A function that says whether a Chinese word is a name."""
    if not options.chinese:
        return lambda word: False
    import rjieba

    tag = chinese_tagger()
    return lambda word: is_name(word, tag(word), known=rjieba.has_word(word))


def _of_the_user(segment: Segmenter, name: str) -> Segmenter:
    """The same function; raises UserError where it fails."""

    def checked(text: str) -> Sequence[str]:
        try:
            return list(segment(text))
        except Exception as error:
            raise UserError(
                f"segmenter {name!r}: failed on {text[:40]!r}: {type(error).__name__}: {error}"
            ) from error

    return checked
