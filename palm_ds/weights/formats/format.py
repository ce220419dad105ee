"""Describes a checkpoint format. open.py lists the formats.

    FORMAT = Format(name=..., looks_for=..., recognizes=..., open=..., export=..., run=...)

To add one, write a module or folder next to this file with such a FORMAT, and list it in open.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from palm_ds.text.tokenizer import Tokenizer
from palm_ds.weights.formats.contents import CheckpointContents
from palm_ds.weights.formats.huggingface.model_card import Provenance
from palm_ds.weights.formats.huggingface.plan import ExportPlan
from palm_ds.weights.formats.huggingface.target import ExportOptions
from palm_ds.weights.formats.runnable import RunnableCheckpoint


@dataclass(frozen=True, kw_only=True)
class Export:
    """A planned export; nothing is written yet."""

    write: Callable[[Path, Tokenizer | None], None]
    """Fills an empty folder with the weights, and the tokenizer's files if there is one."""
    plan: ExportPlan | None = None
    """Which tensors go where; None means all of them, under palm_ds names."""
    task_id: int = 0
    """Row of the task embedding that texts get in the written checkpoint."""
    write_card: Callable[[Path, Provenance], None] | None = None
    """Adds a README.md with the origin of the weights and how they were verified."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """A checkpoint format: how to read it and, if supported, how to write and run it."""

    name: str
    """The name in `--to NAME` and in messages."""
    looks_for: str
    """The files that identify it."""
    recognizes: Callable[[Path], bool]
    """Whether a path is of this format. Never raises."""
    open: Callable[..., CheckpointContents]
    """(path, **options) -> CheckpointContents; no value is read yet."""
    export: Callable[[CheckpointContents, ExportOptions], Export] | None = None
    """Plans an export to this format; None means read-only."""
    run: Callable[..., RunnableCheckpoint] | None = None
    """(contents, task_id=) -> the checkpoint in its format's own library; None means that it runs
    in palm_ds's encoder."""

    @property
    def options(self) -> tuple[str, ...]:
        """The names of the options of `open`."""
        parameters = inspect.signature(self.open).parameters.values()
        return tuple(
            parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY
        )
