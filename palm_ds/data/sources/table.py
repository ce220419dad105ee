"""Rows of a table as a source: texts by row and column, tokenized once.

    table ──rows──> TableSource.encoded("text_a") ──> the tokens of a row's text, and the character
                                                      span of each

Tasks call a row's number within the source an item. A column of lists (tokens) is encoded word by
word; a text can be too (`TableSource.words`), split into words or characters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Protocol, cast

import numpy as np
from tokenizers import Regex, pre_tokenizers

from palm_ds.common.errors import UserError
from palm_ds.data.reader import Table
from palm_ds.data.reader.regions import ImageRegions, unimo_line
from palm_ds.data.reader.table import MEMORY
from palm_ds.data.sources.source import CachesResults, train_heldout_split
from palm_ds.text.tokenizer import CHINESE, Tokenizer
from palm_ds.text.tokens import SpecialTokens, TokenSpan


@dataclass(frozen=True)
class TokenizedColumn:
    """Tokenized texts, concatenated. Large tables have billions of tokens, so that these are int32;
    what is read of them is int64."""

    ids: np.ndarray  # (tokens,) int32
    spans: np.ndarray  # (tokens, 2) int32: characters [from, to) of the text
    starts: np.ndarray  # (texts + 1,) int64: the first token of each text

    @cached_property
    def lengths(self) -> np.ndarray:
        """(texts,) number of tokens."""
        return np.diff(self.starts)

    def read(self, text: int, first: int = 0, last: int | None = None) -> TokenSpan:
        """The tokens [first, last) of a text. Their `Example.source_offsets` counts all tokens
        here; `place` converts it to a place within the text."""
        start, end = self.starts[text], self.starts[text + 1]
        stop = end if last is None else min(start + last, end)
        return TokenSpan(int(start + first), self.ids[start + first : stop].astype(np.int64))

    def place(self, text: int, origin: np.ndarray) -> np.ndarray:
        """Places within the text of its tokens, given their origins."""
        return origin - self.starts[text]

    def spans_of(self, text: int) -> np.ndarray:
        """(tokens of the text, 2) int64: the character span of each token."""
        return self.spans[self.starts[text] : self.starts[text + 1]].astype(np.int64)


@dataclass(frozen=True)
class TokenizedWords:
    """Texts encoded word by word. Every word has at least one token."""

    tokens: TokenizedColumn
    firsts: np.ndarray  # (words,) int64: each word's first token, counting all tokens
    starts: np.ndarray  # (texts + 1,) int64: the first word of each text
    spans: np.ndarray  # (words, 2) int64: characters [from, to) of the text; of a list: of its
    # words joined by spaces

    def of(self, text: int) -> slice:
        """The words of a text."""
        return slice(int(self.starts[text]), int(self.starts[text + 1]))


class EndlessSources(Protocol):
    """Rows without an end, as windows that are sources (data/sources/endless_rows.py)."""

    reader: str
    """The name of the function or class that gives them."""
    pass_examples: int
    """Rows of a pass."""
    where: str
    """The path in the recipe, for messages."""

    @property
    def window(self) -> int:
        """Rows of a window."""
        ...

    def source(self, number: int) -> TableSource:
        """A window, from 0. Raises UserError."""
        ...


@dataclass(frozen=True)
class TableSource(CachesResults):
    """Some rows of a table, with the tokenizer for their texts."""

    table: Table
    numbers: np.ndarray  # (rows,) which rows of the table, ascending
    tokenizer: Tokenizer
    name: str
    endless: EndlessSources | None = None
    """The reader whose first rows these are; its others are read in training."""

    @classmethod
    def of_labels(cls, table: Table) -> TableSource:
        """All rows of a table without a tokenizer, to read only their labels."""
        nothing = cast(Tokenizer, None)
        return cls(table, np.arange(len(table)), nothing, ", ".join(table.names))

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def vocabulary(self) -> SpecialTokens:
        return self.cached("vocabulary", lambda: self.tokenizer.vocabulary)

    @property
    def columns(self) -> Sequence[str]:
        return self.table.columns

    def row(self, item: int) -> Mapping[str, Any]:
        """The columns of a row."""
        return self.table[int(self.numbers[item])]

    def where(self, item: int) -> str:
        """The file and line of a row, for messages."""
        return self.table.where(int(self.numbers[item]))

    def need(self, column: str, what: str) -> None:
        """Raises UserError if the table has no such column; `what` needs it."""
        if column in self.columns:
            return
        missing = f"{what}: {self.name} has no column {column!r}"
        if texts := next((file.path for file in self.table.files if file.format == "text"), ""):
            if unimo := unimo_line(str(self.row(0).get("text_a"))) if len(self) else "":
                raise UserError(f"{missing}; it has {unimo}")
            raise UserError(
                f"{missing}; {texts} was read as a text on each line (`format: text`): give "
                "another `format`, such as conll, or rename it, as to names.conll"
            )
        memory = self.table.files[0].format == MEMORY
        if memory and {*self.columns} == {"text_a", "text_b"}:
            raise UserError(
                f"{missing}: a tuple of two texts is a pair of them; give rows such as "
                f'{{"text_a": ..., "{column}": ...}}'
            )
        unused = self.table.unused
        also = f", and without a role {', '.join(unused[:12])}" if unused else ""
        option = "" if memory else f", or --columns {column}=NAME"
        first = "; header: false if its first line is a row" if self._may_lack_header else ""
        raise UserError(
            f"{missing}; it has {', '.join(self.columns)}{also}; "
            f"map one with `columns: {{{column}: NAME}}`{option}{first}"
        )

    @property
    def _may_lack_header(self) -> bool:
        """Whether names of columns are rather texts."""
        long = any(len(name.split()) > 3 or len(name) > 20 for name in self.table.unused)
        return long and self.table.files[0].format in ("tsv", "csv")

    def column(self, name: str) -> list[Any]:
        """The values of a column; None for rows without one."""
        return self.cached(
            f"column {name}", lambda: [self.row(i).get(name) for i in range(len(self))]
        )

    def single_values(self, name: str) -> list[Any]:
        """The values of a column with one for each row; `[x]`, as Doccano writes a class, is x."""
        return self.cached(f"single {name}", lambda: _unpacked(self.column(name)))

    def regions(self, item: int) -> ImageRegions:
        """The regions of a row's image. Raises UserError."""
        return self.table.regions(int(self.numbers[item]))

    def image_name(self, item: int) -> str:
        """What tells the image of a row from others; empty for one that is in the table."""
        return self.table.image_name(int(self.numbers[item]))

    def region_counts(self) -> np.ndarray:
        """(rows,) int64: the regions of each row's image. Raises UserError."""
        return self.cached(
            "regions", lambda: np.array([self.table.region_count(int(i)) for i in self.numbers])
        )

    def encoded(self, column: str) -> TokenizedColumn:
        """A column of texts, tokenized on first use; a column of lists is encoded word by word."""
        return self.cached(f"encoded {column}", lambda: self._encode(column))

    def words(self, column: str, unit: str = "words") -> TokenizedWords:
        """A column word by word: lists as given, texts split into `unit` (`spans_in`)."""
        return self.cached(f"{unit} of {column}", lambda: self._words(column, unit))

    def word_places(self, column: str, unit: str = "words") -> list[np.ndarray]:
        """Per row (words, 2): the character spans of its words, as in `Words.spans`. Needs no
        tokenizer."""
        return self.cached(f"places of {unit} of {column}", lambda: self._places(column, unit))

    def _places(self, column: str, unit: str) -> list[np.ndarray]:
        found = []
        for item, value in enumerate(self.column(column)):
            if isinstance(value, str):
                places = spans_in(value, unit)
            elif isinstance(value, list) and all(isinstance(word, str) for word in value):
                ends = np.cumsum([len(word) + 1 for word in value], dtype=np.int64) - 1
                places = [(end - len(word), end) for word, end in zip(value, ends, strict=True)]
            else:
                got = "nothing" if value is None else repr(value)
                raise UserError(f"{self.where(item)}: {column}: expected words, got {got}")
            found.append(np.array(places, np.int64).reshape(-1, 2))
        return found

    def _words(self, column: str, unit: str) -> TokenizedWords:
        places = self.word_places(column, unit)
        lists = [
            [value[start:end] for start, end in spans] if isinstance(value, str) else value
            for value, spans in zip(self.column(column), places, strict=True)
        ]
        return encode_lists(lists, places, self.tokenizer)

    def _encode(self, column: str) -> TokenizedColumn:
        texts = self.column(column)
        if any(isinstance(value, list) for value in texts):
            return self.words(column).tokens
        for item, text in enumerate(texts):
            if not isinstance(text, str):
                got = "nothing" if text is None else repr(text)
                raise UserError(f"{self.where(item)}: {column}: expected a text, got {got}")
        return encode(texts, self.tokenizer)


def _unpacked(values: list[Any]) -> list[Any]:
    """With the only element of each list that has one; the same list if there are none."""
    if not any(isinstance(value, list) for value in values):
        return values
    return [value[0] if isinstance(value, list) and len(value) == 1 else value for value in values]


def encode(texts: Sequence[str], tokenizer: Tokenizer) -> TokenizedColumn:
    """Tokenizes texts, without special tokens; equal texts only once."""
    number = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    distinct, lengths = list(number), np.empty(len(number), np.int64)
    ids, spans = [np.empty(0, np.int32)], [np.empty((0, 2), np.int32)]
    for begin in range(0, len(distinct), _BATCH):
        found = tokenizer.encode_spans(distinct[begin : begin + _BATCH])
        lengths[begin : begin + _BATCH] = [len(own) for own, _ in found]
        ids.append(np.concatenate([own for own, _ in found], dtype=np.int32, casting="same_kind"))
        spans.append(np.concatenate([own for _, own in found], dtype=np.int32, casting="same_kind"))
    starts = np.append(0, np.cumsum(lengths))
    known = TokenizedColumn(np.concatenate(ids), np.concatenate(spans), starts)
    if len(distinct) == len(texts):
        return known
    which = np.array([number[text] for text in texts], np.int64)
    count = known.lengths[which]
    starts = np.append(0, np.cumsum(count))
    token = np.arange(starts[-1]) - np.repeat(starts[:-1] - known.starts[which], count)
    return TokenizedColumn(known.ids[token], known.spans[token], starts)


def encode_lists(
    lists: Sequence[Sequence[str]], spans: Sequence[np.ndarray], tokenizer: Tokenizer
) -> TokenizedWords:
    """Tokenizes lists of words, each word separately; `spans[i]` (words, 2) are the character spans
    of list i.

    A word for which the tokenizer returns nothing (control characters) becomes [UNK]."""
    every = [word for words in lists for word in words]
    number = {word: i for i, word in enumerate(dict.fromkeys(every))}
    known = encode(list(number), tokenizer)
    which = np.array([number[word] for word in every], np.int64)  # (words,)
    lengths_of_texts = known.lengths[which]
    lengths = np.maximum(lengths_of_texts, 1)
    ends = np.cumsum(lengths)
    place = np.concatenate([np.empty((0, 2), np.int64), *spans])
    within = np.arange(lengths.sum()) - np.repeat(ends - lengths, lengths)
    source = np.repeat(known.starts[which], lengths) + within  # token of `known`
    lost = np.repeat(lengths_of_texts == 0, lengths)
    unknown = tokenizer.vocabulary.unk
    ids = np.append(known.ids, unknown)[np.where(lost, len(known.ids), source)]
    inside = np.concatenate([known.spans, [[0, 0]]])[np.where(lost, len(known.ids), source)]
    inside[lost, 1] = (place[:, 1] - place[:, 0])[lengths_of_texts == 0]
    text_ends = np.cumsum([0, *(len(words) for words in lists)])
    return TokenizedWords(
        tokens=TokenizedColumn(
            ids.astype(np.int32),
            (inside + np.repeat(place[:, :1], lengths, 0)).astype(np.int32),
            np.append(0, ends)[text_ends],
        ),
        firsts=ends - lengths,
        starts=text_ends,
        spans=place,
    )


UNITS = ("words", "characters")


def spans_in(text: str, unit: str) -> list[tuple[int, int]]:
    """The characters [from, to) of each unit of a text. `words`: separated by white space and
    punctuation, with every Chinese character a word (as in BERT); `characters`: all except white
    space."""
    if unit == "characters":
        return [(i, i + 1) for i, character in enumerate(text) if not character.isspace()]
    assert unit == "words", unit
    return [span for _, span in _splitter().pre_tokenize_str(text)]


def chinese_share(texts: Sequence[str | Sequence[str] | None]) -> float:
    """The share of Chinese characters, white space excluded."""
    text = "".join("".join("".join(each or "") for each in texts).split())
    return len(re.findall(f"[{CHINESE}]", text)) / max(len(text), 1)


@cache
def _splitter() -> pre_tokenizers.PreTokenizer:
    chinese = pre_tokenizers.Split(Regex(f"[{CHINESE}]"), "isolated")
    return pre_tokenizers.Sequence([chinese, pre_tokenizers.BertPreTokenizer()])


_BATCH = 8192  # texts per call of the tokenizer


def split_rows(
    table: Table, held_out: float, tokenizer: Tokenizer, name: str, group: str = ""
) -> tuple[TableSource, TableSource]:
    """The training rows and the held-out rows; the split depends only on row numbers. Rows with the
    same value of the column `group`, if given, stay together."""
    groups = table.column(group) if group else None
    training, held = train_heldout_split(len(table), held_out, where=name, of="rows", groups=groups)
    return (
        TableSource(table, training, tokenizer, name),
        TableSource(table, held, tokenizer, name),
    )
