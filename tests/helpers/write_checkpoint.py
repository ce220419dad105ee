"""A checkpoint of given files, without an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from palm_ds.runtime.checkpoint.checkpoint import (
    FileManifest,
    Retention,
    SaveRequest,
    begin,
    delete_set_aside,
    publish,
)
from palm_ds.runtime.processes.process_group import ProcessGroup


def write_checkpoint(
    folder: Path,
    step: int,
    *,
    write: Callable[[Path, FileManifest], None],
    group: ProcessGroup,
    keep: int | Retention = 2,
    **contents: Any,
) -> Path:
    """`write(folder, manifest)` writes this process's files; `keep`: the newest ones; `contents`:
    of a SaveRequest."""
    keep = keep if isinstance(keep, Retention) else Retention(newest=keep)
    request = SaveRequest(folder=folder, step=step, keep=keep, **contents)
    begin(request, group)
    written = FileManifest()
    write(request.partial, written)
    published = publish(request, written, group)
    if group.rank == 0:
        delete_set_aside(folder)
    return published
