"""Several texts of a row that do not attend to one another, tokenised once and cut to share a row.

rows of texts ──tokenise──> RowTexts ──cut──> (rows, most texts) tokens of each
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.data.sources.table import TableSource, TokenizedColumn, encode
from palm_ds.tasks.shared.text_task import SHORTEST, level


@dataclass(frozen=True, kw_only=True)
class RowTexts:
    """The texts of all rows of a source."""

    tokens: TokenizedColumn
    starts: np.ndarray  # (rows + 1,) the first text of each row
    called: str
    """What messages call them: `texts`, `choices`."""

    @property
    def counts(self) -> np.ndarray:
        """(rows,) the number of texts."""
        return np.diff(self.starts)

    def of(self, item: int) -> range:
        """The places of a row's texts in `tokens`."""
        return range(self.starts[item], self.starts[item + 1])

    def cut(
        self, items: np.ndarray, added: np.ndarray, source: TableSource, most: int, max_length: int
    ) -> np.ndarray:
        """(items, most texts) int64: tokens of each text of these rows, 0 where there is none.

        `added` (items,): tokens that come with each text. A text has at most `most` tokens with
        them, and those of a row have `max_length` together, for which the longest are cut. Raises
        UserError if too little is left."""
        number = self.counts[items]
        places = np.arange(self.counts.max(initial=1)) < number[:, None]
        nth = self.starts[items][:, None] + np.arange(places.shape[1])
        lengths = self.tokens.lengths[np.minimum(nth, len(self.tokens.lengths) - 1)]
        whole = np.where(places, np.minimum(lengths + added[:, None], most), 0)
        kept = level(whole, max_length)
        for row in np.flatnonzero(((kept < np.minimum(whole, SHORTEST)) & places).any(1)):
            raise UserError(
                f"{source.where(items[row])}: {number[row]} {self.called} leave fewer than "
                f"{SHORTEST} tokens for each in a row of {max_length}; raise `length`"
            )
        return kept


def tokenise(rows: Sequence[Sequence[str]], source: TableSource, called: str) -> RowTexts:
    """The texts of the rows of a source."""
    starts = np.cumsum([0, *map(len, rows)])
    tokens = encode([text for row in rows for text in row], source.tokenizer)
    return RowTexts(tokens=tokens, starts=starts, called=called)
