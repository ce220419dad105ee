"""The floating-point operations of a training step, whatever the implementation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import encoder_class
from palm_ds.model.inputs.batch import Batch


def training_flops(
    config: EncoderConfig,
    batch: Batch,
    vocab_tasks: Sequence[str],
    sparse_tasks: Sequence[str] = (),
) -> torch.Tensor | float:
    """FLOPs of the forward and backward pass of one batch: 6 for each layer weight and token, the
    attention within sequences, and the vocabulary product for each label of `vocab_tasks` and for
    each token of texts of `sparse_tasks` (other heads are negligible). Tokens that do not see one
    another count as pairs: attention computes them. Recomputed activations and padding do not
    count. The last layer counts in full, although most of it may be computed at the labels only. A
    batch with placeholders of `vocab_tasks` is read once more before, forward only, to fill them
    in.

    A scalar on the batch's device: nothing waits for it."""
    tokens, squares = sequence_sums(batch)
    labels: torch.Tensor | float = sum(
        len(batch.labels[task][0]) for task in vocab_tasks if task in batch.labels
    )
    if has_labels(batch, sparse_tasks):
        labels = labels + tokens
    flops = encoder_class(config).flops(config)
    layers = flops.token * tokens
    for window, pair in flops.pairs.items():
        layers = layers + pair * (squares if window is None else pairs_within(batch, window))
    filled = filled_tokens(batch, vocab_tasks)
    return layers * first_pass(filled > 0) + head_flops(config) * (labels + filled * FORWARD)


FORWARD = 1 / 3
"""The forward pass's share."""


def has_labels(batch: Batch, tasks: Sequence[str]) -> bool:
    """Whether the texts of a batch are those of one of these tasks."""
    return any(task in batch.labels for task in tasks)


def filled_tokens(batch: Batch, vocab_tasks: Sequence[str]) -> int:
    """The placeholders that a first pass fills in."""
    return sum(len(batch.placeholders[t][0]) for t in vocab_tasks if t in batch.placeholders)


def first_pass(share: float) -> float:
    """The factor of the work of layers where this share of the rows is read once before."""
    return 1 + share * FORWARD


def sequence_sums(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The lengths of a batch's sequences without padding, summed, and their squares, as float64.
    `cu_seqlens` may end in empty sequences."""
    lengths = _lengths(batch)
    return lengths.sum(), (lengths**2).sum()


def pairs_within(batch: Batch, window: int) -> torch.Tensor:
    """Pairs of tokens of a sequence that are at most `window` apart, over all sequences."""
    lengths = _lengths(batch)
    near = lengths * (2 * window + 1) - window * (window + 1)
    return torch.where(lengths > window, near, lengths**2).sum()


def _lengths(batch: Batch) -> torch.Tensor:
    ids = batch.sequence_ids.flatten()
    starts = batch.cu_seqlens[:-1].long().clamp(max=ids.numel() - 1)
    return batch.cu_seqlens.diff().double() * (ids[starts] >= 0)


def layer_flops(config: EncoderConfig) -> float:
    """FLOPs of all layers for each token, forward and backward, without attention scores."""
    return encoder_class(config).flops(config).token


def attention_flops(config: EncoderConfig) -> float:
    """FLOPs of attention in all layers for each pair of tokens of a sequence that every layer
    compares."""
    return sum(encoder_class(config).flops(config).pairs.values())


def head_flops(config: EncoderConfig) -> float:
    """FLOPs of the masked-LM head for each label."""
    return 6.0 * encoder_class(config).masked_lm_weights(config)
