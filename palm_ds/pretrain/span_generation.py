"""Write fragments of a passage from the rest of it (ERNIE-GEN: Xiao et al. 2020, sections 3.2 to
3.4).

    passage   a b c d e f g h i j      fragments  c d, h
    source    [CLS] a b e f g i j [SEP]
    target    [CLS] c d h [SEP]        in the order of the passage, joined

One of several distributions of fragment lengths is drawn for each passage (multi-granularity target
sampling): short fragments teach words in their context, long ones how to continue a text. Fragments
are drawn until they hold the share `rate` of the passage.

Both flows are trained: word by word, and span by span. The spans are the entities, phrases and
words of the corpus. The paper takes n-grams of up to three words whose t-statistic is high, from a
list; the phrases of a corpus are mined from it too, by normalized mutual information. A span ends
where its fragment does.

The flows, and where the paper and ERNIE's code differ: data/tasks/generation_flows.py. Baidu has
not released its pretraining code; the default lengths, their probabilities and the share have not
been checked against the paper. Fragments here may begin and end within a word.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.common.settings import InnerShare, Share
from palm_ds.data.sources.corpus import CorpusSource, passages
from palm_ds.data.tasks.example import Example, build_input, layouts, select_tokens
from palm_ds.data.tasks.generation_flows import FlowOptions, same_head
from palm_ds.data.tasks.masking import Unit, unigram_baseline, units_of
from palm_ds.data.tasks.task import CorpusTask, Task

SHORTEST = 8
"""Tokens of the shortest passage."""
_SPECIALS = 4  # [CLS] source [SEP] [CLS] target [SEP]


@dataclass(frozen=True, kw_only=True)
class SpanGeneration(FlowOptions, CorpusTask):
    rate: InnerShare = 0.25
    """Share of a passage that is its target."""
    shortest: tuple[int, ...] = (1, 4)
    """Tokens of the shortest fragment of each distribution of lengths."""
    longest: tuple[int, ...] = (4, 32)
    """Tokens of the longest fragment of each distribution; lengths in between are equally
    likely."""
    chosen: tuple[Share, ...] = (0.4, 0.6)
    """Probability of each distribution."""
    units: tuple[Unit, ...] = ("word", "phrase", "entity")
    """What a span may be: a token belongs to the largest unit listed here that covers it, or is a
    span by itself."""
    noise_rate: Share = 0.05
    """Share of the target tokens in the context that are replaced."""
    word_weight: Share = 0.5
    """Weight of the word-by-word flow in the loss; the span-by-span flow has the rest."""

    attends_partially = True
    segments = 2
    num_uniforms = 0

    @property
    def displaces(self) -> bool:
        return True

    def __post_init__(self) -> None:
        super().__post_init__()
        where = self.where
        self.check_flows(where)
        if not len(self.shortest) == len(self.longest) == len(self.chosen) > 0:
            raise UserError(f"{where}: give shortest, longest and chosen for each distribution")
        for low, high in zip(self.shortest, self.longest, strict=True):
            if not 1 <= low <= high:
                raise UserError(f"{where}: no fragment has {low} to {high} tokens")
        if not np.isclose(sum(self.chosen), 1):
            raise UserError(f"{where}.chosen: {self.chosen} are not probabilities, whose sum is 1")

    def annotations(self) -> tuple[str, ...]:
        return tuple(unit for unit in self.units if unit != "token")

    def required_units(self) -> tuple[str, ...]:
        return self.annotations()

    def check(self, source: CorpusSource, max_length: int) -> None:
        self.check_vocabulary(source.vocabulary, self.where)
        if self._room(max_length) < SHORTEST:
            raise UserError(
                f"{self.where}: rows of {max_length} tokens have no room for a passage of "
                f"{SHORTEST} with its queries; raise `length`"
            )

    def with_head_of(self, origin: Task) -> Task:
        same_head(self, origin, self.where)
        return self

    def _target(self, tokens: np.ndarray) -> np.ndarray:
        """The target tokens of passages, special ones excluded."""
        return np.maximum(np.rint(tokens * self.rate).astype(np.int64), 1)

    def _added(self, target: np.ndarray) -> np.ndarray:
        """By how many tokens an example is longer than its passage."""
        return _SPECIALS + self.query_count(target + 2)

    def _room(self, max_length: int) -> int:
        """The tokens of the longest passage whose example fits."""
        tokens = np.arange(1, max_length)
        fits = tokens + self._added(self._target(tokens)) <= max_length
        return int(tokens[fits].max(initial=0))

    def items(self, source: CorpusSource, max_length: int) -> np.ndarray:
        """(passages, 3) start, end, start of the document."""
        spans = passages(source, self._room(max_length))
        return spans[spans[:, 1] - spans[:, 0] >= SHORTEST]

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: CorpusSource, max_length: int
    ) -> np.ndarray:
        """The `end` of the passage, and the tokens of its `target`. With more room the source
        begins earlier in the document."""
        start, end, document = items.T
        target = self._target(end - start)
        length = end - start + self._added(target)
        spare = np.minimum(max_length - length, start - document)
        return layouts(length, spare, end=end, target=target)

    def example(self, layout: np.void, source: CorpusSource, rng: np.random.Generator) -> Example:
        budget, end = int(layout["target"]), int(layout["end"])
        start = end - int(layout["length"] - self._added(layout["target"]))
        passage, vocabulary = source.read(start, end), source.vocabulary
        way = rng.choice(len(self.chosen), p=self.chosen)
        fragment = draw_fragments(len(passage), budget, self.shortest[way], self.longest[way], rng)
        inside = fragment >= 0
        whole = build_input([passage], vocabulary)
        kept = np.concatenate([[True], ~inside, [True]])
        end = self.end_token(vocabulary)
        target = np.concatenate([[vocabulary.cls], passage.ids[inside], [end]])
        units = units_of(whole, self.annotations())[1:-1]
        parts = np.column_stack([fragment[inside], units[inside]])
        begins = np.append((np.diff(parts, axis=0) != 0).any(1), True)  # the last: [SEP]
        spans = np.concatenate([[0], np.cumsum(begins)])
        example, labels = self.assemble(select_tokens(whole, kept), target, spans, vocabulary, rng)
        example.labels[self.name] = labels
        return example

    def baseline(self, targets: np.ndarray, source: CorpusSource) -> tuple[np.ndarray, np.ndarray]:
        """The corpus's unigram frequencies."""
        return unigram_baseline(targets, source.unigrams)


def draw_fragments(
    tokens: int, budget: int, shortest: int, longest: int, rng: np.random.Generator
) -> np.ndarray:
    """(tokens,) the number of the fragment that each token is in, ascending, -1 for none. `budget`
    tokens are in fragments of `shortest` to `longest` tokens, the last one drawn perhaps of fewer;
    their places are random, with a token or more between two of them where there are enough."""
    most = -(-budget // shortest)
    ends = np.minimum(np.cumsum(rng.integers(shortest, longest + 1, most)), budget)
    sizes = np.diff(ends[: int(np.searchsorted(ends, budget)) + 1], prepend=0)
    sizes = rng.permutation(sizes)
    rest = tokens - budget
    gaps = np.sort(rng.choice(rest + 1, len(sizes), replace=len(sizes) > rest + 1))
    numbers = np.full(tokens, -1)
    firsts = gaps + np.cumsum(sizes) - sizes
    for number, (first, size) in enumerate(zip(firsts.tolist(), sizes.tolist(), strict=True)):
        numbers[first : first + size] = number
    return numbers
