"""One step of generation after another: by queries, as ERNIE-GEN's infilling decoder (arXiv
2001.11314, 3.1), or by the tokens themselves, as in UniLM and UNIMO.

    source, read once        [CLS] s1 s2 s3 [SEP]
    step 1                                        [CLS]  [ATTN]  -> y1         or  [CLS]  -> y1
    step 2                                               y1  [ATTN]  -> y2         y1  -> y2
    step 3                                                   y2  [ATTN]  -> y3     y2  -> y3

A step gives the encoder the token chosen last, at its own position, and [ATTN] at the next one, if
there is one; the head reads the vector of the last of these. The layers are the encoder's own, over
a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from palm_ds.common.errors import UserError
from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.generation.kv_cache import KVCache
from palm_ds.model.inputs.batch import Batch, PackedText


@dataclass(frozen=True, kw_only=True)
class TargetFormat:
    """The tokens that frame a target, and its token type."""

    begin: int
    """The token before the first one to generate: [CLS]."""
    query: int | None
    """The token that asks for the next one: [ATTN]. None: each token asks for the one after it."""
    end: int
    """The token after the last one: [SEP], or [MASK]."""
    token_type: int


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Source and position that a target is generated for."""

    source: PackedText
    position: int
    """The position of the target's first token, `TargetFormat.begin`."""
    number: int = 0
    """What random numbers follow from, such as the number of a row."""


def most_tokens(encoder: Encoder, prompt: Prompt) -> int:
    """Number of tokens that the encoder has positions for, after a prompt."""
    return encoder.config.max_length - 1 - prompt.position


class CachedDecoder:
    """Reads prompts, then returns scores of the next token, step by step."""

    def __init__(
        self,
        encoder: Encoder,
        logits: Callable[[torch.Tensor], torch.Tensor],
        prompts: Sequence[Prompt],
        target: TargetFormat,
    ):
        """`logits` maps vectors (n, hidden) to scores (n, vocabulary)."""
        check_generates(encoder)
        self.encoder, self.target, self._logits = encoder, target, logits
        queries = target.query is not None
        self._last = encoder.config.max_length - 1 - queries  # a query needs a position, too
        longest = max(len(prompt.source.input_ids) for prompt in prompts)
        batch = Batch.from_rows(
            [[prompt.source] for prompt in prompts], length=longest, pad=encoder.config.pad
        ).to(encoder.word.weight.device)
        real = batch.sequence_ids >= 0
        self._caches = [KVCache(real, queries=queries) for _ in encoder.computed_layers]
        self._position = torch.tensor([prompt.position for prompt in prompts]).to(batch.input_ids)
        self._task = batch.task_ids[:, 0]
        encoder.read(batch, [cache.source_plan for cache in self._caches])

    def widen(self, hypotheses: int) -> None:
        """Give each prompt that many hypotheses; before the first step."""
        self._position = self._position.repeat_interleave(hypotheses)
        self._task = self._task.repeat_interleave(hypotheses)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """The scores (hypotheses, vocabulary) of the token after `tokens` (hypotheses,)."""
        new = tokens[:, None]
        if self.target.query is not None:
            new = torch.cat([new, torch.full_like(new, self.target.query)], 1)
        # Texts beyond their limit, which other processes still wait for, have no further positions.
        at = self._position.clamp(max=self._last)
        batch = _step_batch(new, at, self._task, self.target.token_type)
        self._position = self._position + 1
        return self._logits(
            self.encoder.read(batch, [cache.step_plan for cache in self._caches])[:, -1]
        )

    def select(self, hypotheses: torch.Tensor, prompts: torch.Tensor | None = None) -> None:
        """Continue with these hypotheses (n,), which may repeat, of these prompts (k,), by default
        all. The hypotheses of a prompt stay together, equally many of each."""
        self._position = self._position.index_select(0, hypotheses)
        self._task = self._task.index_select(0, hypotheses)
        for cache in self._caches:
            cache.select(hypotheses, prompts)


def check_generates(encoder: Encoder) -> None:
    """Raises UserError if the encoder cannot continue texts."""
    if not encoder.generates:
        raise UserError(
            f"backbone.kind: {encoder.config.kind} generates no texts: it has windows, relative "
            "positions or a forward pass of its own, which caches do not have"
        )


def _step_batch(
    new: torch.Tensor, position: torch.Tensor, task: torch.Tensor, token_type: int
) -> Batch:
    """The newest token of each hypothesis, (hypotheses, 1), or with its query, (hypotheses, 2)."""
    rows, many = new.shape
    return Batch(
        input_ids=new,
        position_ids=position[:, None] + torch.arange(many, device=new.device),
        token_type_ids=torch.full_like(new, token_type),
        task_ids=task[:, None].expand(rows, many),
        sequence_ids=torch.zeros_like(new),
        cu_seqlens=torch.arange(0, new.numel() + 1, many, dtype=torch.int32, device=new.device),
    )
