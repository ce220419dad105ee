"""The loss of tokens that are generated: label smoothing, and weights by flow.

The products with the token embeddings are those of `masked_lm_loss`, chunk by chunk; the kernels of
other libraries have no weights, so `chunked` replaces them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch.nn import functional as F  # noqa: N812

from palm_ds.model.ops.masked_lm_loss import CrossEntropy, chunked_loss

TOKEN, FLOW = range(2)
"""Columns of targets: the token, and the number of its flow."""


def smoothed_lm_loss(
    rows: torch.Tensor,
    embeddings: torch.Tensor,
    bias: torch.Tensor,
    targets: torch.Tensor,
    kernel: str,
    *,
    smoothing: float,
    weights: Sequence[float] = (),
    compiled: CrossEntropy | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed cross-entropy of rows @ embeddings.T + bias in fp32, and the number of correct
    predictions.

    rows (n, hidden), embeddings (vocabulary, hidden), bias (vocabulary,), targets (n,) or (n, 2).
    `smoothing` is the share of a target spread over the whole vocabulary (Szegedy et al. 2016,
    section 7); `weights` are those of the flows, all 1 if empty. `compiled`:
    `smoothed_cross_entropy`, compiled, for `chunked`.
    """
    if kernel == "plain":
        return _plain(rows, embeddings, bias, targets, smoothing, weights)
    function = partial(
        compiled or smoothed_cross_entropy, smoothing=smoothing, weights=tuple(weights)
    )
    return chunked_loss(rows, embeddings, bias, targets, function, padded=compiled is not None)


def _plain(rows, embeddings, bias, targets, smoothing, weights):
    columns = targets.view(len(rows), -1)
    tokens, logits = columns[:, TOKEN], F.linear(rows, embeddings, bias)  # (n, vocabulary)
    each = F.cross_entropy(logits.float(), tokens, reduction="none", label_smoothing=smoothing)
    loss = (each * _weight(columns, weights)[:, 0]).sum()
    return loss, (logits.detach().argmax(-1) == tokens).sum()


def _weight(targets: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """(n, 1) fp32 weight of each target (n, 1 or 2); 0 for padding, whose token is -1."""
    real = (targets[:, :1] >= 0).float()
    for flow, weight in enumerate(weights):
        real = torch.where(targets[:, FLOW:] == flow, real * weight, real)
    return real


def smoothed_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    loss: torch.Tensor,
    scale: float,
    needs_grad: bool,
    *,
    smoothing: float,
    weights: Sequence[float],
) -> tuple[torch.Tensor, ...]:
    """`loss` with that of some rows added, and the number of correct predictions; with `needs_grad`
    also its gradient in the logits times `scale`, in their dtype, and its sum over the rows in
    fp32. `target` (rows, 1 or 2); rows with token -1 do not count."""
    dtype, logits, token = logits.dtype, logits.float(), target[:, :1]
    weight = _weight(target, weights)
    best, predicted = logits.max(-1, keepdim=True)
    shifted = logits - best
    powers = shifted.exp()
    total = powers.sum(-1, keepdim=True)
    chosen = torch.arange(logits.shape[1], device=logits.device) == token
    of_target = torch.where(chosen, shifted, 0.0).sum(-1, keepdim=True)
    aim = (1 - smoothing) * of_target + smoothing * shifted.mean(-1, keepdim=True)
    loss = loss + (weight * (total.log() - aim)).sum()
    hits = ((predicted == token) & (token >= 0)).sum()
    if not needs_grad:
        return loss, hits
    error = powers / total - smoothing / logits.shape[1] - (1 - smoothing) * chosen.float()
    error = error * (weight * scale)
    return loss, hits, error.to(dtype), error.sum(0)
