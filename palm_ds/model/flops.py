"""How many floating-point operations a training step needs, whatever computes it."""

from __future__ import annotations

from collections.abc import Sequence

from palm_ds.model.batch import Batch
from palm_ds.model.config import EncoderConfig


def training_flops(config: EncoderConfig, batch: Batch, vocab_tasks: Sequence[str]) -> float:
    """Forward and backward of one batch: 6 for each weight of the layers and token, attention
    within the examples, and the vocabulary product at every label of the tasks `words` (tasks with
    few classes count next to nothing). Recomputed activations and padding are not work done. The
    last layer counts in full, though most of it may be computed at the labels alone."""
    width, layers = config.hidden_size, config.num_layers
    weights = layers * (4 * width**2 + 2 * width * config.feed_forward_size)
    tokens = int((batch.block >= 0).sum())
    lengths = batch.starts.diff().double()
    attention = 12 * layers * width * float((lengths**2).sum())
    vocabulary = config.vocab_size or 0
    labels = sum(len(batch.labels[task][0]) for task in vocab_tasks if task in batch.labels)
    return 6.0 * weights * tokens + attention + 6.0 * labels * (width**2 + width * vocabulary)
