"""Does this text answer that query? 0 strong, 1 weak, 2 irrelevant (ERNIE 2.0, section 4.2.3).

From a search engine's logs, as in the paper: a corpus of pairs query, title (`palm-ds prepare
--format pairs`) labelled strong (shown and clicked), weak (shown, not clicked), random.

Where there are no logs, *weak supervision from structure*: a heading stands for the query, and a
passage is of its own section (0), of another section of the document (1), of another document (2).
That is not the relevance of the paper, only a task of the same form.
"""

from __future__ import annotations

from dataclasses import dataclass
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

if TYPE_CHECKING:
    from torch import nn

    from palm_ds.model.encoder import Encoder

STRONG, WEAK, IRRELEVANT = range(3)
NAMES = ("strong", "weak", "irrelevant")
_LABELS = {name: number for number, name in enumerate(NAMES)} | {
    "random": IRRELEVANT,
    **{str(number): number for number in range(3)},
}
_FEWEST = 8  # tokens of a section; of a shorter one nothing can be asked
_LONGEST_QUERY = 0.3  # of the room


@dataclass(frozen=True, kw_only=True)
class IrRelevance(CorpusTask):
    group: bool = False
    """Without logs: documents whose ids are alike up to the last `/` (chapters of a book, modules
    of a textbook) are the sections of one document, headed by their titles."""
    shortest: float = 0.2
    """Without logs: a passage is drawn to be between this share and the whole of the row, or of
    its section where that is shorter."""
    repeat: int = 10
    """With logs: every class has as many pairs an epoch, but no pair of the rarest class is met
    more than so many times."""

    segments: ClassVar[int] = 2
    draws: ClassVar[int] = 3

    def __post_init__(self) -> None:
        if not 0 < self.shortest <= 1:
            raise UserError(f"tasks.{self.name}.shortest: {self.shortest} is not in (0, 1]")
        if self.repeat < 1:
            raise UserError(f"tasks.{self.name}.repeat: {self.repeat} is less than 1")

    def items(self, source: Source, room: int) -> np.ndarray:
        """(items, 2). From logs: ranges of the balanced pairs (pairs.balance). From structure: a
        section and a class; every section as often, each time with all three classes."""
        if pairs.is_ready_made(source):
            return self._logged(source)[1]
        sections = self._sections(source)
        tokens = source.corpus.sentence_starts[sections[:, 2]]
        tokens = tokens - source.corpus.sentence_starts[sections[:, 1]]
        times = max(1, int(tokens.mean() / room))
        place = np.arange(len(sections) * times)
        order = keyed.permutation_at(keyed.key("sections"), len(sections), place % len(sections))
        return np.column_stack([np.repeat(order, 3), np.tile(np.arange(3), len(order))])

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: Source, room: int
    ) -> np.ndarray:
        if pairs.is_ready_made(source):
            return pairs.lay_out(self._logged(source)[0][pairs.pick(items, uniform[:, 0])], room)
        section, label = items.T
        sections, offsets = self._sections(source), source.corpus.sentence_starts
        heading, first, last, low, high = sections[section].T
        other = _elsewhere(section, low, high, label, uniform[:, 0], len(sections))
        query = np.minimum(offsets[first] - offsets[heading], int(_LONGEST_QUERY * room))
        most = room - 3 - query
        share = self.shortest + (1 - self.shortest) * uniform[:, 1]
        start, end = _passage(sections[other, 1:3], share, most, uniform[:, 2], source)
        tokens = np.minimum(offsets[end] - offsets[start], most)
        # Free space of the row: the passage goes on within its section.
        rest = offsets[sections[other, 2]] - offsets[start]
        length = query + tokens + 3
        spare = np.minimum(most, rest) - tokens
        return layouts(
            length,
            spare,
            first=offsets[heading],
            first_tokens=query,
            second=offsets[start],
            second_tokens=rest,
            label=label,
        )

    def example(self, layout: np.void, source: Source, rng: np.random.Generator) -> Example:
        example = pairs.arrange_pair(layout, source)
        example.labels[self.name] = np.array([0]), np.array([layout["label"]])
        return example

    def head(self, backbone: Encoder) -> nn.Module:
        from palm_ds.model.heads import ClassHead

        return ClassHead(backbone.config.hidden_size, classes=3, pooled=True)

    def baseline(self, targets: np.ndarray, source: Source) -> tuple[np.ndarray, np.ndarray]:
        """Guessing among the classes there are, which are equally many."""
        classes = 3
        if pairs.is_ready_made(source):
            classes = len(np.unique(self._logged(source)[0][:, 3]))
        return np.full(len(targets), np.log(classes)), np.full(len(targets), 1 / classes)

    def class_name(self, label: int) -> str:
        return NAMES[label]

    def about(self, source: Source) -> str:
        """What a run says of the pairs it found."""
        if pairs.is_ready_made(source):
            return f"{self.name}: {len(self._logged(source)[0])} pairs from logs"
        sections = self._sections(source)
        return (
            f"{self.name}: weak supervision from structure, not logs: {len(sections)} sections of "
            f"{len(np.unique(sections[:, 3]))} {'groups of ' if self.group else ''}documents"
        )

    def _logged(self, source: Source) -> tuple[np.ndarray, np.ndarray]:
        """The labelled pairs (pairs.ready_made; their classes) in the order of `pairs.balance`,
        and the items."""
        return source.cached(f"pairs of {self}", lambda: self._balance(source))

    def _balance(self, source: Source) -> tuple[np.ndarray, np.ndarray]:
        table = pairs.ready_made(source)
        classes = pairs.classes_of_labels(source, _LABELS, f"tasks.{self.name}")
        table[:, 3] = classes[table[:, 3]]
        order, items = pairs.balance(table[:, 3], self.repeat, keyed.key("relevance pairs"))
        return table[order], items

    def _sections(self, source: Source) -> np.ndarray:
        """(sections, 5): the heading's sentence, the body's sentences [first, last), and which of
        these sections are its document's: [low, high). Only of documents with two or more."""
        return source.cached(f"sections of {self}", lambda: self._find_sections(source))

    def _find_sections(self, source: Source) -> np.ndarray:
        corpus = source.corpus
        if "heading" not in corpus.annotations:
            raise UserError(
                f"tasks.{self.name}: {corpus.path} holds neither labelled pairs (palm-ds prepare "
                f"--format pairs) nor the annotation heading (palm-ds corpus annotate "
                f"{corpus.path} INPUT... --annotation heading)"
            )
        found = _grouped(source) if self.group else _headed(source)
        starts = corpus.sentence_starts
        long_enough = starts[found[:, 2]] - starts[found[:, 1]] >= _FEWEST
        table = found[long_enough]
        table = table[np.argsort(table[:, 3], kind="stable")]
        _, unit, count = np.unique(table[:, 3], return_inverse=True, return_counts=True)
        table, unit = table[count[unit] >= 2], unit[count[unit] >= 2]
        if (count >= 2).sum() < 2:
            hint = "" if self.group else ", or group: true where the ids of documents group them"
            raise UserError(
                f"tasks.{self.name}: {corpus.path}: {len(source.documents)} documents to read "
                f"here have {len(found)} headings, {len(long_enough[long_enough])} with "
                f"{_FEWEST} tokens or more below, and {(count >= 2).sum()} "
                f"{'groups' if self.group else 'documents'} have two such; 2 are needed "
                f"(palm-ds prepare --title_field makes titles headings{hint})"
            )
        low, high = np.searchsorted(unit, unit), np.searchsorted(unit, unit, side="right")
        return np.column_stack([table[:, :3], low, high])


def _headed(source: Source) -> np.ndarray:
    """(headings, 4): the heading's sentence, the body's sentences [first, last), the document. A
    section ends where the next heading stands."""
    corpus = source.corpus
    sentence, _, last = pairs.anchors(source).T
    heading = corpus.take(corpus.sentence_starts[sentence], "heading") == 1
    at, last = sentence[heading], last[heading]
    following = np.append(at[1:], np.iinfo(np.int64).max)
    document = np.searchsorted(source.first_sentences, at, side="right") - 1
    return np.column_stack([at, at + 1, np.minimum(following, last), document])


def _grouped(source: Source) -> np.ndarray:
    """The same with every document that begins with a heading as one section, and groups of
    documents as documents."""
    heading = source.corpus.take(source.starts, "heading") == 1
    first, last = source.first_sentences[heading], source.last_sentences[heading]
    groups = [_group(source.corpus, int(number)) for number in source.documents[heading]]
    unit = np.unique(np.array(groups, dtype=str), return_inverse=True)[1]
    return np.column_stack([first, first + 1, last, unit])


def _group(corpus: Corpus, number: int) -> str:
    name = corpus.document(number, ())[0]
    return name.rpartition("/")[0] or name


def _elsewhere(
    section: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    label: np.ndarray,
    draw: np.ndarray,
    sections: int,
) -> np.ndarray:
    """(n,) the section that the passage is of: one's own, any other of [low, high), any outside.

    Sections are drawn evenly, so that over all headings each is as likely in every class and a
    passage alone says nothing."""
    sibling = low + (draw * (high - low - 1)).astype(np.int64)
    sibling = np.where(sibling < section, sibling, sibling + 1)
    stranger = (draw * (sections - (high - low))).astype(np.int64)
    stranger = np.where(stranger < low, stranger, stranger + high - low)
    return np.select([label == STRONG, label == WEAK], [section, sibling], stranger)


def _passage(
    bodies: np.ndarray, share: np.ndarray, most: np.ndarray, draw: np.ndarray, source: Source
) -> tuple[np.ndarray, np.ndarray]:
    """Whole sentences [start, end), at least one, near a drawn place of a body [first, last): some
    `share` of `most` tokens, or of the body's where it has fewer."""
    first, last = bodies.T
    offsets = source.corpus.sentence_starts
    body = offsets[last] - offsets[first]
    wanted = (share * np.minimum(body, most)).astype(np.int64)
    place = offsets[first] + (draw * (body - wanted + 1)).astype(np.int64)
    before = np.clip(np.searchsorted(offsets, place, side="right") - 1, first, last - 1)
    after = np.minimum(before + 1, last - 1)
    start = np.where(offsets[after] - place < place - offsets[before], after, before)
    return start, source.sentence_end(start, last, wanted)
