"""Refuses a model or a step that cannot fit into memory, before any of it is built."""

from __future__ import annotations

from palm_ds.common.errors import UserError
from palm_ds.model.encoder.encoder import encoder_class
from palm_ds.train.recipe.recipe import Recipe

_TOKEN_BYTES = 40  # five int64 tensors of a batch
_GB = 1e9


def check_memory(recipe: Recipe, vocabulary: int, *, world: int, memory: int) -> None:
    """Raises UserError if the weights, in fp32, or one process's part of a step's batch take more
    than `memory` bytes. A run needs several times as much."""
    config = recipe.backbone_config
    words = config.vocab_size or vocabulary
    needed = 4 * encoder_class(config).least_parameters(config, words)
    if needed > memory:
        raise UserError(
            f"backbone: vocab_size {config.vocab_size or vocabulary:,}, max_positions "
            f"{config.max_positions:,}, hidden_size {config.hidden_size:,}, num_layers "
            f"{config.num_layers:,}: does not fit into memory: its weights alone take "
            f"{needed / _GB:,.0f} GB in fp32, and {memory / _GB:,.0f} GB can be used here"
        )
    tokens = recipe.rows * recipe.length // world
    if tokens * _TOKEN_BYTES > memory:
        raise UserError(
            f"batch: {tokens:,} tokens of a step for each of {world} processes take "
            f"{tokens * _TOKEN_BYTES / _GB:,.0f} GB, and {memory / _GB:,.0f} GB can be used here; "
            "lower it, or use more processes"
        )
