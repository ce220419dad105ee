"""The floating-point operations of a training step, whatever the implementation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.config.encoder_kinds import shipped_class
from palm_ds.model.inputs.batch import Batch


def training_flops(
    config: EncoderConfig, batch: Batch, vocab_tasks: Sequence[str]
) -> torch.Tensor | float:
    """FLOPs of the forward and backward pass of one batch: 6 for each layer weight and token, the
    attention within sequences, and the vocabulary product for each label of `vocab_tasks` (other
    heads are negligible). Tokens that do not see one another count as pairs: attention
    computes them. Recomputed activations and padding do not count. The last layer counts in
    full, although most of it may be computed at the labels only.

    A scalar on the batch's device: nothing waits for it."""
    tokens, squares = sequence_sums(batch)
    labels = sum(len(batch.labels[task][0]) for task in vocab_tasks if task in batch.labels)
    layers = layer_flops(config) * tokens + attention_flops(config) * squares
    return layers + head_flops(config) * labels


def sequence_sums(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The lengths of a batch's sequences without padding, summed, and their squares, as float64.
    `cu_seqlens` may end in empty sequences."""
    ids = batch.sequence_ids.flatten()
    starts = batch.cu_seqlens[:-1].long().clamp(max=ids.numel() - 1)
    lengths = batch.cu_seqlens.diff().double() * (ids[starts] >= 0)
    return lengths.sum(), (lengths**2).sum()


def layer_flops(config: EncoderConfig) -> float:
    """FLOPs of all layers for each token, forward and backward, without attention scores."""
    if word_encoder := shipped_class(config.kind):
        return 6.0 * word_encoder.layer_weights(config)
    size = config.hidden_size
    return 6.0 * config.num_layers * (4 * size**2 + 2 * size * config.feed_forward_size)


def attention_flops(config: EncoderConfig) -> float:
    """FLOPs of attention in all layers for each pair of tokens of a sequence."""
    if shipped_class(config.kind):
        return 0.0
    return 12.0 * config.num_layers * config.hidden_size


def head_flops(config: EncoderConfig) -> float:
    """FLOPs of the masked-LM head for each label."""
    return 6.0 * (config.hidden_size**2 + config.hidden_size * (config.vocab_size or 0))
