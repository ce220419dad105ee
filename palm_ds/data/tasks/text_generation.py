"""Predictions that are texts: the interface of their tasks, and their generation.

    rows ──task.prompts──> sources ──batches of equal lengths──> generate ──task.written──> {"text"}
                                                                   (palm_ds/model/generation/generate.py)

A text depends on its row and the settings alone, not on the rows it is batched with.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.interfaces import Predicts
from palm_ds.model.generation.cached_decoder import CachedDecoder, Prompt, TargetFormat, most_tokens
from palm_ds.model.generation.generate import DecodingSettings, Generated, TokenRules, generate
from palm_ds.model.multi_task_model import Model
from palm_ds.text.display import detokenize
from palm_ds.text.tokens import SpecialTokens

_MAX_HYPOTHESES = 128  # hypotheses of a batch


@dataclass(frozen=True, kw_only=True)
class GenerationLimits:
    """Limits and task id with which a task's sources are read."""

    length: int
    """Tokens of a row."""
    segments: int
    """Token types of the encoder."""
    task_id: int = 0


class TextGenerator(Predicts):
    """A task whose predictions are generated texts."""

    evaluate_rows: int

    @property
    def predicts(self) -> Literal["texts"]:
        return "texts"

    @property
    @abstractmethod
    def source_roles(self) -> Sequence[str]:
        """The columns of its sources."""

    @property
    @abstractmethod
    def decoding(self) -> DecodingSettings:
        """Settings for generating texts, with a maximum of tokens."""

    @property
    @abstractmethod
    def evaluation_decoding(self) -> DecodingSettings:
        """The same for evaluations during training, of `evaluate_rows` rows."""

    @abstractmethod
    def with_decoding(self, settings: Mapping[str, Any]) -> TextGenerator:
        """The same task with these keys of DecodingSettings. Raises UserError."""

    @abstractmethod
    def prompts(
        self, items: np.ndarray, source: TableSource, limits: GenerationLimits
    ) -> list[Prompt]:
        """The sources of rows, without their targets."""

    @abstractmethod
    def cut_sources(self, source: TableSource, limits: GenerationLimits) -> int:
        """The number of rows whose source is truncated."""

    @abstractmethod
    def target_format(self, vocabulary: SpecialTokens, limits: GenerationLimits) -> TargetFormat:
        """The tokens that frame a target."""

    def written(self, generated: Generated, source: TableSource) -> dict[str, Any]:
        """The prediction for a row."""
        text = detokenize(source.tokenizer, np.array(generated.tokens, np.int64))
        return {"text": text, "score": generated.score}


def generate_texts(
    model: Model,
    task: TextGenerator,
    items: Sequence[int],
    source: TableSource,
    limits: GenerationLimits,
    *,
    settings: DecodingSettings,
    batch_tokens: int,
    lockstep: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> list[dict[str, Any]]:
    """The predictions for rows of a source. `batch_tokens`: source tokens of a batch. `lockstep`:
    processes with equally many rows call the same modules equally often (ZeRO 3). `stop`: asked
    before every batch, whether to leave out the rest."""
    prompts = task.prompts(np.asarray(items, np.int64), source, limits)
    lengths = np.array([len(prompt.source.input_ids) for prompt in prompts])
    order = np.argsort(-lengths, kind="stable")
    counted = np.full(len(order), limits.length) if lockstep else lengths[order]
    written: list[dict[str, Any]] = [{}] * len(prompts)
    generator = _Generator(model, task, source.vocabulary, limits, settings, lockstep)
    with _uncompiled(model):
        for part in _parts(counted, batch_tokens, max(1, _MAX_HYPOTHESES // settings.beams)):
            if stop():
                break
            chosen = order[part].tolist()
            for place, each in zip(chosen, generator([prompts[i] for i in chosen]), strict=True):
                written[place] = task.written(each, source)
    return written


@dataclass(frozen=True)
class _Generator:
    """Generates the tokens for prompts."""

    model: Model
    task: TextGenerator
    vocabulary: SpecialTokens
    limits: GenerationLimits
    settings: DecodingSettings
    lockstep: bool

    def __call__(self, prompts: Sequence[Prompt]) -> list[Generated]:
        encoder, target = self.model.backbone, self.task.target_format(self.vocabulary, self.limits)
        rows = encoder.word.num_embeddings
        blocked = banned_tokens(self.vocabulary, rows, target.end)
        return generate(
            CachedDecoder(encoder, self._logits, prompts, target),
            target.begin,
            [most_tokens(encoder, prompt) for prompt in prompts],
            self.settings,
            TokenRules(end=target.end, blocked=tuple(blocked.tolist())),
            numbers=[prompt.number for prompt in prompts],
            lockstep=self.lockstep,
            device=encoder.word.weight.device,
        )

    @property
    def _logits(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return self.model.heads[self.model.head_of[self.task.name]].logits  # type: ignore[return-value]


def banned_tokens(vocabulary: SpecialTokens, rows: int, end: int) -> np.ndarray:
    """The token ids below `rows` that no text has: special tokens except the one that ends it,
    unused ones, and those beyond the vocabulary."""
    barred = np.ones(rows, bool)
    barred[vocabulary.regular[vocabulary.regular < rows]] = False
    barred[[x for x in (vocabulary.attn, vocabulary.noise) if x is not None]] = True
    barred[end] = False
    return np.flatnonzero(barred)


def _parts(lengths: np.ndarray, tokens: int, most: int) -> Iterator[slice]:
    """Batches of sources, whose lengths descend: at most `tokens` tokens, padding included, and at
    most `most` sources."""
    start = 0
    while start < len(lengths):
        many = max(1, min(most, tokens // int(lengths[start])))
        yield slice(start, start + many)
        start += many


def _uncompiled(model: Model) -> AbstractContextManager[Any]:
    """Decoding has other shapes at every step, each of which would be compiled."""
    if model.backbone.kernels.compile != "on":
        return nullcontext()
    return torch.compiler.set_stance("force_eager")
