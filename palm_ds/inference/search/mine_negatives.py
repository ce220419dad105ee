"""Hard negatives of queries: near texts that are no answers.

    query ──> the nearest passages, without its positives, copies of them, and the query itself
          ──> ranks from `range_min` to `range_max` ──> (scored again by a head)
          ──> without those too close to the positive, which may be unmarked answers
          ──> the best ones, or some of them by chance

The margins are those of NV-Retriever (Moreira et al. 2024, arXiv 2407.15831, section 3), and all
options have the names of sentence-transformers' `mine_hard_negatives`. Of several positives of a
query the one with the lowest score counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from palm_ds.common.errors import UserError
from palm_ds.common.rng import derive_key, keyed_generator
from palm_ds.common.settings import Settings, Share, one_of
from palm_ds.inference.search.ranking import best_of
from palm_ds.inference.search.vectors import unit

_PRODUCTS = 1 << 24  # cosines that are in memory together
QUERIES = 256
"""Mined together, at most."""
Embed = Callable[[Sequence[str]], np.ndarray]
"""Vectors (texts, size) of texts."""
Scorer = Callable[[Sequence[tuple[str, str]]], np.ndarray]
"""Scores (pairs,) of (query, text)."""
Scored = Sequence[tuple[str, float]]
"""Texts with their scores."""


@dataclass(frozen=True, kw_only=True)
class MiningSettings(Settings, option="--"):
    """Settings for choosing negatives."""

    num_negatives: PositiveInt = 4
    """Negatives of a row, at most."""
    range_min: NonNegativeInt = 0
    """Nearest passages to skip: the likeliest to be unmarked answers."""
    range_max: PositiveInt = 100
    """The rank of the last passage that may be chosen."""
    absolute_margin: NonNegativeFloat | None = None
    """The least by which a negative's score is below the positive's."""
    relative_margin: Share | None = None
    """The same as a share of the positive's score: 0.05 allows at most 95 % of it."""
    max_score: float | None = None
    """The highest score of a negative."""
    min_score: float | None = None
    """The lowest."""
    sampling_strategy: Annotated[str, one_of(("top", "random"))] = "top"
    """`top`: those with the highest scores; `random`: any that the limits allow."""
    seed: int = 1
    """Of `random`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.range_max - self.range_min < self.num_negatives:
            raise UserError(
                f"--range_max {self.range_max}: leaves {max(self.range_max - self.range_min, 0)} "
                f"passages after the first {self.range_min}, for {self.num_negatives} negatives"
            )

    def limits(self, positive: float) -> tuple[float, float]:
        """The lowest and the highest score of a negative, given the positive's."""
        highest = [positive - (self.absolute_margin or 0.0)] * (self.absolute_margin is not None)
        if self.relative_margin is not None:
            highest.append(positive - abs(positive) * self.relative_margin)
        if self.max_score is not None:
            highest.append(self.max_score)
        lowest = -np.inf if self.min_score is None else self.min_score
        return lowest, min(highest, default=np.inf)


@dataclass(frozen=True, kw_only=True)
class Passages:
    """Texts among which negatives are."""

    texts: Sequence[str]
    vectors: np.ndarray  # (texts, size) float32 of length 1


@dataclass(frozen=True, kw_only=True)
class MinedQuery:
    """A query with scores of its positives, and its negatives, the best first."""

    query: str
    positives: Mapping[str, float]
    negatives: Scored


@dataclass(frozen=True, kw_only=True)
class Miner:
    """Mining among some passages."""

    passages: Passages
    embed_queries: Embed
    embed_texts: Embed
    """As the passages were embedded."""
    settings: MiningSettings
    scorer: Scorer | None = None
    """Instead of cosines."""

    def mine(self, answers: Mapping[str, Sequence[str]]) -> Iterator[MinedQuery]:
        """Mine each query of {query: its positives}, in their order."""
        queries = [*answers]
        at_once = min(max(_PRODUCTS // max(len(self.passages.texts), 1), 1), QUERIES)
        for first in range(0, len(queries), at_once):
            yield from self._mined({x: answers[x] for x in queries[first : first + at_once]})

    def _mined(self, answers: Mapping[str, Sequence[str]]) -> Iterator[MinedQuery]:
        vectors = unit(self.embed_queries([*answers]))
        positives = self._positives(answers, vectors)
        near: list[Scored] = []
        for (query, own), cosines in zip(
            answers.items(), vectors @ self.passages.vectors.T, strict=True
        ):
            found = _nearest(cosines, self.passages.texts, [query, *own], self.settings.range_max)
            near.append(found[self.settings.range_min :])
        if self.scorer is not None:
            queries = [*answers]
            positives = _scored_again(self.scorer, queries, positives)
            near = _scored_again(self.scorer, queries, near)
        for query, own, others in zip(answers, positives, near, strict=True):
            negatives = chosen(query, min(score for _, score in own), others, self.settings)
            yield MinedQuery(query=query, positives=dict(own), negatives=negatives)

    def _positives(self, answers: Mapping[str, Sequence[str]], vectors: np.ndarray) -> list[Scored]:
        """The positives of each query, each once, with their cosines."""
        texts = [*dict.fromkeys(text for own in answers.values() for text in own)]
        numbers = {text: number for number, text in enumerate(texts)}
        own = unit(self.embed_texts(texts))
        return [
            [(text, float(own[numbers[text]] @ vector)) for text in dict.fromkeys(positives)]
            for positives, vector in zip(answers.values(), vectors, strict=True)
        ]


def _nearest(
    cosines: np.ndarray, texts: Sequence[str], left_out: Sequence[str], count: int
) -> list[tuple[str, float]]:
    """The nearest texts, each once, but for some and copies of them, whatever their white space."""
    most = count + len(left_out)
    while True:
        seen, found = {" ".join(text.split()) for text in left_out}, []
        for row, cosine in best_of(cosines, most):
            words = " ".join(texts[row].split())
            if words not in seen:
                seen.add(words)
                found.append((texts[row], cosine))
        if len(found) >= count or most >= len(cosines):
            return found[:count]
        most *= 2


def _scored_again(scorer: Scorer, queries: Sequence[str], texts: Sequence[Scored]) -> list[Scored]:
    """The same texts of each query with other scores."""
    pairs = [(query, x) for query, own in zip(queries, texts, strict=True) for x, _ in own]
    scores = iter(scorer(pairs).tolist() if pairs else [])
    return [[(text, next(scores)) for text, _ in own] for own in texts]


def chosen(query: str, positive: float, near: Scored, settings: MiningSettings) -> Scored:
    """The negatives of a query among near texts, the best first."""
    lowest, highest = settings.limits(positive)
    allowed = [each for each in near if lowest <= each[1] <= highest]
    allowed.sort(key=lambda each: -each[1])
    if settings.sampling_strategy == "random" and len(allowed) > settings.num_negatives:
        rng = keyed_generator(derive_key(settings.seed, "mine", query), 0)
        drawn = rng.choice(len(allowed), settings.num_negatives, replace=False)
        allowed = [allowed[number] for number in sorted(drawn)]
    return allowed[: settings.num_negatives]
