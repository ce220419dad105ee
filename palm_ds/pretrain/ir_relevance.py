"""Is this text relevant to the query? 0 strong, 1 weak, 2 irrelevant (ERNIE 2.0, section 4.2.3).

With a search engine's logs, as in the paper: a corpus of (query, title) pairs (`palm-ds prepare
--format pairs`) labelled strong (shown and clicked), weak (shown, not clicked) or random.

Without logs, *weak supervision from structure*: a heading serves as the query, and the passage
comes from its own section (0), another section of the document (1) or another document (2). This is
not the relevance of the paper, only a task of the same form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.common.rng import derive_key, permutation_at
from palm_ds.corpus.store import Corpus
from palm_ds.data.corpus_source import CorpusSource
from palm_ds.data.layout import layouts
from palm_ds.pretrain.shared import sentence_pairs

STRONG, WEAK, IRRELEVANT = range(3)
NAMES = ("strong", "weak", "irrelevant")
_LABELS = {name: number for number, name in enumerate(NAMES)} | {
    "random": IRRELEVANT,
    **{str(number): number for number in range(3)},
}
_FEWEST = 8  # tokens of a section; shorter ones are skipped
_LONGEST_QUERY = 0.3  # share of a row


@dataclass(frozen=True, kw_only=True)
class IrRelevance(sentence_pairs.PairTask):
    group: bool = False
    """Without logs: documents whose ids are equal up to the last `/` (chapters of a book, modules
    of a textbook) are the sections of one document, with their titles as headings."""
    shortest: float = 0.2
    """Without logs: a passage has a random length between this share and all of the row, or of its
    section if that is shorter."""
    repeat: int = 10
    """With logs: every class has the same number of pairs per epoch, but no pair of the rarest
    class occurs more than this many times."""

    class_names: ClassVar[Sequence[str]] = NAMES
    num_uniforms: ClassVar[int] = 3

    def __post_init__(self) -> None:
        if not 0 < self.shortest <= 1:
            raise UserError(f"tasks.{self.name}.shortest: {self.shortest} is not in (0, 1]")
        if self.repeat < 1:
            raise UserError(f"tasks.{self.name}.repeat: {self.repeat} is less than 1")

    def items(self, source: CorpusSource, max_length: int) -> np.ndarray:
        """(items, 2). With logs: ranges of the balanced pairs (sentence_pairs.balance). Without: a
        section and a class; every section occurs equally often, each time with all three
        classes."""
        if sentence_pairs.is_ready_made(source):
            return self._logged(source)[1]
        sections = self._sections(source)
        tokens = source.corpus.sentence_starts[sections[:, 2]]
        tokens = tokens - source.corpus.sentence_starts[sections[:, 1]]
        times = max(1, int(tokens.mean() / max_length))
        place = np.arange(len(sections) * times)
        order = permutation_at(derive_key("sections"), len(sections), place % len(sections))
        return np.column_stack([np.repeat(order, 3), np.tile(np.arange(3), len(order))])

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: CorpusSource, max_length: int
    ) -> np.ndarray:
        if sentence_pairs.is_ready_made(source):
            return sentence_pairs.lay_out(
                self._logged(source)[0][sentence_pairs.pick(items, uniform[:, 0])], max_length
            )
        section, label = items.T
        sections, offsets = self._sections(source), source.corpus.sentence_starts
        heading, first, last, low, high = sections[section].T
        other = _elsewhere(section, low, high, label, uniform[:, 0], len(sections))
        query = np.minimum(offsets[first] - offsets[heading], int(_LONGEST_QUERY * max_length))
        most = max_length - 3 - query
        share = self.shortest + (1 - self.shortest) * uniform[:, 1]
        start, end = _passage(sections[other, 1:3], share, most, uniform[:, 2], source)
        tokens = np.minimum(offsets[end] - offsets[start], most)
        # In free space of the row the passage gets longer within its section.
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

    def baseline(self, targets: np.ndarray, source: CorpusSource) -> tuple[np.ndarray, np.ndarray]:
        """Uniform over the classes that occur, which are balanced."""
        classes = 3
        if sentence_pairs.is_ready_made(source):
            classes = len(np.unique(self._logged(source)[0][:, 3]))
        return np.full(len(targets), np.log(classes)), np.full(len(targets), 1 / classes)

    def describe(self, source: CorpusSource) -> str:
        if sentence_pairs.is_ready_made(source):
            return f"{self.name}: {len(self._logged(source)[0])} pairs from logs"
        sections = self._sections(source)
        return (
            f"{self.name}: weak supervision from structure, not logs: {len(sections)} sections of "
            f"{len(np.unique(sections[:, 3]))} {'groups of ' if self.group else ''}documents"
        )

    def _logged(self, source: CorpusSource) -> tuple[np.ndarray, np.ndarray]:
        """The labelled pairs (sentence_pairs.labelled_pairs) in the order of
        `sentence_pairs.balance`, and the items."""
        return source.cached(f"pairs of {self}", lambda: self._balance(source))

    def _balance(self, source: CorpusSource) -> tuple[np.ndarray, np.ndarray]:
        table = sentence_pairs.labelled_pairs(source, _LABELS, f"tasks.{self.name}")
        order, items = sentence_pairs.balance(
            table[:, 3], self.repeat, derive_key("relevance pairs")
        )
        return table[order], items

    def _sections(self, source: CorpusSource) -> np.ndarray:
        """(sections, 5): the heading's sentence, the body's sentences [first, last), and the range
        [low, high) of its document's sections. Only documents with two or more sections count."""
        return source.cached(f"sections of {self}", lambda: self._find_sections(source))

    def _find_sections(self, source: CorpusSource) -> np.ndarray:
        corpus = source.corpus
        if "heading" not in corpus.annotations:
            raise UserError(
                f"tasks.{self.name}: {corpus.path} has neither labelled pairs (palm-ds prepare "
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
            hint = "" if self.group else ", or group: true if the ids of documents group them"
            raise UserError(
                f"tasks.{self.name}: {corpus.path}: the {len(source.documents)} documents of "
                f"this split have {len(found)} headings, {len(long_enough[long_enough])} with "
                f"{_FEWEST} tokens or more below; {(count >= 2).sum()} "
                f"{'groups' if self.group else 'documents'} have two such, but 2 are needed "
                f"(palm-ds prepare --title_field makes titles headings{hint})"
            )
        low, high = np.searchsorted(unit, unit), np.searchsorted(unit, unit, side="right")
        return np.column_stack([table[:, :3], low, high])


def _headed(source: CorpusSource) -> np.ndarray:
    """(headings, 4): the heading's sentence, the body's sentences [first, last), the document. A
    section ends at the next heading."""
    corpus = source.corpus
    sentence, _, last = sentence_pairs.anchors(source).T
    heading = corpus.take(corpus.sentence_starts[sentence], "heading") == 1
    at, last = sentence[heading], last[heading]
    following = np.append(at[1:], np.iinfo(np.int64).max)
    document = np.searchsorted(source.first_sentences, at, side="right") - 1
    return np.column_stack([at, at + 1, np.minimum(following, last), document])


def _grouped(source: CorpusSource) -> np.ndarray:
    """Like `_headed`, with every document that starts with a heading as one section, and groups of
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
    """(n,) the section of the passage: the heading's own, another of [low, high), or one outside.

    Sections are drawn uniformly, so that over all headings each is equally likely in every class
    and a passage alone reveals nothing."""
    sibling = low + (draw * (high - low - 1)).astype(np.int64)
    sibling = np.where(sibling < section, sibling, sibling + 1)
    stranger = (draw * (sections - (high - low))).astype(np.int64)
    stranger = np.where(stranger < low, stranger, stranger + high - low)
    return np.select([label == STRONG, label == WEAK], [section, sibling], stranger)


def _passage(
    bodies: np.ndarray, share: np.ndarray, most: np.ndarray, draw: np.ndarray, source: CorpusSource
) -> tuple[np.ndarray, np.ndarray]:
    """Whole sentences [start, end), at least one, near a random place of a body [first, last), with
    about `share` of `most` tokens, or of the body's if it has fewer."""
    first, last = bodies.T
    offsets = source.corpus.sentence_starts
    body = offsets[last] - offsets[first]
    target = (share * np.minimum(body, most)).astype(np.int64)
    place = offsets[first] + (draw * (body - target + 1)).astype(np.int64)
    before = np.clip(np.searchsorted(offsets, place, side="right") - 1, first, last - 1)
    after = np.minimum(before + 1, last - 1)
    start = np.where(offsets[after] - place < place - offsets[before], after, before)
    return start, source.sentence_end(start, last, target)
