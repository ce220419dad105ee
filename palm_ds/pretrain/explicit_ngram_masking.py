"""Predict whole n-grams, each at one place (ERNIE-Gram: Xiao et al. 2021, arXiv 2010.12148,
sections 3.1 to 3.4).

    text            the new york times is sold here        new york times: an n-gram of the lexicon
    explicit        the [M] is [M] here                    [M] predicts its segment
    comprehensive   ... and behind the text the queries    [M1] [M2] [M3]   [M1]
                    with the place of their [M] each       predict new, york, times and sold
    relation        the |los angeles| is |sold| here       a generator's segments instead of [M];
                    which of all these is the original one?

A text is cut into the fewest segments by a lexicon (`palm-ds corpus ngrams`), and a share of the
segments is drawn. Each becomes one place, so the text gets shorter. What it was is predicted among
all tokens and n-grams (coarse); with `comprehensive` its tokens are predicted too, among tokens, by
queries that attend to the text and themselves, and that nothing attends to (fine). With `relation`
a generator that is trained at the same time fills in segments, each at one place; the encoder
predicts the original ones, and for every place of the text whether it is the original one. The
tables over n-grams and the generator are not part of the weights of a finished run.

Baidu has not released its pretraining code. Our choices, which could not be checked against
the paper: a drawn segment is always shown as [MASK]; losses have equal weights; an n-gram in a text
has the embedding that it is predicted with; the generator shares the embeddings. The number of
segments to draw follows from a text's tokens and the mean size of the corpus's segments, so that
the share is exact on average and lengths are known before a text is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from pydantic import NonNegativeFloat, PositiveFloat

from palm_ds.common.errors import UserError
from palm_ds.common.files import fingerprint
from palm_ds.common.settings import InnerShare, PositiveShare
from palm_ds.data.sources.corpus import CorpusSource, passages
from palm_ds.data.tasks.example import Example, build_input, layouts
from palm_ds.data.tasks.masking import unigram_baseline
from palm_ds.data.tasks.task import CorpusTask
from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.heads.heads import further_loss
from palm_ds.model.heads.ngrams import (
    FINE,
    REPLACED,
    NgramGenerator,
    NgramHead,
    extend_embeddings,
    ngram_id,
)
from palm_ds.model.heads.replaced_tokens import GeneratorSizes, detection_scores, generator_name
from palm_ds.model.inputs.visibility import multi_flow
from palm_ds.text.ngrams import SINGLE, NgramLexicon, read_ngrams

SHORTEST = 4
"""Tokens of the shortest passage."""
_MOST_KEY = 2**63 - 1
_SPECIALS = 2  # [CLS] and [SEP]


@dataclass(frozen=True, kw_only=True)
class RelationSettings(GeneratorSizes):
    """The generator, and how it samples."""

    width: PositiveShare = 1 / 3
    """Its hidden size, inner size and attention heads as a share of the encoder's, unless they are
    given; a third as in the paper."""
    temperature: PositiveFloat = 1.0
    """The generator's scores are divided by it before segments are sampled."""


@dataclass(frozen=True, kw_only=True)
class ExplicitNgramMasking(CorpusTask):
    lexicon: str = ""
    """The file of n-grams, written by `palm-ds corpus ngrams`."""
    rate: InnerShare = 0.15
    """Share of the segments to predict."""
    comprehensive: bool = True
    """Whether the tokens of these segments are predicted too, by queries behind the text. Not with
    encoders that have sliding-window attention."""
    relation: RelationSettings | None = None
    """Replace segments by those of a generator, and tell them from the original ones: the sizes of
    the generator, as in `{width: 0.5}`; `{}`: a third of the encoder's width. Default: segments are
    shown as [MASK]."""
    fine_weight: NonNegativeFloat = 1.0
    """Weight of the loss of the segments' tokens, times `weight`, the weight of the loss of
    segments."""
    generator_weight: NonNegativeFloat = 1.0
    """Weight of the generator's loss, times `weight`."""
    discriminator_weight: NonNegativeFloat = 1.0
    """Weight of the loss of telling generated segments from original ones, times `weight`."""

    changes_encoder = True
    labels_last = True
    shortens = True
    num_uniforms = 1
    head_settings = ("lexicon", "comprehensive", "relation")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lexicon:
            raise UserError(
                f"{self.where}.lexicon: give the file that `palm-ds corpus ngrams` writes"
            )

    without_displacement = ", or set comprehensive: false"

    @classmethod
    def labels_others(cls) -> bool:
        """Its labels need texts with segments at one place."""
        return False

    @property
    def attends_partially(self) -> bool:  # type: ignore[override]
        return self.comprehensive

    @property
    def displaces(self) -> bool:
        return self.comprehensive

    @property
    def fine(self) -> str:
        """The loss of the tokens of segments."""
        return further_loss(self.name, FINE)

    @property
    def replaced(self) -> str:
        """The loss of telling sampled segments from original ones."""
        return further_loss(self.name, REPLACED)

    def loss_weights(self) -> dict[str, float]:
        weights = {self.name: self.weight}
        if self.comprehensive:
            weights[self.fine] = self.weight * self.fine_weight
        if self.relation:
            weights[self.replaced] = self.weight * self.discriminator_weight
            weights[generator_name(self.name)] = self.weight * self.generator_weight
        return weights

    # ---- the lexicon ----

    @cached_property
    def _opened(self) -> tuple[NgramLexicon, str]:
        return _open_lexicon(self.lexicon, self.path_of("lexicon"))

    @property
    def ngrams(self) -> NgramLexicon:
        """The lexicon. Raises UserError if its file cannot be read."""
        return self._opened[0]

    def file_contents(self) -> Mapping[str, str]:
        return {self.lexicon: fingerprint(self.ngrams.ngrams)}

    def _statistics(self, source: CorpusSource) -> SegmentStatistics:
        return _segment_statistics(source, self.ngrams, self.lexicon)

    def check(self, source: CorpusSource, max_length: int) -> None:
        where, tokenizer = self.path_of("lexicon"), self._opened[1]
        if source.corpus.manifest.tokenizer["fingerprint"] != tokenizer:
            raise UserError(
                f"{where}: {self.lexicon} has n-grams of another tokenizer than {source.name}; "
                f"`palm-ds corpus ngrams {source.name} {self.lexicon}` makes it again"
            )
        if self.ngrams.largest_id >= source.vocabulary.size:
            raise UserError(
                f"{where}: {self.lexicon} has token {self.ngrams.largest_id}, but {source.name} "
                f"has {source.vocabulary.size} tokens"
            )
        if self._room(source, max_length) < SHORTEST:
            raise UserError(
                f"{self.where}: rows of {max_length} tokens have no room for a passage of "
                f"{SHORTEST}; raise `length`"
            )

    def describe(self, source: CorpusSource) -> str:
        return (
            f"{self.name}: {len(self.ngrams):,} n-grams of at most {self.ngrams.longest} tokens; "
            f"segments have {self._statistics(source).mean_tokens:.2f} tokens on average"
        )

    # ---- examples ----

    def _drawn(self, tokens: np.ndarray, source: CorpusSource) -> np.ndarray:
        """How many segments are drawn, on average, of texts with these numbers of tokens."""
        return tokens * self.rate / self._statistics(source).mean_tokens

    def _room(self, source: CorpusSource, max_length: int) -> int:
        """The tokens of the longest passage whose example fits."""
        tokens = np.arange(max_length)
        most = np.maximum(np.ceil(self._drawn(tokens, source)), 1) if self.comprehensive else 0
        return int(tokens[tokens + _SPECIALS + most <= max_length].max(initial=0))

    def items(self, source: CorpusSource, max_length: int) -> np.ndarray:
        """(passages, 3) start, end, start of the document."""
        spans = passages(source, max(self._room(source, max_length), SHORTEST))
        return spans[spans[:, 1] - spans[:, 0] >= SHORTEST]

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: CorpusSource, max_length: int
    ) -> np.ndarray:
        """The `end` of the passage, and how many segments are `drawn`: a random one of the two
        numbers next to their mean. Of n tokens in k drawn segments k places are left, and behind
        them are n queries: the example is longer than its passage by k."""
        start, end, document = items.T
        drawn = np.floor(self._drawn(end - start, source) + uniform[:, 0]).astype(np.int64)
        drawn = np.maximum(drawn, 1)
        length = end - start + _SPECIALS + (drawn if self.comprehensive else 0)
        spare = np.minimum(max_length - length, start - document)
        return layouts(length, spare, end=end, drawn=drawn)

    def example(self, layout: np.void, source: CorpusSource, rng: np.random.Generator) -> Example:
        """The text and its queries; shorter than the layout where segments become one place but
        there are no queries, or where the text has fewer segments than are to be drawn."""
        drawn, end = int(layout["drawn"]), int(layout["end"])
        tokens = int(layout["length"]) - _SPECIALS - (drawn if self.comprehensive else 0)
        piece = source.read(end - tokens, end)
        segments = _segments_of(piece.ids, self.ngrams)
        many = len(segments.ids)
        chosen = np.zeros(many, bool)
        chosen[rng.choice(many, min(drawn, many), replace=False)] = True
        kept = ~np.repeat(chosen, segments.sizes)
        kept[segments.first[chosen]] = True  # the place of the segment
        original = np.asarray(piece.ids, np.int64).copy()
        original[segments.first] = np.where(chosen, segments.ids, original[segments.first])
        where = 1 + np.searchsorted(np.flatnonzero(kept), segments.first[chosen])
        text = build_input([piece], source.vocabulary)
        inside = np.concatenate([[True], kept, [True]])
        ids = text.input_ids[inside]
        ids[where] = source.vocabulary.mask
        offsets = text.source_offsets[inside]
        offsets[where] = -1  # other tasks label tokens, which a segment may not be
        example = Example(
            input_ids=ids,
            token_type_ids=text.token_type_ids[inside],
            source_offsets=offsets,
            annotations={name: values[inside] for name, values in text.annotations.items()},
        )
        if self.comprehensive:
            covered = np.repeat(chosen, segments.sizes)
            example = self._with_queries(example, where, segments.sizes[chosen], piece.ids[covered])
        self._label_segments(example, where, original[kept][where - 1], rng)
        return example

    def _with_queries(
        self, text: Example, where: np.ndarray, sizes: np.ndarray, tokens: np.ndarray
    ) -> Example:
        """The text with a query for each token of the segments at `where`; a segment's n-th has the
        n-th mask symbol, and the place of the segment."""
        order = np.arange(len(tokens)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        size, nothing = len(text), np.zeros(len(tokens), np.int64)
        example = Example(
            input_ids=np.concatenate([text.input_ids, ngram_id(len(self.ngrams) + order)]),
            token_type_ids=np.concatenate([text.token_type_ids, nothing]),
            source_offsets=np.concatenate([text.source_offsets, nothing - 1]),
            annotations={
                name: np.append(values, nothing.astype(values.dtype))
                for name, values in text.annotations.items()
            },
            position_ids=np.concatenate([np.arange(size), np.repeat(where, sizes)]),
            visibility=multi_flow(size, 0, [nothing]),
        )
        example.labels[self.fine] = size + np.arange(len(tokens)), np.asarray(tokens, np.int64)
        return example

    def _label_segments(
        self, example: Example, where: np.ndarray, targets: np.ndarray, rng: np.random.Generator
    ) -> None:
        """Add the labels of a text with masked places `where` of these segments."""
        example.unmasked_ids[where] = targets
        example.labels[self.name] = where, targets
        if self.relation:
            keys = rng.integers(_MOST_KEY, size=len(where))
            example.labels[generator_name(self.name)] = where, np.column_stack([targets, keys])

    def label(self, example: Example, source: CorpusSource, rng: np.random.Generator) -> None:
        """Ask about every place of the text that no other task has masked."""
        if self.relation:
            asked = (example.source_offsets >= 0) & (example.input_ids == example.unmasked_ids)
            asked[example.labels[self.name][0]] = True
            where = np.flatnonzero(asked)
            example.labels[self.replaced] = where, example.unmasked_ids[where]

    def own_token(self, number: int) -> str | Sequence[int]:
        place = ngram_id(number) - len(self.ngrams)
        return f"[M{place + 1}]" if place >= 0 else self.ngrams.ngrams[place]

    # ---- the model ----

    def head(self, backbone: Encoder) -> NgramHead:
        lexicon, generator = self.ngrams, None
        symbols = lexicon.longest if self.comprehensive else 0
        extend_embeddings(backbone, len(lexicon) + symbols, self.where)
        if self.relation:
            config = self.relation.config(backbone.config, self.path_of("relation"))
            temperature = self.relation.temperature
            generator = NgramGenerator(
                config, backbone, ngrams=len(lexicon), temperature=temperature
            )
        return NgramHead(backbone, ngrams=len(lexicon), symbols=symbols, relation=generator)

    def baseline_of(
        self, loss: str, targets: np.ndarray, source: CorpusSource
    ) -> tuple[np.ndarray, np.ndarray]:
        """Of segments: the frequencies of the corpus's segments. Of their tokens: the unigram
        frequencies. That of the discriminator depends on what was sampled (`tallied`)."""
        if loss == self.replaced:
            return super().baseline(targets, source)
        if loss == self.fine:
            return unigram_baseline(targets, source.unigrams)
        ids = targets[:, 0] if targets.ndim > 1 else targets
        places = _places_of(ids, source.vocabulary.size)
        return unigram_baseline(places, self._statistics(source).frequency)

    def tallied(self, tallies: Mapping[str, float]) -> dict[str, Any]:
        return detection_scores(tallies)


@dataclass(frozen=True)
class Segments:
    """The segments of a text."""

    first: np.ndarray
    """(segments,) the first token of each, ascending"""
    sizes: np.ndarray
    """(segments,) tokens of each"""
    ids: np.ndarray
    """(segments,) int64: its token, or below 0 its n-gram (model/heads/ngrams.py)"""


@dataclass(frozen=True)
class SegmentStatistics:
    """What the segments of a corpus are like, of a sample of it."""

    mean_tokens: float
    """Tokens of a segment."""
    frequency: np.ndarray
    """(tokens + n-grams,) relative frequencies, one added to each count: the unigram baseline."""


def _open_lexicon(path: str, where: str) -> tuple[NgramLexicon, str]:
    """The lexicon in a file, and the fingerprint of its tokenizer. Raises UserError, starting with
    `where`."""
    try:
        return read_ngrams(path)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _segments_of(ids: np.ndarray, lexicon: NgramLexicon) -> Segments:
    """The segments of a text (tokens,)."""
    first, numbers = lexicon.cut(ids)
    own = np.where(numbers == SINGLE, np.asarray(ids, np.int64)[first], ngram_id(numbers))
    return Segments(first, np.diff(first, append=len(ids)), own)


def _places_of(ids: np.ndarray, tokens: int) -> np.ndarray:
    """The places of segments in a joined vocabulary: `tokens` tokens, then the n-grams."""
    return np.where(ids < 0, tokens + ngram_id(ids), ids)


def _segment_statistics(
    source: CorpusSource, lexicon: NgramLexicon, path: str
) -> SegmentStatistics:
    """Those of a source or, if it is a window of a large corpus, of its first window."""
    source = source.reference

    def count() -> SegmentStatistics:
        tokens, size = 0, source.vocabulary.size
        counts = np.ones(size + len(lexicon))
        for piece in source.sample(()):
            ids = _segments_of(piece.ids, lexicon).ids
            counts += np.bincount(_places_of(ids, size), minlength=len(counts))
            tokens += len(piece)
        segments = counts.sum() - len(counts)
        return SegmentStatistics(tokens / max(segments, 1), counts / counts.sum())

    return source.cached(f"segments {path}", count)
