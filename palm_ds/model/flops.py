"""The floating-point operations of a training step, whatever the implementation."""

from __future__ import annotations

from collections.abc import Sequence

from palm_ds.model.batch import Batch
from palm_ds.model.config import EncoderConfig


def training_flops(config: EncoderConfig, batch: Batch, vocab_tasks: Sequence[str]) -> float:
    """FLOPs of the forward and backward pass of one batch: 6 for each layer weight and token, the
    attention within sequences, and the vocabulary product for each label of `vocab_tasks` (other
    heads are negligible). Recomputed activations and padding do not count. The last layer counts in
    full, although most of it may be computed at the labels only."""
    size, layers = config.hidden_size, config.num_layers
    weights = layers * (4 * size**2 + 2 * size * config.feed_forward_size)
    lengths = batch.cu_seqlens.diff().double()
    attention = 12 * layers * size * float((lengths**2).sum())
    vocabulary = config.vocab_size or 0
    labels = sum(len(batch.labels[task][0]) for task in vocab_tasks if task in batch.labels)
    head = 6.0 * labels * (size**2 + size * vocabulary)
    return 6.0 * weights * batch.real_tokens + attention + head
