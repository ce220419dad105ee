"""Is this text relevant to the query? 0 strong, 1 weak, 2 irrelevant (ERNIE 2.0, section 4.2.3).

With a search engine's logs, as in the paper: a corpus of (query, title) pairs (`palm-ds prepare
--format pairs`) labeled strong (shown and clicked), weak (shown, not clicked) or random.

Without logs, *weak supervision from structure*: a heading serves as the query, and the passage
comes from its own section (0), another section of the document (1) or another document (2). This is
not the relevance of the paper, only a task of the same form.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pydantic import PositiveInt

from palm_ds.common.errors import UserError
from palm_ds.common.messages import counted
from palm_ds.common.rng import derive_key, permutation_at
from palm_ds.common.settings import PositiveShare
from palm_ds.corpus.store import Corpus
from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.tasks.example import layouts
from palm_ds.pretrain.shared import sentence_pairs

STRONG, WEAK, IRRELEVANT = range(3)
NAMES = ("strong", "weak", "irrelevant")
_LABELS = {name: number for number, name in enumerate(NAMES)} | {
    "random": IRRELEVANT,
    **{str(number): number for number in range(3)},
}
_MIN_TOKENS = 8  # tokens of a section; shorter ones are skipped
_MAX_QUERY_SHARE = 0.3  # share of a row


@dataclass(frozen=True, kw_only=True)
class IrRelevance(sentence_pairs.PairTask):
    group: bool = False
    """Without logs: documents whose ids are equal up to the last `/` (chapters of a book, modules
    of a textbook) are the sections of one document, with their titles as headings."""
    shortest: PositiveShare = 0.2
    """Without logs: a passage has a random length between this share and all of the row, or of its
    section if that is shorter."""
    repeat: PositiveInt = 10
    """With logs: every class has the same number of pairs per epoch, but no pair of the rarest
    class occurs more than this many times."""

    labels = NAMES
    num_uniforms = 3

    def check(self, source: CorpusSource, max_length: int) -> None:
        if sentence_pairs.is_ready_made(source):
            return
        units = len(np.unique(self._sections(source)[:, 3]))
        if units < 2:
            hint = "" if self.group else ", or group: true if the ids of documents group them"
            raise UserError(
                f"{self.where}: {source.corpus.path}: {self._describe_headings(source)}; "
                f"{counted(units, 'group' if self.group else 'document')} with two such, but 2 are "
                f"needed (palm-ds prepare --title_field makes titles headings{hint})"
            )

    def items(self, source: CorpusSource, max_length: int) -> np.ndarray:
        """(items, 2). With logs: ranges of the balanced pairs (sentence_pairs.balance). Without: a
        section, by its heading's sentence, and a class; every section occurs equally often, each
        time with all three classes."""
        if sentence_pairs.is_ready_made(source):
            return self._logged(source)[1]
        headings, times = self._sections(source)[:, 0], self._times(source.reference, max_length)
        place = np.arange(len(headings) * times) % max(len(headings), 1)
        order = permutation_at(derive_key("sections"), len(headings), place)
        return np.column_stack([np.repeat(headings[order], 3), np.tile(np.arange(3), len(order))])

    def _times(self, source: CorpusSource, max_length: int) -> int:
        """Number of times each section occurs in an epoch: longer ones have more passages."""
        _, first, last, _, _ = self._sections(source).T
        tokens = source.corpus.sentence_starts[last] - source.corpus.sentence_starts[first]
        return max(1, int(tokens.mean() / max_length))

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: CorpusSource, max_length: int
    ) -> np.ndarray:
        if sentence_pairs.is_ready_made(source):
            pairs = self._logged(source)[0][sentence_pairs.pick(items, uniform[:, 0])]
            return sentence_pairs.lay_out(pairs, source, max_length)
        heading, label = items.T
        sections, offsets = self._sections(source), source.corpus.sentence_starts
        section = _places(sections[:, 0], heading)
        heading, first, last, low, high = sections[section].T
        other = _elsewhere(section, low, high, label, uniform[:, 0], len(sections))
        query = np.minimum(offsets[first] - offsets[heading], int(_MAX_QUERY_SHARE * max_length))
        special = source.vocabulary.around(2)
        most = max_length - special - query
        share = self.shortest + (1 - self.shortest) * uniform[:, 1]
        start, end = _passage(sections[other, 1:3], share, most, uniform[:, 2], source)
        tokens = np.minimum(offsets[end] - offsets[start], most)
        # In free space of the row the passage gets longer within its section.
        rest = offsets[sections[other, 2]] - offsets[start]
        length = query + tokens + special
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
            f"{' in a sample of the corpus' if source.split else ''}"
            f"{self._dominant_group(sections, source) if self.group and len(sections) else ''}"
        )

    def _dominant_group(self, sections: np.ndarray, source: CorpusSource) -> str:
        """A remark if most documents are in one group: hardly any passage is from another then."""
        heading, _, _, low, high = sections[np.argmax(sections[:, 4] - sections[:, 3])].tolist()
        if 2 * (high - low) <= len(sections):
            return ""
        document = np.searchsorted(source.first_sentences, heading, side="right") - 1
        name = _group(source.corpus, int(source.documents[document]))
        return (
            f"; note: {high - low} of these {len(sections)} documents are in one group, {name!r}: "
            "ids up to the last `/` should name a book, not the whole collection"
        )

    def _logged(self, source: CorpusSource) -> tuple[np.ndarray, np.ndarray]:
        """The labeled pairs (sentence_pairs.labeled_pairs) in the order of
        `sentence_pairs.balance`, and the items."""
        return source.cached(f"pairs of {self}", lambda: self._balance(source))

    def _balance(self, source: CorpusSource) -> tuple[np.ndarray, np.ndarray]:
        table, key = self._labeled(source), derive_key("relevance pairs")
        if source.split:
            blocks = source.block_numbers[source.document_of(table[:, 0])]
            rates = self._rates(source.reference)
            order, items = sentence_pairs.balance_blocks(table[:, 3], blocks, rates, key)
        else:
            order, items = sentence_pairs.balance(table[:, 3], self.repeat, key)
        return table[order], items

    def _labeled(self, source: CorpusSource) -> np.ndarray:
        return sentence_pairs.labeled_pairs(source, _LABELS, self.where)

    def _rates(self, sample: CorpusSource) -> np.ndarray:
        """(classes,) items per pair of a large corpus, from a sample of it."""

        def find() -> np.ndarray:
            counts = np.bincount(self._labeled(sample)[:, 3], minlength=self.class_count)
            return sentence_pairs.item_rates(counts, self.repeat)

        return sample.cached(f"rates of {self}", find)

    def _sections(self, source: CorpusSource) -> np.ndarray:
        """(sections, 5): the heading's sentence, the body's sentences [first, last), and the range
        [low, high) of its document's sections. Only documents with two or more sections count."""
        return source.cached(f"sections of {self}", lambda: self._find_sections(source))

    def _find_sections(self, source: CorpusSource) -> np.ndarray:
        headings = self._headings(source)
        table = headings[_is_long_enough(headings, source)]
        table = table[np.argsort(table[:, 3], kind="stable")]
        block = source.block_numbers[source.document_of(source.corpus.sentence_starts[table[:, 0]])]
        _, unit, count = np.unique(
            np.column_stack([table[:, 3], block]), axis=0, return_inverse=True, return_counts=True
        )
        table = table[count[unit.ravel()] >= 2]
        low = np.searchsorted(table[:, 3], table[:, 3])
        high = np.searchsorted(table[:, 3], table[:, 3], side="right")
        return np.column_stack([table[:, :3], low, high])

    def _headings(self, source: CorpusSource) -> np.ndarray:
        """(headings, 4): the heading's sentence, the body's sentences [first, last), and the number
        of its document or group."""
        corpus = source.corpus
        if "heading" not in corpus.annotations:
            raise UserError(
                f"{self.where}: {corpus.path} has neither labeled pairs (palm-ds prepare "
                f"--format pairs) nor the annotation heading (palm-ds corpus annotate "
                f"{corpus.path} INPUT... --annotation heading)"
            )
        return _grouped(source) if self.group else _headed(source)

    def _describe_headings(self, source: CorpusSource) -> str:
        headings = self._headings(source)
        return (
            f"{counted(len(source.documents), 'document')} of this split with "
            f"{counted(len(headings), 'heading')}, "
            f"{_is_long_enough(headings, source).sum()} with {_MIN_TOKENS} tokens or more below"
        )


def _is_long_enough(headings: np.ndarray, source: CorpusSource) -> np.ndarray:
    """(headings,) bool: the body has some tokens."""
    starts = source.corpus.sentence_starts
    return starts[headings[:, 2]] - starts[headings[:, 1]] >= _MIN_TOKENS


def _places(values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The places of some of the `values`, which are distinct."""
    order = np.argsort(values)
    return order[np.searchsorted(values, wanted, sorter=order)]


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
