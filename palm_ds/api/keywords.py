"""Typed keywords of the Python API. Made by docs/generate.py from the dataclasses; do not edit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict


class TrainKeywords(TypedDict, total=False):
    """Keywords of palm.Trainer and palm.MultiHeadTrainer."""

    batch: int
    """Examples per step, over all processes."""
    epochs: float
    """Passes over the training rows; with several tasks, over those of the reference task."""
    lr: float
    """Peak learning rate."""
    length: int
    """Tokens per row. Examples are packed into rows; longer ones are truncated. 0: 128, or the
    encoder's maximum if that is less.
    """
    schedule: Literal["linear", "cosine", "noam", "wsd", "constant"]
    """How the learning rate decays."""
    warmup: float
    """Warm-up steps; below 1: a fraction of all steps."""
    weight_decay: float
    """Weight decay of the encoder's matrices and embeddings."""
    seed: int
    """Determines the heads' initial weights, data order and dropout."""
    held_out: float
    """Share of the rows held out for evaluation, for tasks without `dev`."""
    evaluate_every: int
    """Steps between evaluations; 0: at the end of every epoch."""
    best: str
    """Metric that selects the final weights: `task.metric`, or `mean` over tasks. Empty: the
    weights of the last step.
    """
    patience: int
    """With `best`: stop after this many evaluations without improvement; 0: never."""
    save_every: int
    """Steps between checkpoints; 0: only at the end."""
    log_every: int
    """Steps between log lines."""
    folder: str | Path
    """The run folder. An interrupted run in it is resumed. Empty: a temporary folder."""
    gradient_checkpointing: bool
    """Recompute activations in the backward pass instead of storing them: less memory, a third
    more computation, the same weights. It is `palm_ds.activation_checkpointing` of a DeepSpeed
    file.
    """
    deepspeed_config: str | Path | Mapping[str, Any] | None
    """DeepSpeed settings: a file or a mapping. None: ZeRO 1 with bf16 if supported; on CPU no
    ZeRO, fp32.
    """
    recipe: Mapping[str, Any]
    """Any other recipe keys (docs/recipe.md), such as {"optimizer": {"ema": 0.999}}."""


class EmbeddingKeywords(TypedDict, total=False):
    """Keywords of palm.Backbone, called on texts."""

    pooling: str | None
    """`mean`, over all tokens with [CLS] and [SEP]; `cls`; `max`; `pooler`, the trained layer over
    [CLS]; or `splade`, a weight for each word of the vocabulary by the masked-LM head. Default:
    mean.
    """
    layers: int | Sequence[int]
    """Layers whose outputs are averaged: 1 is the first, -1 the last, 0 the embeddings."""
    concat: bool
    """Put the vectors of the layers one after another instead of averaging them."""
    tokens: bool
    """One vector for each token, special ones included, instead of one for the text."""
    normalize: bool | None
    """Scale vectors to length 1. Default: no."""
    dimensions: int
    """Keep only the first ones (Matryoshka), before normalizing. Default: all."""
    max_active_dims: int
    """Keep only the largest numbers of a sparse vector (splade), as many as this. Default: all."""
    max_length: int | None
    """The most tokens of a text, special ones included; longer texts are truncated. Default: what
    the model reads.
    """
    prompt: str | None
    """Put before every text, as in "query: ". Default: nothing."""
    task: str
    """The task whose embedding is added, if the model has task embeddings; default: the model's."""
