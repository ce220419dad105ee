"""One implementation of an operation, and what the choice among several depends on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from palm_ds.model.config.config import EncoderConfig


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Device, dtype and settings that the choice depends on."""

    device: torch.device
    dtype: torch.dtype
    config: EncoderConfig
    zero_stage: int = 0
    fixed_shapes: bool = True
    """Whether all batches have the same number of rows and length."""
    partial_tasks: Sequence[str] = ()
    """The tasks with texts whose tokens do not all attend to one another."""
    windows: bool = False
    """Whether layers attend within a window."""
    score_biases: bool = False
    """Whether layers add to the scores of attention."""
    memories: bool = False
    """Whether layers attend to vectors of earlier windows besides."""
    states_read: bool = False
    """Whether what layers compute inside is recorded."""
    layer_norm: str = "auto"
    """The requested implementation."""
    dropout: str = "plain"
    compile: str = "off"
    """The implementations of dropout and compile, which are chosen first."""


@dataclass(frozen=True)
class Implementation:
    """One implementation of an operation. `unavailable` returns why it cannot run here,
    `not_preferred` why it is not chosen by default; None means no objection. `remark` is what the
    log says of it when it is chosen."""

    name: str
    unavailable: Callable[[Environment], str | None] = lambda _: None
    not_preferred: Callable[[Environment], str | None] = lambda _: None
    remark: Callable[[Environment], str | None] = lambda _: None
