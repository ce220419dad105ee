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
from palm_ds.model.attention.plan import AttentionPlan, softmax, split_heads
from palm_ds.model.encoder.encoder import Encoder
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


class KVCache:
    """The keys and values of one layer, for `prompts` with an equal number of hypotheses each: they
    are kept, not computed again.

        source    x x x x x            read once per prompt, shared by its hypotheses
        target              y y y      one token a step
        query                     ?    the [ATTN] of the step, if any; nothing of it is kept

    A layer reads tokens through the plan that `KVCache.source_plan` or `step_plan` returns, so the
    layer itself is the one that was trained.
    """

    def __init__(self, real: torch.Tensor, *, queries: bool = True):
        """`real` (prompts, length) bool: which source tokens are not padding. `queries`: whether a
        step has a query behind its token."""
        self._queries = int(queries)
        self._hidden = ~real[:, None, None]  # (prompts, 1, 1, length)
        self._source: tuple[torch.Tensor, ...] = ()  # (prompts, heads, length, head size) each
        self._target: tuple[torch.Tensor, ...] = ()  # (hypotheses, heads, tokens, head size) each

    @property
    def source_plan(self) -> AttentionPlan:
        """For all source tokens (prompts, length): each attends to its whole source."""
        return AttentionPlan(kernel="cache", compute=self._read_source)

    @property
    def step_plan(self) -> AttentionPlan:
        """For the newest target token and the query, if any, of each hypothesis, (hypotheses, 1 or
        2): both attend to the source and the target so far, the query to itself as well."""
        return AttentionPlan(kernel="cache", compute=self._read_step)

    def select(self, hypotheses: torch.Tensor, prompts: torch.Tensor | None) -> None:
        """Continue with these hypotheses (n,), which may repeat, and these prompts (k,); None: the
        same prompts. A prompt's hypotheses stay together."""
        self._target = tuple(part.index_select(0, hypotheses) for part in self._target)
        if prompts is not None:
            self._source = tuple(part.index_select(0, prompts) for part in self._source)
            self._hidden = self._hidden.index_select(0, prompts)

    def _read_source(
        self,
        qkv: torch.Tensor,
        plan: AttentionPlan,
        num_heads: int,
        dropout: float,
        window: int | None,
    ) -> torch.Tensor:
        query, key, value = _heads_first(qkv, num_heads, window)
        self._source = key, value
        scores = self._scores(query, key).masked_fill(self._hidden, -torch.inf)
        return (softmax(scores) @ value).transpose(1, 2).flatten(2)

    def _read_step(
        self,
        qkv: torch.Tensor,
        plan: AttentionPlan,
        num_heads: int,
        dropout: float,
        window: int | None,
    ) -> torch.Tensor:
        query, key, value = _heads_first(qkv, num_heads, window)  # (hypotheses, heads, new, size)
        if self._target:
            key, value = (
                torch.cat([before, new], 2)
                for before, new in zip(self._target, (key, value), strict=True)
            )
        kept = key.shape[2] - self._queries
        self._target = key[:, :, :kept], value[:, :, :kept]
        of_target = self._scores(query, key)  # (hypotheses, heads, new, tokens + queries)
        of_target[:, :, 0, kept:] = -torch.inf  # a token does not see the query
        source_key, source_value = self._source
        together = _by_prompt(query, len(source_key))
        of_source = self._scores(together, source_key).masked_fill(self._hidden, -torch.inf)
        of_source = _by_hypothesis(of_source, len(query))
        weights = softmax(torch.cat([of_source, of_target], -1))
        on_source, on_target = weights.split([of_source.shape[-1], of_target.shape[-1]], -1)
        mixed = _by_hypothesis(_by_prompt(on_source, len(source_key)) @ source_value, len(query))
        return (mixed + on_target @ value).transpose(1, 2).flatten(2)

    @staticmethod
    def _scores(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5


def _heads_first(
    qkv: torch.Tensor, num_heads: int, window: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value, each (rows, heads, length, head size)."""
    if window is not None:
        raise UserError("the encoder attends within a window, with which texts are not generated")
    query, key, value = (part.transpose(1, 2) for part in split_heads(qkv, num_heads))
    return query, key, value


def _by_prompt(x: torch.Tensor, prompts: int) -> torch.Tensor:
    """(hypotheses, heads, new, any) -> (prompts, heads, new x hypotheses of a prompt, any)."""
    hypotheses, heads, new, last = x.shape
    split = x.view(prompts, hypotheses // prompts, heads, new, last)
    return split.transpose(1, 2).reshape(prompts, heads, -1, last)


def _by_hypothesis(x: torch.Tensor, hypotheses: int) -> torch.Tensor:
    """The inverse of `_by_prompt`."""
    prompts, heads, rows, last = x.shape
    each = hypotheses // prompts
    split = x.view(prompts, heads, each, rows // each, last)
    return split.transpose(1, 2).reshape(hypotheses, heads, rows // each, last)
