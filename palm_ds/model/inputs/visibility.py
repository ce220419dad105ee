"""Visibility of tokens to each other within a text: two whole numbers for each token.

    token i attends to token j of its text if order[j] <= limit[i], and always to itself

    full         all to all                                    order 0, limit 0
    causal       t_i to t_1 ... t_i                            i, i
    prefix_lm    source s and target t: s to s, t_i to s and t_1 ... t_i
                                                               s: 0, 0; t_i: i, i
    multi_flow   also queries that no other token attends to: a query sees the source, the first
                 `limit` target tokens, and itself              (ERNIE-GEN, figure 3)

A text whose tokens all attend to one another has no Visibility (None); it is not changed by others
in its batch that have one. In a batch the numbers are one tensor, which `visible` turns into a
mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

HIDDEN = np.iinfo(np.int32).max
"""The order of a token that only itself attends to: no limit reaches it."""


@dataclass(frozen=True)
class Visibility:
    """Of one text."""

    order: np.ndarray
    """(tokens,) int32, from 0"""
    limit: np.ndarray
    """(tokens,) int32, from 0 and below HIDDEN"""


def full(tokens: int) -> Visibility:
    """Every token attends to every token."""
    return Visibility(np.zeros(tokens, np.int32), np.zeros(tokens, np.int32))


def causal(tokens: int) -> Visibility:
    """Every token attends to itself and those before it."""
    steps = np.arange(tokens, dtype=np.int32)
    return Visibility(steps, steps)


def prefix_lm(source: int, target: int) -> Visibility:
    """A source, read in both directions, and a target, read from left to right (UniLM, Dong et al.
    2019, section 2.3)."""
    steps = np.concatenate([np.zeros(source, np.int32), np.arange(1, target + 1, dtype=np.int32)])
    return Visibility(steps, steps)


def multi_flow(source: int, target: int, flows: Sequence[np.ndarray]) -> Visibility:
    """Source and target as in `prefix_lm`, then the queries of each flow. A flow has one number for
    each of its queries: how many target tokens, from the first on, the query attends to. A query of
    the word-by-word flow for the target token t (from 1) has t - 1; one of the span-by-span flow
    b - 1, with b the first token of its span."""
    context = prefix_lm(source, target)
    limits = np.concatenate([context.limit, *flows]).astype(np.int32)
    order = np.full(len(limits), HIDDEN, np.int32)
    order[: source + target] = context.order
    return Visibility(order, limits)


def visible(visibility: torch.Tensor) -> torch.Tensor:
    """(..., length, length) bool: whether token i attends to token j, within a text, given the
    orders and limits (2, ..., length)."""
    order, limit = visibility
    itself = torch.eye(order.shape[-1], dtype=torch.bool, device=order.device)
    return (order[..., None, :] <= limit[..., :, None]) | itself
