"""The sources of generated texts: one or several columns, or for a reply facts and the turns of a
dialogue.

    [CLS] source [SEP] source_b [SEP]        the longest is cut first

    [CLS] facts [SEP] hi [SEP] hello [SEP] how are you [SEP]     [CLS] fine [SEP]
      3      16   16   3   3     2     2     1  1   1    1         0     0    0      token types

The token type of a turn is its number, counted back from the reply, which has 0; facts have the
last one, and [CLS] has that of the first turn. ERNIE-GEN adds two embeddings instead, of the turn
and of the role: that of the reply's speaker, of the other, or of facts (branch `repro`,
reader/seq2seq_reader.py). The role follows from the turn, so both say the same, and the reader of
its weights adds them up (palm_ds/weights/formats/paddle/read.py).

A source that is too long loses its beginning, facts first, as in ERNIE's code; [CLS] stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.example import Example, build_input, select_tokens
from palm_ds.data.tasks.interfaces import QUESTION, Form, FormField, text_field
from palm_ds.tasks.shared.text_task import level
from palm_ds.text.tokens import TokenSpan

TURNS = "turns"
"""The column of turns."""


def dialogue_types(max_turns: int) -> int:
    """The number of token types of dialogues of that many turns."""
    return max_turns + 2


def source_form(roles: Sequence[str], *, optional: bool = False) -> Form:
    """The form of a task that writes texts from columns of these roles. `optional`: perhaps without
    any, as captions are."""
    first = text_field(roles[0])
    fields = (replace(first, value="", optional=True) if optional else first,)
    if TURNS in roles:
        label = "turns, one on each line"
        turns = FormField(name=TURNS, role=TURNS, label=label, value=QUESTION, listed=True)
        fields = (turns, replace(fields[0], label="facts", value="", optional=True))
    return Form(about="Writes a text.", fields=fields, shows="text")


def dialogue_lengths(
    items: np.ndarray, source: TableSource, facts: Sequence[str], max_turns: int
) -> np.ndarray:
    """(n,) the tokens of the sources of rows, without the first and the last one."""
    words = source.words(TURNS)
    last = words.starts[items + 1]
    many = np.minimum(last - words.starts[items], max_turns)
    bounds = np.append(words.firsts, len(words.tokens.ids))
    lengths = bounds[last] - bounds[last - many]
    lengths += sum(source.encoded(column).lengths[items] for column in facts)
    return lengths + source.vocabulary.around(many + len(facts)) - 2


def dialogue_example(
    item: int, tokens: int, source: TableSource, facts: Sequence[str], max_turns: int
) -> Example:
    """The source of a row, of at most `tokens` tokens and the first and the last one."""
    words, given = source.words(TURNS), [source.encoded(column).read(item) for column in facts]
    bounds = np.append(words.firsts, len(words.tokens.ids))
    last = int(words.starts[item + 1])
    first = max(int(words.starts[item]), last - max_turns)
    turns = [
        TokenSpan(start, words.tokens.ids[start:end].astype(np.int64))
        for start, end in zip(bounds[first:last], bounds[first + 1 : last + 1], strict=True)
    ]
    types = [dialogue_types(max_turns) - 1] * len(facts) + list(range(len(turns), 0, -1))
    whole = build_input([*given, *turns], source.vocabulary, types)
    whole.item, whole.token_type_ids[0] = item, len(turns)
    kept = np.arange(len(whole)) >= len(whole) - tokens - 1
    kept[0] = True
    return select_tokens(whole, kept)


@dataclass(frozen=True)
class GenerationSources:
    """The sources of the rows of a table, encoded."""

    source: TableSource
    columns: Sequence[str]
    """Without that of turns."""
    max_turns: int = 0
    """Turns of a dialogue; 0: no dialogue."""

    @property
    def special(self) -> int:
        """The special tokens of a row, which lengths leave out."""
        return self.source.vocabulary.around(1 if self.max_turns else max(len(self.columns), 1))

    def whole_lengths(self, items: np.ndarray) -> np.ndarray:
        """(n, sources) tokens of each source; (n, 1) of a dialogue with its facts; (n, 0) without a
        source, beside an image."""
        if self.max_turns:
            return dialogue_lengths(items, self.source, self.columns, self.max_turns)[:, None]
        lengths = [self.source.encoded(column).lengths[items] for column in self.columns]
        return np.stack(lengths, 1) if lengths else np.zeros((len(items), 0), np.int64)

    def lengths(self, items: np.ndarray, most: int | np.ndarray) -> np.ndarray:
        """`whole_lengths`, cut to `most` tokens of a row, special ones included."""
        return level(self.whole_lengths(items), most - self.special)

    def example(self, item: int, tokens: np.ndarray) -> Example:
        """[CLS] source [SEP] ... with `tokens` (sources,) of each source of a row."""
        if self.max_turns:
            return dialogue_example(item, int(tokens[0]), self.source, self.columns, self.max_turns)
        pieces = [
            self.source.encoded(column).read(item, 0, many)
            for column, many in zip(self.columns, tokens.tolist(), strict=True)
        ]
        nothing = TokenSpan(0, np.zeros(0, np.int64))
        example = build_input(pieces or [nothing], self.source.vocabulary)
        example.item = item
        return example
