"""What there is to know of a checkpoint format. open.py lists the formats.

    FORMAT = Format(name=..., looks_for=..., recognises=..., open=..., export=..., run=...)

To add one, write a module or folder beside this file with such a FORMAT, and list it in open.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from palm_ds.weights.formats.contents import Contents, SavesFiles
from palm_ds.weights.formats.huggingface.model_card import Made
from palm_ds.weights.formats.huggingface.plan import Plan
from palm_ds.weights.formats.huggingface.target import Target
from palm_ds.weights.formats.runnable import RunnableCheckpoint


@dataclass(frozen=True, kw_only=True)
class Export:
    """A checkpoint on its way into a format; nothing is written yet."""

    write: Callable[[Path, SavesFiles | None], None]
    """Fills an empty folder, with the files of a tokenizer if there is one."""
    plan: Plan | None = None
    """Which tensors go where; None: all of them, under our names."""
    task_id: int = 0
    """The row of the task embedding that texts get there."""
    write_card: Callable[[Path, Made], None] | None = None
    """Adds a README.md that tells where the weights come from and how they were checked."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """A checkpoint format: reading, and where there is more, writing and running."""

    name: str
    """As in `--to NAME`, and in messages."""
    looks_for: str
    """The files that it is recognised by."""
    recognises: Callable[[Path], bool]
    """Whether a path is of this format; it never raises."""
    open: Callable[..., Contents]
    """(path, **options) -> Contents; no value is read yet."""
    export: Callable[[Contents, Target], Export] | None = None
    """Plans the same checkpoint in this format; None: it is only read."""
    run: Callable[..., RunnableCheckpoint] | None = None
    """(contents, task_id=) -> the checkpoint in the library that the format belongs to; None: it
    is run in our own encoder."""

    @property
    def options(self) -> tuple[str, ...]:
        """The names of what `open` takes beside the path."""
        parameters = inspect.signature(self.open).parameters.values()
        return tuple(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)
