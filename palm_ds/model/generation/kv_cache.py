"""Attention over tokens that were read before: their keys and values are kept, not computed again.

    source    x x x x x            read once per prompt, shared by its hypotheses
    target              y y y      one token a step
    query                     ?    the [ATTN] of the step, if any; nothing of it is kept

A layer reads tokens through the plan that `KVCache.source_plan` or `step_plan` returns, so the
layer itself is the one that was trained.
"""

from __future__ import annotations

import torch

from palm_ds.common.errors import UserError
from palm_ds.model.attention.plan import AttentionPlan, softmax, split_heads


class KVCache:
    """The keys and values of one layer, for `prompts` with an equal number of hypotheses each."""

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
