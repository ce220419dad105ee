"""Write a text from another one: summaries, titles, questions, replies (ERNIE-GEN: Xiao et al.
2020, sections 3.2 and 3.3).

    source, source_b, ...   [CLS] source [SEP] source_b [SEP]     segments 0, 1, ...
    target                  [CLS] target [SEP]                    segment 3

With `max_turns` the target is a reply, and its source the turns of a dialogue, after facts
(palm_ds/tasks/shared/generation_sources.py).

UNIMO writes texts with `decoder: next_token` and `end: mask`, without queries. With `images` the
image of a row follows its source; without a source the texts are captions.

Every token of the target, and the [SEP] that ends it, is predicted from an [ATTN] query that sees
the source and the target before it, some of which is noise. The flows, and where the paper and
ERNIE's code differ: palm_ds/data/tasks/generation_flows.py.

As in ERNIE's code, a truncated target has no [SEP], so that the model does not learn to stop there.
Of several sources the longest is truncated first; ERNIE truncates the last one.

    predictions {item: {"text", "score"}}       written by palm_ds/model/generation/generate.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt

from palm_ds.common.config import parse
from palm_ds.common.errors import UserError
from palm_ds.common.settings import Rate
from palm_ds.data.reader.regions import ImageRegions
from palm_ds.data.sources.source import unigram_frequencies
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.example import Example, layouts
from palm_ds.data.tasks.generation_flows import FlowOptions, random_spans, same_head
from palm_ds.data.tasks.interfaces import Form, StoredPrediction
from palm_ds.data.tasks.masking import unigram_baseline
from palm_ds.data.tasks.task import Task
from palm_ds.data.tasks.text_generation import GenerationLimits, TextGenerator
from palm_ds.model.generation.cached_decoder import Prompt, TargetFormat, check_generates
from palm_ds.model.generation.generate import DecodingSettings
from palm_ds.model.inputs.batch import PackedText
from palm_ds.tasks.shared.generation_sources import (
    TURNS,
    GenerationSources,
    dialogue_types,
    source_form,
)
from palm_ds.tasks.shared.image_text import IMAGE, OptionalImages
from palm_ds.tasks.shared.text_scores import check_rules, text_scores
from palm_ds.tasks.shared.text_task import SHORTEST, TextTask
from palm_ds.text.tokens import SpecialTokens

if TYPE_CHECKING:
    from palm_ds.model.encoder.encoder import Encoder
    from palm_ds.model.heads.heads import GenerationHead

SOURCES = ("source", "source_b", "source_c")
_EXAMPLES, _WIDTH = 8, 80  # texts in the report, characters of a source there


@dataclass(frozen=True, kw_only=True)
class Generation(FlowOptions, OptionalImages, TextGenerator):
    """Writes texts."""

    max_source: NonNegativeInt = 0
    """Maximum tokens of the source, with [CLS] and [SEP]; 0: what the target leaves of a row."""
    max_target: Annotated[int, Field(ge=3)] = 64
    """Maximum tokens of the target, with [CLS] and [SEP]."""
    longest_span: PositiveInt = 3
    """Maximum tokens of the random spans of the span-by-span flow, in the paper for pretraining."""
    max_turns: NonNegativeInt = 0
    """Number of last turns of a dialogue (column `turns`) to read, after the sources, which may be
    missing. 0: no dialogue. The backbone needs max_turns + 2 token types."""
    label_column: str = "target"
    """The column of the targets."""
    smoothing: Rate = 0.1
    """Label smoothing: share of the target probability spread over the vocabulary."""
    generate: DecodingSettings = field(default_factory=DecodingSettings)
    """How predictions are generated: `max_tokens`, `beams`, `length_penalty`, `no_repeat_ngram`,
    `temperature` ... (docs/generation.md). Default: greedily."""
    score: Literal["rouge", "rouge_stemmed", "bleu", "dialogue", "answers"] = "rouge"
    """Metrics. rouge: ROUGE-L, 1 and 2, then BLEU-4; rouge_stemmed: the same on stems; bleu: the
    same, with BLEU-4 first; dialogue: BLEU-1 and 2, distinct words and pairs of words; answers: F1
    and exact match as in SQuAD."""
    evaluate_rows: NonNegativeInt = 256
    """Number of rows, the first, for which evaluations in training generate texts; 0: none."""
    evaluate_beams: PositiveInt = 1
    """Number of beams in these evaluations; 1: greedy."""

    attends_partially = True
    without_displacement = ", or set decoder: next_token"
    prediction_key = "text"
    about_image = "Writes a text about an image, and about a text beside it."

    @property
    def displaces(self) -> bool:
        return self.decoder == "infilling"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_decoding(self.generate, self.where)
        check_rules(self.score, self.where)
        self.check_flows(self.where)
        if 0 < self.max_source < SHORTEST:
            raise UserError(
                f"{self.where}.max_source: {self.max_source}; it must be 0 or at least {SHORTEST}"
            )
        least, most = self.generate.min_tokens, self.generate.max_tokens or self.max_target - 1
        if least >= most:
            raise UserError(
                f"{self.where}.generate.min_tokens: {least} is not below the maximum, {most} "
                "(max_tokens, or max_target - 1)"
            )

    @property
    def segments(self) -> int:  # type: ignore[override]
        """Number of token types of its examples."""
        return dialogue_types(self.max_turns) if self.max_turns else 2

    @property
    def target_type(self) -> int:
        return 0 if self.max_turns else self.target_segment

    def columns_of(self, source: TableSource) -> tuple[str, ...]:
        """The columns of the sources, without that of turns."""
        needed = TURNS if self.max_turns else "source"
        columns = tuple(self.texts) or tuple(
            x for x in SOURCES if (x == needed and not self.images) or x in source.columns
        )
        for column in (*columns, *[TURNS] * bool(self.max_turns)):
            source.need(column, self.where)
        return columns

    def _sources(self, source: TableSource) -> GenerationSources:
        return GenerationSources(source, self.columns_of(source), self.max_turns)

    def check(self, source: TableSource, *, labeled: bool) -> None:
        super().check(source, labeled=labeled)
        if source.tokenizer is not None:
            self.check_vocabulary(source.vocabulary, self.where)

    def check_labels(self, source: TableSource) -> None:
        source.need(self.label_column, self.where)
        for item, text in enumerate(source.column(self.label_column)):
            if not isinstance(text, str) or not text.strip():
                raise UserError(f"{source.where(item)}: {self.label_column} is empty")

    def with_head_of(self, origin: Task) -> Task:
        same_head(self, origin, self.where)
        return self

    def head(self, backbone: Encoder) -> GenerationHead:
        """Raises UserError for an encoder that generates no texts, or reads no images."""
        check_generates(backbone)
        if self.images:
            self.check_encoder(backbone)
        return super().head(backbone)

    def longest_text(self, length: int) -> int:
        """The largest position plus one."""
        join = sum if self.positions == "continuous" else max
        return min(length, join([self.max_source or length, self.max_target]))

    def layout(
        self, items: np.ndarray, uniform: np.ndarray, source: TableSource, max_length: int
    ) -> np.ndarray:
        """`item`, the `tokens` (sources,) of each source, those of the `tags` of its image and of
        the `target`, and whether this `ends`: is not cut."""
        item = items[:, 0]
        words = source.encoded(self.label_column).lengths[item]
        target = np.minimum(words + 2, self.max_target)
        left = self.input_length(max_length) - target - self.query_count(target)
        beside, tags = self._beside(item, source, left)
        left = left - beside
        if (left < SHORTEST).any():
            raise UserError(
                f"{self.where}: rows of {max_length} tokens leave no room for a source next to a "
                f"target of {int(target.max())} and its queries; raise `length` or lower max_target"
            )
        sources = self._sources(source)
        tokens = sources.lengths(item, np.minimum(left, self.max_source or left))
        length = tokens.sum(1) + sources.special + beside + target + self.query_count(target)
        ends = words + 2 <= target
        return layouts(length, item=item, tokens=tokens, tags=tags, target=target, ends=ends)

    def _beside(
        self, items: np.ndarray, source: TableSource, room: int | np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(n,) the places of the images of these rows (n,), and (n,) those that are tags."""
        if not self.images:
            return np.zeros_like(items), np.zeros_like(items)
        regions, tags = self.image_lengths(items, source, room)
        return regions + tags, tags

    def _given(self, item: int, tokens: np.ndarray, tags: int, source: TableSource) -> Example:
        """The source of a row's target, with its image."""
        text = self._sources(source).example(item, tokens)
        text.position_ids = self.source_positions(text.token_type_ids)
        return self.beside_image(text, item, tags, source) if self.images else text

    def describe_rows(self, source: TableSource, max_length: int) -> str:
        items = self.items(source, max_length)
        layouts = self.layout(items, np.empty((len(items), 0)), source, max_length)
        whole = self._sources(source).whole_lengths(items[:, 0]).sum(1)
        cut = int((layouts["tokens"].sum(1) < whole).sum()), int((layouts["ends"] == 0).sum())
        named = "sources truncated", f"targets truncated to {self.max_target} tokens"
        parts = [f"{name}: {many:,}" for name, many in zip(named, cut, strict=True) if many]
        return "; ".join([f"{self.name}: {len(source):,} rows", *parts])

    def example(self, layout: np.void, source: TableSource, rng: np.random.Generator) -> Example:
        item, many, vocabulary = int(layout["item"]), int(layout["target"]), source.vocabulary
        words = source.encoded(self.label_column).read(item, 0, many - 1 - int(layout["ends"])).ids
        end = [self.end_token(vocabulary)] if layout["ends"] else []
        target = np.concatenate([[vocabulary.cls], words, end]).astype(np.int64)
        spans = random_spans(many - 1, self.longest_span, rng)
        given = self._given(item, layout["tokens"], int(layout["tags"]), source)
        example, labels = self.assemble(given, target, spans, vocabulary, rng)
        example.labels[self.name] = labels
        return example

    def input_key(self) -> str:
        return super(TextTask, self).input_key()

    def baseline(self, targets: np.ndarray, source: TableSource) -> tuple[np.ndarray, np.ndarray]:
        """Unigram baseline: token frequencies of the targets, with add-one smoothing."""
        written, size = source.encoded(self.label_column), source.vocabulary.size
        make = partial(unigram_frequencies, [written.ids], size)
        return unigram_baseline(targets, source.cached(f"unigrams {self.name}", make))

    @property
    def source_roles(self) -> tuple[str, ...]:
        return (*(self.texts or SOURCES), *[TURNS] * bool(self.max_turns))

    def form(self) -> Form:
        return self.with_image(source_form(self.source_roles, optional=self.images))

    @property
    def decoding(self) -> DecodingSettings:
        return replace(self.generate, max_tokens=self.generate.max_tokens or self.max_target - 1)

    @property
    def evaluation_decoding(self) -> DecodingSettings:
        return replace(self.decoding, beams=self.evaluate_beams, temperature=0, top_k=0, top_p=1)

    def with_decoding(self, settings: Mapping[str, Any]) -> Generation:
        given = {**asdict(self.generate), **settings}
        return replace(self, generate=parse(DecodingSettings, given, "generate"))

    def prompts(
        self, items: np.ndarray, source: TableSource, limits: GenerationLimits
    ) -> list[Prompt]:
        most, tags = self._prompt_lengths(items, source, limits)
        kept = self._sources(source).lengths(items, most)
        given = [
            self._given(int(item), tokens, int(tag), source)
            for item, tokens, tag in zip(items, kept, tags, strict=True)
        ]
        return [
            Prompt(
                source=_packed(each, limits),
                position=self.target_begin(each),
                number=int(source.numbers[each.item]),
            )
            for each in given
        ]

    def _prompt_lengths(
        self, items: np.ndarray, source: TableSource, limits: GenerationLimits
    ) -> tuple[np.ndarray, np.ndarray]:
        """(n,) maximum tokens of sources beside the longest target, and (n,) those of tags."""
        left = self.input_length(limits.length) - self.max_target
        beside, tags = self._beside(items, source, left)
        left = np.maximum(left - beside, SHORTEST)
        return np.minimum(left, self.max_source or left), tags

    def cut_sources(self, source: TableSource, limits: GenerationLimits) -> int:
        items, sources = np.arange(len(source)), self._sources(source)
        kept = sources.lengths(items, self._prompt_lengths(items, source, limits)[0])
        return int((sources.whole_lengths(items) > kept).any(1).sum())

    def target_format(self, vocabulary: SpecialTokens, limits: GenerationLimits) -> TargetFormat:
        return TargetFormat(
            begin=vocabulary.cls,
            query=self.query_token(vocabulary),
            end=self.end_token(vocabulary),
            token_type=min(self.target_type, limits.segments - 1),
        )

    def metrics(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> dict[str, float]:
        """Scores by the rules of `score`."""
        if self.label_column not in source.columns:
            return {}
        targets = source.column(self.label_column)
        written = [prediction["text"] for prediction in predictions.values()]
        return text_scores(self.score, written, [targets[item] or "" for item in predictions])

    def tables(
        self, predictions: Mapping[int, dict[str, Any]], source: TableSource
    ) -> dict[str, list[list[Any]]]:
        """Some texts, with their sources and those that were wanted."""
        columns = [*[TURNS] * bool(self.max_turns), *self.columns_of(source), IMAGE]
        given = source.column(columns[0])
        targets = source.column(self.label_column)
        some = list(predictions)[:: max(len(predictions) // _EXAMPLES, 1)][:_EXAMPLES]
        rows = [[_start(given[n]), predictions[n]["text"], targets[n] or ""] for n in some]
        return {"Texts": [["source", "written", "wanted"], *rows]} if rows else {}

    def read_prediction(self, stored: StoredPrediction) -> dict[str, Any]:
        return {**stored.values, "text": str(stored.value("text"))}


def _check_decoding(settings: object, where: str) -> None:
    """Raises UserError for what are no settings."""
    if not isinstance(settings, DecodingSettings):
        raise UserError(
            f"{where}.generate: expected palm.DecodingSettings(beams=4, ...), got {settings!r:.60}"
        )


def _packed(source: Example, limits: GenerationLimits) -> PackedText:
    """A source as the encoder reads it."""
    return PackedText(
        input_ids=source.input_ids,
        token_type_ids=np.minimum(source.token_type_ids, limits.segments - 1),
        task_id=limits.task_id,
        position_ids=source.position_ids,
        regions=source.regions,
    )


def _start(source: str | list[str] | ImageRegions) -> str:
    """The beginning of a source; of a dialogue, of its last turn."""
    if isinstance(source, ImageRegions):
        return "an image"
    text = source if isinstance(source, str) else source[-1]
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}..."
