"""Class pairs: the vectors of two texts of one class are similar, those of two classes are not.

    labeled rows ──> pairs: of one class, target 1; of two classes, target 0
    [CLS] text [SEP] | [CLS] other text [SEP]

The first stage of learning from few examples (SetFit: Tunstall et al. 2022, arXiv 2209.11055): n
texts make about n * n / 2 pairs. A head then classifies the vectors (`classification` with
`pooling: mean`). Evaluation gives each row one other text, alternately of its class and of another;
the loss is the only score, and nothing is predicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from pydantic import PositiveFloat

from palm_ds.common.errors import UserError
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.example import Example, build_input, join, layouts
from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.heads.embedding import SimilarityHead
from palm_ds.tasks.shared import labels
from palm_ds.tasks.shared.embedding_task import DenseEmbeddingTask, need_text
from palm_ds.tasks.shared.text_task import level

MOST_PAIRS = 10**7
"""Of an epoch."""

_KINDS = _OTHER, _SAME = range(2)
"""Kinds of pairs: of two classes, of one."""


class Classes(NamedTuple):
    """Rows in the order of their classes: those of a row's own are `first` to `end`."""

    names: np.ndarray  # (rows,) str
    order: np.ndarray  # (rows,) row numbers
    place: np.ndarray  # (rows,) where each row is in `order`
    first: np.ndarray  # (rows,) of the class at each place
    end: np.ndarray  # (rows,)

    @classmethod
    def of(cls, names: list[str]) -> Classes:
        """From the class of each row."""
        _, number, count = np.unique(names, return_inverse=True, return_counts=True)
        order = np.argsort(number, kind="stable")
        end = np.cumsum(count)
        sorted_ = number[order]
        return cls(np.array(names), order, np.argsort(order), (end - count)[sorted_], end[sorted_])

    def partners(self, kind: int) -> np.ndarray:
        """(rows,) how many other rows make a pair of this kind with the row at each place."""
        own = self.end - self.first
        return own - 1 if kind == _SAME else len(own) - own

    def drawn(self, row: np.ndarray, kind: np.ndarray, uniform: np.ndarray) -> np.ndarray:
        """(n,) a partner of each row, given numbers in [0, 1); itself if it has none."""
        place = self.place[row]
        same = kind == _SAME
        first, end = self.first[place], self.end[place]
        many = np.where(same, end - first - 1, len(self.order) - end + first)
        nth = np.minimum((uniform * many).astype(np.int64), many - 1)
        # The row itself, or its whole class, is skipped.
        of_class = first + nth + (nth >= place - first)
        of_others = np.where(nth < first, nth, nth + end - first)
        partner = np.where(many > 0, np.where(same, of_class, of_others), place)
        return self.order[partner]

    def pairs(self, kind: int) -> int:
        """Number of unordered pairs of this kind."""
        return int(self.partners(kind).sum()) // 2

    def pair(self, number: np.ndarray, kind: int) -> np.ndarray:
        """(n, 2) the rows of pairs of this kind, given their numbers (n,)."""
        place = np.arange(len(self.order))
        after = place + 1 if kind == _SAME else self.end
        stop = self.end if kind == _SAME else np.full(len(place), len(place))
        upto = np.cumsum(stop - after)
        one = np.searchsorted(upto, number, side="right")
        other = after[one] + number - (upto - stop + after)[one]
        return self.order[np.column_stack([one, other])]


@dataclass(frozen=True, kw_only=True)
class ClassPairs(DenseEmbeddingTask):
    """Trains vectors that differ by class, from few labeled texts."""

    sampling: Literal["random", "oversampling", "undersampling", "unique"] = "random"
    """The pairs of an epoch. random: each row with a random text of its class and one of another
    class, so that epochs are SetFit's iterations. unique: every pair once. oversampling: equally
    many pairs of one class and of two, the rarer kind repeated. undersampling: likewise, with a
    random part of the more common kind, another one in each epoch."""
    loss: Literal["cosine", "cosent"] = "cosine"
    """cosine: the squared difference of similarity and target; cosent: the order of all pairs of a
    step (CoSENT, Su 2022)."""
    temperature: PositiveFloat = 0.05
    """CoSENT divides similarities by it."""

    num_uniforms = 1

    # -- rows --

    def columns_of(self, source: TableSource) -> tuple[str, ...]:
        columns = super().columns_of(source)
        if len(columns) != 1:
            raise UserError(
                f"{self.where}.texts: rows have {' and '.join(columns)}; pairs are made of single "
                f"texts: name one column, such as [{columns[0]}]"
            )
        return columns

    def row_texts(self, source: TableSource, item: int) -> list[str]:
        (column,) = self.columns_of(source)
        return [need_text(source.column(column)[item], source, item, column)]

    def check(self, source: TableSource, *, labeled: bool) -> None:
        for item in range(len(source)):
            self.row_texts(source, item)
        super().check(source, labeled=labeled)

    def check_labels(self, source: TableSource) -> None:
        source.need(self.label_column, self.where)
        for item, value in enumerate(source.single_values(self.label_column)):
            labels.one_value(value, self, source, item)

    def check_step(self, source: TableSource, examples: int) -> None:
        if self.loss == "cosent" and examples < 2:
            raise UserError(
                f"{self.where}: one pair per step: CoSENT compares pairs; raise `batch`, or choose "
                "`loss: cosine`"
            )

    def classes(self, source: TableSource) -> Classes:
        """The classes of the rows."""
        names = source.single_values(self.label_column)
        return source.cached(f"classes of {self.name}", lambda: Classes.of(list(map(str, names))))

    def describe_labels(self, source: TableSource) -> str:
        if self.label_column not in source.columns:
            return ""
        classes = self.classes(source)
        return (
            f"{len(np.unique(classes.first))} classes; {classes.pairs(_SAME):,} pairs of one, "
            f"{classes.pairs(_OTHER):,} of two"
        )

    # -- pairs --

    def items(self, source: TableSource, max_length: int) -> np.ndarray:
        """(rows, 3): a row, by turns the kind of its pair, and 0."""
        rows = np.arange(len(source))
        return np.column_stack([rows, rows % 2, np.zeros_like(rows)])

    def training_items(self, source: TableSource, max_length: int) -> np.ndarray:
        """(pairs, 3): a row, a kind and 0; or the number of a pair in the epoch, its kind, and how
        many of the kind the epoch has. Raises UserError."""
        classes = self.classes(source)
        pairs = [classes.pairs(kind) for kind in _KINDS]
        if not all(pairs):
            lacking = "one class" if pairs[_OTHER] else "two classes"
            raise UserError(f"{self.where}: {source.name}: no two rows are of {lacking}")
        if self.sampling == "random":
            able = [np.flatnonzero(classes.partners(kind)[classes.place]) for kind in _KINDS]
            parts = [(rows, kind, 0) for kind, rows in zip(_KINDS, able, strict=True)]
        else:
            many = self._of_epoch(pairs)
            parts = [(np.arange(many[kind]), kind, many[kind]) for kind in _KINDS]
        return np.concatenate([np.column_stack(np.broadcast_arrays(*part)) for part in parts])

    def _of_epoch(self, pairs: list[int]) -> list[int]:
        """Pairs of each kind in an epoch, given how many there are."""
        equal = {"oversampling": max(pairs), "undersampling": min(pairs)}.get(self.sampling)
        chosen = pairs if equal is None else [equal] * len(pairs)
        if sum(chosen) > MOST_PAIRS:
            raise UserError(
                f"{self.where}.sampling: {self.sampling} makes {sum(chosen):,} pairs of these rows,"
                f" more than {MOST_PAIRS:,}; use `random`, which draws two for each row"
            )
        return chosen

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: TableSource, max_length: int
    ) -> np.ndarray:
        """`pair` (2,) of rows, and `tokens` (2,) of their texts, special ones included; where they
        are too long for a row, the longer one is cut."""
        pair = self._pairs(items, uniform[:, 0], source)
        special, most = source.vocabulary.around(1), self.input_length(max_length)
        lengths = self.encoded(source).tokens.lengths[pair] + special
        kept = level(np.minimum(lengths, most), max_length)
        return layouts(kept.sum(1), pair=pair, tokens=kept)

    def _pairs(self, items: np.ndarray, uniform: np.ndarray, source: TableSource) -> np.ndarray:
        """(n, 2) the rows of each item's pair."""
        number, kind, many = items.T
        classes, pair = self.classes(source), np.empty((len(items), 2), np.int64)
        drawn = many == 0
        rows, kinds = number[drawn], kind[drawn]
        pair[drawn] = np.column_stack([rows, classes.drawn(rows, kinds, uniform[drawn])])
        for each in _KINDS:
            if (here := ~drawn & (kind == each)).any():
                share = _shares(number[here], many[here], classes.pairs(each), uniform[here])
                pair[here] = classes.pair(share, each)
        return pair

    def example(self, layout: np.void, source: TableSource, rng: np.random.Generator) -> Example:
        texts, special = self.encoded(source).tokens, source.vocabulary.around(1)
        rows, tokens = layout["pair"], layout["tokens"]
        pieces = [
            build_input([texts.read(row, 0, many - special)], source.vocabulary)
            for row, many in zip(rows.tolist(), tokens.tolist(), strict=True)
        ]
        example = join(pieces)
        example.item = int(rows[0])
        one, other = self.classes(source).names[rows]
        self.add_labels(example, np.full(2, float(one == other)))
        return example

    def head(self, backbone: Encoder) -> SimilarityHead:
        return SimilarityHead(
            self.vector_settings(backbone), loss=self.loss, temperature=self.temperature
        )


def _shares(number: np.ndarray, many: np.ndarray, total: int, uniform: np.ndarray) -> np.ndarray:
    """(n,) one of each of `many` (n,) equal shares of range(total), given which and numbers in
    [0, 1): all different if there are fewer shares, else each as often as any other, or once
    more."""
    low, high = number * total // many, (number + 1) * total // many
    return low + (uniform * np.maximum(high - low, 1)).astype(np.int64)
