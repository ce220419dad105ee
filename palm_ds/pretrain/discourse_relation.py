"""Which discourse marker connects these two sentences? (ERNIE 2.0, section 4.2.3)

Pairs are mined from running text like the Discovery data (Sileo et al. 2019, "Mining Discourse
Markers for Unsupervised Sentence Representation Learning", section 3): adjacent sentences, the
second of which starts with a discourse marker. The marker is removed; it is the class.

    It rained all night. However, the match was played.
    [CLS] it rained all night . [SEP] the match was played . [SEP]          however

Ready-made pairs, in a corpus of pairs whose labels are markers, work too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from pydantic import PositiveInt

from palm_ds.common.errors import UserError
from palm_ds.common.files import fingerprint
from palm_ds.common.rng import derive_key
from palm_ds.corpus.store import Corpus
from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.tasks.example import layouts
from palm_ds.pretrain.shared import sentence_pairs
from palm_ds.pretrain.shared.discourse_markers import (
    OWN_LISTS,
    Finder,
    Marker,
    mine,
    plain_name,
    read_markers,
)

_Numbered = dict[str, tuple[Path | str, Sequence[str]]]
"""{"first": (path, labels)} of the first corpus that was read."""
_MIN_SAMPLE_ITEMS = 10
"""Pairs of a class in the sample of a large corpus; fewer say too little about how common it is."""
UNMARKED = "[no-conn]"
"""The Discovery data's name for the class of pairs without a marker."""


@dataclass(frozen=True, kw_only=True)
class DiscourseRelation(sentence_pairs.PairTask):
    markers: str = "en"
    """The markers: `en`, `zh` (files of palm_ds/pretrain/markers), or a file of your own with one
    class per line. For ready-made pairs also `labels`: the corpus's label numbers are the
    classes."""
    classes: int = 0
    """With `markers: labels`, the number of classes of the head."""
    least: PositiveInt = 100
    """Minimum pairs of a class in the whole corpus, of which the training (or held-out) documents
    must have at least half of their share. In a large corpus, which is read in windows, a sample
    must have its share, and at least 10. Rarer classes are left out."""
    unmarked: bool = False
    """Add a class of adjacent sentences the second of which starts with no marker."""
    shortest: PositiveInt = 5
    """Sentences of fewer tokens (without the marker) are skipped."""
    repeat: PositiveInt = 10
    """Every class has as many pairs per epoch as the most common one, so pairs of rarer classes
    are repeated; but no pair more than this many times."""

    num_uniforms = 1
    head_settings = ("markers", "classes", "unmarked")

    def __post_init__(self) -> None:
        super().__post_init__()
        where = self.where
        if self.markers == "labels":
            if self.classes < 2:
                raise UserError(f"{where}.classes: `markers: labels` needs a number of at least 2")
            if self.unmarked:
                raise UserError(
                    f"{where}.unmarked: not with `markers: labels`; use a label for unmarked pairs"
                )
        elif self.classes:
            raise UserError(
                f"{where}.classes: only with `markers: labels`; the markers define it here"
            )
        else:
            len(self.marker_classes)  # reports a bad file early

    @cached_property
    def marker_classes(self) -> list[list[Marker]]:
        """The variants of every class, in list order."""
        return read_markers(self.markers, f"{self.where}.markers")

    @property
    def class_count(self) -> int:
        """Depends only on the recipe, not on the corpus."""
        if self.markers == "labels":
            return self.classes
        return len(self.marker_classes) + self.unmarked

    def annotations(self) -> tuple[str, ...]:
        return ("word",)

    def file_contents(self) -> Mapping[str, str]:
        if self.markers == "labels":
            return {}
        file = f"markers/{self.markers}.txt" if self.markers in OWN_LISTS else self.markers
        return {file: fingerprint([list(map(asdict, line)) for line in self.marker_classes])}

    def items(self, source: CorpusSource, max_length: int) -> np.ndarray:
        """(items, 2): ranges of the balanced pairs (sentence_pairs.balance)."""
        return self._balanced(source)[1]

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: CorpusSource, max_length: int
    ) -> np.ndarray:
        table = self._balanced(source)[0][sentence_pairs.pick(items, uniform[:, 0])]
        start, end, second, second_end, label = table.T
        special = source.vocabulary.around(2)
        room = max_length - special
        tokens, second_tokens = sentence_pairs.fit(end - start, second_end - second, room)
        before, after = source.tokens_around(start, second_end)
        # Too long: mined texts keep the part next to the marker, ready-made ones their beginning.
        start = start if sentence_pairs.is_ready_made(source) else end - tokens
        # In free space of the row the second text gets longer, then the first starts earlier.
        length = tokens + second_tokens + special
        spare = np.minimum(max_length - length, before + after)
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

    def baseline(self, targets: np.ndarray, source: CorpusSource) -> tuple[np.ndarray, np.ndarray]:
        """Uniform over the classes used in this source, which are balanced."""
        used = len(self._used(source))
        return np.full(len(targets), np.log(used)), np.full(len(targets), 1 / used)

    def class_name(self, label: int) -> str:
        if self.markers == "labels":
            return str(label)
        return [*(line[0].text for line in self.marker_classes), UNMARKED][label]

    def describe(self, source: CorpusSource) -> str:
        table, items = self._balanced(source)
        counts = np.bincount(table[:, 4], minlength=self.class_count)
        present = np.sort(counts[self._used(source)])
        within = " in a sample of the corpus" if source.split else " an epoch"
        return (
            f"{self.name}: {present.sum()} pairs of {len(present)} of {self.class_count} classes "
            f"({present[0]} to {present[-1]} of one), {len(items)}{within}"
        )

    def _used(self, source: CorpusSource) -> np.ndarray:
        """The classes that have items: in a large corpus not all of which there are pairs."""
        table, items = self._balanced(source)
        return np.unique(table[items[:, 0], 4])

    def _balanced(self, source: CorpusSource) -> tuple[np.ndarray, np.ndarray]:
        """This source's pairs (start, end, start of the second, its end, class) in the order of
        `sentence_pairs.balance`, and the items."""
        return source.cached(f"pairs of {self}", lambda: self._balance(source))

    def _balance(self, source: CorpusSource) -> tuple[np.ndarray, np.ndarray]:
        if source.split:
            return self._balance_window(source)
        table = self._corpus_pairs(source.corpus)
        document = source.document_of(table[:, 0])
        here = (document >= 0) & (table[:, 0] < source.ends[document])
        counts = np.bincount(table[here, 4], minlength=self.class_count)
        share = (source.ends - source.starts).sum() / source.corpus.manifest.tokens
        here &= counts[table[:, 4]] >= self.least * share / 2
        if not here.any():
            raise UserError(
                f"{self.where}: {source.corpus.path} has {len(table)} pairs, but the "
                f"{len(source.documents)} documents of this split have {counts.sum()}, at most "
                f"{counts.max()} of one class; {self.least * share / 2:.0f} or more are needed "
                f"(`least: {self.least}`)"
            )
        order, items = sentence_pairs.balance(
            table[here, 4], self.repeat, derive_key("discourse pairs")
        )
        return table[here][order], items

    def _balance_window(self, source: CorpusSource) -> tuple[np.ndarray, np.ndarray]:
        table, rates = self._window_pairs(source), self._rates(source.reference)
        blocks = source.block_numbers[source.document_of(table[:, 0])]
        order, items = sentence_pairs.balance_blocks(
            table[:, 4], blocks, rates, derive_key("discourse pairs")
        )
        return table[order], items

    def _rates(self, sample: CorpusSource) -> np.ndarray:
        """(classes,) items per pair of a large corpus, from a sample of it."""
        return sample.cached(f"rates of {self}", lambda: self._find_rates(sample))

    def _find_rates(self, sample: CorpusSource) -> np.ndarray:
        counts = np.bincount(self._window_pairs(sample)[:, 4], minlength=self.class_count)
        share = (sample.ends - sample.starts).sum() / sample.corpus.manifest.tokens
        fewest = max(self.least * share, _MIN_SAMPLE_ITEMS)
        if (counts >= fewest).sum() < 2:
            raise UserError(
                f"{self.where}: {sample.corpus.path}: at least 2 classes of "
                f"`least: {self.least}` pairs are needed; in {len(sample)} random documents, the "
                f"largest has {counts.max()}, and fewer than 2 have {fewest:.0f} or more"
            )
        return sentence_pairs.item_rates(counts, self.repeat, math.ceil(fewest))

    def _window_pairs(self, source: CorpusSource) -> np.ndarray:
        """(pairs, 5) of a window of a large corpus."""
        return source.cached(f"all pairs of {self}", lambda: self._find_window_pairs(source))

    def _find_window_pairs(self, source: CorpusSource) -> np.ndarray:
        if sentence_pairs.is_ready_made(source):
            return self._ready(source)[0]
        assert source.split
        corpus, ranges = source.corpus, source.split.blocks.document_ranges
        blocks = np.unique(source.block_numbers)
        bounds = np.asarray(corpus.first_sentence)[ranges(np.column_stack([blocks, blocks + 1]))]
        table = np.concatenate([self._mined(corpus, range(*each))[0] for each in bounds.tolist()])
        documents = np.searchsorted(corpus.document_starts, table[:, 0], side="right") - 1
        return table[np.isin(documents, source.documents)]

    def _corpus_pairs(self, corpus: Corpus) -> np.ndarray:
        """(pairs, 5) of the whole corpus, for the classes that are frequent enough in it, so that
        training and held-out documents have the same classes."""
        if corpus.path not in self._kept:
            source = CorpusSource(corpus, np.arange(len(corpus)))
            table, describe = (
                self._ready(source)
                if sentence_pairs.is_ready_made(source)
                else self._mined(corpus, None)
            )
            counts = np.bincount(table[:, 4], minlength=self.class_count)
            if (counts >= self.least).sum() < 2:
                most = int(counts.max(initial=0))
                raise UserError(
                    f"{self.where}: {corpus.path}: {describe}; at least 2 classes of "
                    f"`least: {self.least}` pairs are needed, the largest has {most}"
                )
            self._kept[corpus.path] = table[counts[table[:, 4]] >= self.least]
        return self._kept[corpus.path]

    def _finder(self, corpus: Corpus) -> Finder:
        if corpus.path not in self._finders:
            self._finders[corpus.path] = Finder.of(self.marker_classes, corpus)
        return self._finders[corpus.path]

    @cached_property
    def _finders(self) -> dict[Path | str, Finder]:
        return {}

    @cached_property
    def _kept(self) -> dict[Path | str, np.ndarray]:
        return {}

    def _ready(self, source: CorpusSource) -> tuple[np.ndarray, str]:
        start, second, end, label = sentence_pairs.ready_made(source).T
        where, names = f"{self.where}.markers", sentence_pairs.label_names(source)
        if self.markers == "labels":
            _check_labels(names, source.corpus, self.where, self.classes, self._numbered)
            number = np.arange(len(names))
        else:
            numbers = {m.text: k for k, line in enumerate(self.marker_classes) for m in line}
            if self.unmarked:
                numbers[UNMARKED] = self.class_count - 1
            known = {
                name: numbers[plain] for name in names if (plain := plain_name(name)) in numbers
            }
            number = sentence_pairs.classes_of_labels(source, numbers | known, where)
        label = number[label]
        return np.column_stack([start, second, second, end, label]), f"{len(label)} pairs"

    @cached_property
    def _numbered(self) -> _Numbered:
        return {}

    def _mined(self, corpus: Corpus, sentences: range | None) -> tuple[np.ndarray, str]:
        if self.markers == "labels":
            raise UserError(
                f"{self.where}.markers: labels, but {corpus.path} has no annotation label: it "
                f"is running text; mine pairs with en, zh or a file of markers"
            )
        finder = self._finder(corpus)
        last = self.class_count - 1 if self.unmarked else -1
        parts = list(mine(corpus, finder, sentences, shortest=self.shortest, unmarked=last))
        table = np.concatenate([np.empty((0, 5), np.int64), *parts])
        marked = int((table[:, 4] != last).sum())
        return table, (
            f"{corpus.manifest.sentences} sentences, {marked} begin with one of "
            f"{sum(map(len, self.marker_classes))} markers (`markers: {self.markers}`) and have "
            f"{self.shortest} tokens or more, as has the sentence before"
        )


def _check_labels(
    names: Sequence[str], corpus: Corpus, where: str, classes: int, known: _Numbered
) -> None:
    """Raises UserError for a corpus with more labels than classes, or whose numbers are of other
    labels than another's."""
    if len(names) > classes:
        raise UserError(f"{where}.classes: {classes}, but {corpus.path} has {len(names)} labels")
    path, others = known.setdefault("first", (corpus.path, names))
    for number, (here, there) in enumerate(zip(names, others, strict=False)):
        if here != there:
            raise UserError(
                f"{where}.markers: labels, but number {number} is {here!r} in {corpus.path} and "
                f"{there!r} in {path}; give the names, in a file of markers"
            )
