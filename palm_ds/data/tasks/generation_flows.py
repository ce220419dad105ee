"""Examples for generation: a source, its target, and the queries that are predicted (ERNIE-GEN:
Xiao et al. 2020, arXiv 2001.11314, sections 3.1 to 3.3 and figure 3).

               source          target               word by word         span by span
    ids        [CLS] s [SEP]   [CLS] a b c [SEP]    Q  Q  Q  Q           Q  Q  Q  Q
    positions  0     1 2       3     4 5 6 7        4  5  6  7           4  5  6  7
    attends    to the source   ... and to targets   ... and to targets   ... and to targets before
                               up to itself         before its own       the span of its own
    predicts                                        a  b  c  [SEP]       a  b  c  [SEP]

With `decoder: next_token` there are no queries: each target token predicts the next, [CLS] the
first, from the source and the target up to itself (UniLM: Dong et al. 2019, section 2.3; UNIMO).

A query Q ([ATTN]) attends to itself too, and to no other query. The targets that others attend to
are noised: some are replaced, but queries predict the originals. The paper predicts each word from
[ATTN] instead of the word before it, so that a wrong word in the context, such as noise, does less
harm when texts are generated (sections 3.2 and 3.3).

Where the paper and ERNIE's code differ, or two versions of the code: as in the code of the paper
(branch `repro`), the [CLS] that begins a target is not predicted, and each target token is noised
independently; the later code (`demo/seq2seq`) predicts [CLS] as well, and noises a fixed number. A
random token here is never a special one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import NonNegativeInt

from palm_ds.common.errors import UserError
from palm_ds.common.settings import Rate, Settings, Share
from palm_ds.data.tasks.example import Example
from palm_ds.model.inputs.visibility import multi_flow
from palm_ds.text.tokens import SpecialTokens

if TYPE_CHECKING:
    from palm_ds.model.encoder.encoder import Encoder
    from palm_ds.model.heads.heads import GenerationHead

WORD, SPAN = range(2)
"""The numbers of the flows in targets."""


@dataclass(frozen=True, kw_only=True)
class FlowOptions(Settings):
    """The settings that all tasks with such examples have."""

    decoder: Literal["infilling", "next_token"] = "infilling"
    """infilling: each target token is predicted by a query (ERNIE-GEN). next_token: each is
    predicted by the token before it, without noise (UniLM, UNIMO)."""
    end: Literal["sep", "mask"] = "sep"
    """The token that ends a target: [SEP], or [MASK] (UNIMO)."""
    noise_rate: Share = 0.5
    """Share of the target tokens in the context that are replaced by noise during training."""
    noise: Literal["random", "token"] = "random"
    """The noise. random: a random token; token: [NOISE], which the vocabulary must have."""
    word_weight: Share = 1.0
    """Weight of the word-by-word flow in the loss, from 0 to 1; the span-by-span flow has the rest
    (the paper's lambda). A flow without weight has no queries."""
    query: Literal["auto", "attn", "mask"] = "auto"
    """The token of the queries: [ATTN], or [MASK] where the vocabulary has none."""
    target_segment: NonNegativeInt = 3
    """Segment of the target and its queries; the encoder's last if it has fewer."""
    positions: Literal["continuous", "restart"] = "continuous"
    """Positions. continuous: one sequence over source and target; restart: again from 0 at the
    target, and from 1 at each further source."""
    smoothing: Rate = 0.0
    """Label smoothing: share of the target probability spread over the vocabulary."""

    def check_flows(self, where: str) -> None:
        """Raises UserError, starting with `where`, for settings that contradict each other."""
        if self.decoder == "next_token" and self.word_weight < 1:
            raise UserError(
                f"{where}.word_weight: {self.word_weight:g}, but with decoder: next_token there is "
                "no span-by-span flow; set 1"
            )

    def check_vocabulary(self, vocabulary: SpecialTokens, where: str) -> None:
        """Raises UserError if the vocabulary lacks a token that the settings name."""
        if self.query == "attn" and vocabulary.attn is None:
            raise UserError(f"{where}.query: the vocabulary has no [ATTN]; use mask")
        if self.noise == "token" and vocabulary.noise is None:
            raise UserError(f"{where}.noise: the vocabulary has no [NOISE]; use random")

    @property
    def target_type(self) -> int:
        """The token type of the target and its queries."""
        return self.target_segment

    @property
    def flows(self) -> tuple[int, ...]:
        """The flows with weight."""
        return (WORD,) * (self.word_weight > 0) + (SPAN,) * (self.word_weight < 1)

    def end_token(self, vocabulary: SpecialTokens) -> int:
        """The id of the token that ends a target."""
        return vocabulary.sep if self.end == "sep" else vocabulary.mask

    def query_token(self, vocabulary: SpecialTokens) -> int | None:
        """The id of the queries; None: there are none."""
        if self.decoder == "next_token":
            return None
        own = None if self.query == "mask" else vocabulary.attn
        return vocabulary.mask if own is None else own

    def head(self, backbone: Encoder) -> GenerationHead:
        from palm_ds.model.heads.heads import GenerationHead

        weights = 2 * self.word_weight, 2 * (1 - self.word_weight)
        return GenerationHead(
            backbone,
            smoothing=self.smoothing,
            weights=weights if len(self.flows) == 2 else (),
        )

    def query_count(self, target: np.ndarray) -> np.ndarray:
        """The number of queries for targets of `target` tokens, [CLS] included."""
        return (target - 1) * (len(self.flows) if self.decoder == "infilling" else 0)

    def source_positions(self, segments: np.ndarray) -> np.ndarray:
        """(tokens,) position ids of a source with these segments."""
        at = np.arange(len(segments))
        if self.positions == "continuous":
            return at
        starts = np.flatnonzero(np.diff(segments, prepend=segments[0]))
        first = np.concatenate([[0], starts])[np.searchsorted(starts, at, side="right")]
        return at - first + (first > 0)

    def positions_of(self, source: Example) -> np.ndarray:
        """(tokens,) position ids of a source: its own, as beside an image, or by its segments."""
        if source.position_ids is not None:
            return source.position_ids
        return self.source_positions(source.token_type_ids)

    def target_begin(self, source: Example) -> int:
        """The position of the first token of a source's target."""
        return int(self.positions_of(source).max()) + 1 if self.positions == "continuous" else 0

    def assemble(
        self,
        source: Example,
        target: np.ndarray,
        spans: np.ndarray,
        vocabulary: SpecialTokens,
        rng: np.random.Generator,
    ) -> tuple[Example, tuple[np.ndarray, np.ndarray]]:
        """The example of a source and a target, and its labels.

        `target` (tokens,) begins with [CLS]; `spans` (tokens - 1,) is the number of the span that
        each further token belongs to, ascending from 0. Labels of two flows have two columns: the
        token, and the flow."""
        size, many = len(source), len(target)
        seen = {WORD: np.arange(1, many), SPAN: 1 + np.searchsorted(spans, spans)}
        query = self.query_token(vocabulary)
        limits = [] if query is None else [seen[flow] for flow in self.flows]
        queries = np.full((many - 1) * len(limits), query or 0, np.int64)
        places = self.target_begin(source) + np.arange(many)
        added = many + len(queries)
        example = Example(
            input_ids=np.concatenate([source.input_ids, target, queries]),
            token_type_ids=np.append(source.token_type_ids, np.full(added, self.target_type)),
            source_offsets=np.append(source.source_offsets, np.full(added, -1)),
            annotations={
                name: np.append(values, np.zeros(added, values.dtype))
                for name, values in source.annotations.items()
            },
            item=source.item,
            position_ids=np.concatenate(
                [self.positions_of(source), places, *[places[1:]] * len(limits)]
            ),
            regions=source.regions,
            image=source.image,
            visibility=multi_flow(size, many, limits),
        )
        if query is None:
            return example, (np.arange(size, size + many - 1), target[1:])
        context = slice(size + 1, size + many)
        example.input_ids[context] = self._noised(target[1:], vocabulary, rng)
        where = np.arange(size + many, size + added)
        return example, (where, self._targets(target[1:]))

    def _targets(self, tokens: np.ndarray) -> np.ndarray:
        """Of all queries, in order."""
        if len(self.flows) == 1:
            return tokens
        return np.concatenate(
            [np.column_stack([tokens, np.full(len(tokens), f)]) for f in self.flows]
        )

    def _noised(
        self, tokens: np.ndarray, vocabulary: SpecialTokens, rng: np.random.Generator
    ) -> np.ndarray:
        draws = rng.random(len(tokens))
        other = vocabulary.regular[rng.integers(len(vocabulary.regular), size=len(tokens))]
        if self.noise == "token":
            assert vocabulary.noise is not None, "checked before the run"
            other = np.full(len(tokens), vocabulary.noise)
        return np.where(draws < self.noise_rate, other, tokens)


def random_spans(tokens: int, most: int, rng: np.random.Generator) -> np.ndarray:
    """(tokens,) the numbers of spans of 1 to `most` tokens, equally likely."""
    return np.repeat(np.arange(tokens), rng.integers(1, most + 1, tokens))[:tokens]


def same_head(own: FlowOptions, origin: object, where: str) -> None:
    """Raises UserError unless `origin`, whose head is shared, writes texts too."""
    if not isinstance(origin, FlowOptions):
        raise UserError(f"{where}.share: {getattr(origin, 'name', '')!r} does not write texts")
    if own.smoothing != origin.smoothing or own.word_weight != origin.word_weight:
        raise UserError(
            f"{where}.share: `smoothing` and `word_weight` must be those of the task whose head is "
            "shared"
        )
