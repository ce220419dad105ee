"""Which word ties these two sentences together? (ERNIE 2.0, section 4.2.3)

Pairs are mined from running text as the Discovery data were (Sileo et al. 2019, "Mining Discourse
Markers for Unsupervised Sentence Representation Learning", section 3): adjacent sentences, the
second of which begins with a discourse marker. The marker is taken out; it is the class.

    It rained all night. However, the match was played.
    [CLS] it rained all night . [SEP] the match was played . [SEP]          however

Or they are ready-made, in a corpus of pairs whose labels are markers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from palm_ds.common import rng as keyed
from palm_ds.common.errors import UserError
from palm_ds.corpus.store import Corpus
from palm_ds.data.corpus_source import Source
from palm_ds.data.example import Example
from palm_ds.data.layout import layouts
from palm_ds.data.task import CorpusTask
from palm_ds.pretrain.shared import sentence_pairs as pairs
from palm_ds.pretrain.shared.discourse_markers import Finder, Marker, mine, plain_name, read_markers

if TYPE_CHECKING:
    from torch import nn

    from palm_ds.model.encoder import Encoder

UNMARKED = "[no-conn]"
"""What the Discovery data call the class of pairs without a marker."""


@dataclass(frozen=True, kw_only=True)
class DiscourseRelation(CorpusTask):
    markers: str = "en"
    """The markers, one class a line: `en`, `zh` (palm_ds/pretrain/markers), or a file of your own;
    for ready-made pairs also `labels`: the corpus's labels are the classes, by number."""
    classes: int = 0
    """With `markers: labels`, how many classes the head has."""
    least: int = 100
    """A class takes part where the whole corpus has at least so many pairs of it, and the documents
    that are read (those held out) half of their share of that."""
    unmarked: bool = False
    """One more class: adjacent sentences, the second of which begins with no marker."""
    shortest: int = 5
    """Sentences of fewer tokens (the marker not counted) are passed over."""
    repeat: int = 10
    """Every class has as many pairs an epoch: the commonest's number, but no pair of the rarest is
    met more than so many times."""

    segments: ClassVar[int] = 2
    draws: ClassVar[int] = 1

    def __post_init__(self) -> None:
        where = f"tasks.{self.name}"
        for key in ("least", "shortest", "repeat"):
            if getattr(self, key) < 1:
                raise UserError(f"{where}.{key}: {getattr(self, key)} is less than 1")
        if self.markers == "labels":
            if self.classes < 2:
                raise UserError(f"{where}.classes: with `markers: labels` at least 2 must be given")
            if self.unmarked:
                raise UserError(
                    f"{where}.unmarked: with `markers: labels` a label says what is unmarked"
                )
        elif self.classes:
            raise UserError(f"{where}.classes: only with `markers: labels`; the list says it here")
        else:
            len(self.marker_classes)  # a wrong file is told at once

    @cached_property
    def marker_classes(self) -> list[list[Marker]]:
        """The variants of every class, in the order of the list."""
        return read_markers(self.markers, f"tasks.{self.name}.markers")

    @property
    def class_count(self) -> int:
        """Known from the recipe alone, whatever the corpus holds."""
        if self.markers == "labels":
            return self.classes
        return len(self.marker_classes) + self.unmarked

    def marks(self) -> tuple[str, ...]:
        return ("word",)

    def items(self, source: Source, room: int) -> np.ndarray:
        """(items, 2): ranges of the pairs found, balanced (pairs.balance)."""
        return self._balanced(source)[1]

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: Source, room: int
    ) -> np.ndarray:
        table = self._balanced(source)[0][pairs.pick(items, uniform[:, 0])]
        start, end, second, second_end, label = table.T
        tokens, second_tokens = pairs.fit(end - start, second_end - second, room - 3)
        before, after = source.tokens_around(start, second_end)
        # Too long: mined texts keep what is next to the marker, ready-made ones their beginnings.
        start = start if pairs.is_ready_made(source) else end - tokens
        # Free space of the row: the second text goes on, then the first begins earlier.
        length = tokens + second_tokens + 3
        spare = np.minimum(room - length, before + after)
        most = second_end - second + after
        return layouts(
            length,
            spare,
            first=start,
            first_tokens=tokens,
            second=second,
            second_tokens=most,
            label=label,
        )

    def example(self, layout: np.void, source: Source, rng: np.random.Generator) -> Example:
        example = pairs.arrange_pair(layout, source)
        example.labels[self.name] = np.array([0]), np.array([layout["label"]])
        return example

    def head(self, backbone: Encoder) -> nn.Module:
        from palm_ds.model.heads import ClassHead

        return ClassHead(backbone.config.hidden_size, classes=self.class_count, pooled=True)

    def baseline(self, targets: np.ndarray, source: Source) -> tuple[np.ndarray, np.ndarray]:
        """Guessing among the classes that take part in this source, which are equally many."""
        taking_part = len(np.unique(self._balanced(source)[0][:, 4]))
        return np.full(len(targets), np.log(taking_part)), np.full(len(targets), 1 / taking_part)

    def class_name(self, label: int) -> str:
        if self.markers == "labels":
            return str(label)
        return [*(line[0].text for line in self.marker_classes), UNMARKED][label]

    def about(self, source: Source) -> str:
        """What a run says of the pairs it found."""
        table, items = self._balanced(source)
        counts = np.bincount(table[:, 4], minlength=self.class_count)
        found = np.sort(counts[counts > 0])
        return (
            f"{self.name}: {len(table)} pairs of {len(found)} of {self.class_count} classes "
            f"({found[0]} to {found[-1]} of one), {len(items)} an epoch"
        )

    def _balanced(self, source: Source) -> tuple[np.ndarray, np.ndarray]:
        """This source's pairs (start, end, start of the second, its end, class) in the order of
        `pairs.balance`, and the items."""
        return source.cached(f"pairs of {self}", lambda: self._balance(source))

    def _balance(self, source: Source) -> tuple[np.ndarray, np.ndarray]:
        table = self._corpus_pairs(source.corpus)
        document = np.searchsorted(source.starts, table[:, 0], side="right") - 1
        here = (document >= 0) & (table[:, 0] < source.ends[document])
        counts = np.bincount(table[here, 4], minlength=self.class_count)
        share = (source.ends - source.starts).sum() / source.corpus.manifest.tokens
        here &= counts[table[:, 4]] >= self.least * share / 2
        if not here.any():
            raise UserError(
                f"tasks.{self.name}: {source.corpus.path} has {len(table)} pairs, but in the "
                f"{len(source.documents)} documents to read here {counts.sum()}, at most "
                f"{counts.max()} of one class; {self.least * share / 2:.0f} or more are needed "
                f"(`least: {self.least}`)"
            )
        order, items = pairs.balance(table[here, 4], self.repeat, keyed.key("discourse pairs"))
        return table[here][order], items

    def _corpus_pairs(self, corpus: Corpus) -> np.ndarray:
        """(pairs, 5) of the whole corpus, of the classes that are frequent enough in it: training
        and held-out documents have the same classes."""
        if corpus.path not in self._kept:
            source = Source(corpus, np.arange(len(corpus)))
            table, about = (
                self._ready(source) if pairs.is_ready_made(source) else self._mined(corpus)
            )
            counts = np.bincount(table[:, 4], minlength=self.class_count)
            if (counts >= self.least).sum() < 2:
                most = int(counts.max(initial=0))
                raise UserError(
                    f"tasks.{self.name}: {corpus.path}: {about}; at least 2 classes of "
                    f"`least: {self.least}` pairs are needed, the largest has {most}"
                )
            self._kept[corpus.path] = table[counts[table[:, 4]] >= self.least]
        return self._kept[corpus.path]

    @cached_property
    def _kept(self) -> dict[Path, np.ndarray]:
        return {}

    def _ready(self, source: Source) -> tuple[np.ndarray, str]:
        start, second, end, label = pairs.ready_made(source).T
        where, names = f"tasks.{self.name}.markers", pairs.label_names(source)
        if self.markers == "labels":
            if len(names) > self.classes:
                raise UserError(
                    f"tasks.{self.name}.classes: {self.classes}, but {source.corpus.path} has "
                    f"{len(names)} labels"
                )
            number = np.arange(len(names))
        else:
            numbers = {m.text: k for k, line in enumerate(self.marker_classes) for m in line}
            if self.unmarked:
                numbers[UNMARKED] = self.class_count - 1
            known = {
                name: numbers[plain] for name in names if (plain := plain_name(name)) in numbers
            }
            number = pairs.classes_of_labels(source, numbers | known, where)
        label = number[label]
        return np.column_stack([start, second, second, end, label]), f"{len(label)} pairs"

    def _mined(self, corpus: Corpus) -> tuple[np.ndarray, str]:
        if self.markers == "labels":
            raise UserError(
                f"tasks.{self.name}.markers: labels, but {corpus.path} has no column label: it "
                f"holds running text, from which pairs are mined with en, zh or a file of markers"
            )
        finder = Finder.of(self.marker_classes, corpus)
        last = self.class_count - 1 if self.unmarked else -1
        parts = list(mine(corpus, finder, shortest=self.shortest, unmarked=last))
        table = np.concatenate([np.empty((0, 5), np.int64), *parts])
        marked = int((table[:, 4] != last).sum())
        return table, (
            f"{corpus.manifest.sentences} sentences, {marked} begin with one of "
            f"{sum(map(len, self.marker_classes))} markers (`markers: {self.markers}`) and have "
            f"{self.shortest} tokens or more, as has the sentence before"
        )
