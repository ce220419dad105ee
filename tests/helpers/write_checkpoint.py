"""A checkpoint of given files, without an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from palm_ds.runtime.checkpoint import (
    FileManifest,
    ProcessGroup,
    SaveRequest,
    begin,
    delete_set_aside,
    publish,
)


def write_checkpoint(
    folder: Path,
    step: int,
    *,
    write: Callable[[Path, FileManifest], None],
    group: ProcessGroup,
    **contents: Any,
) -> Path:
    """`write(folder, manifest)` writes this process's files; `contents`: of a SaveRequest."""
    request = SaveRequest(folder=folder, step=step, **contents)
    begin(request, group)
    written = FileManifest()
    write(request.partial, written)
    published = publish(request, written, group)
    if group.rank == 0:
        delete_set_aside(folder)
    return published
