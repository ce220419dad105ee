"""A folder appears complete or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def publish(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a folder beside this one, then put it in place by renaming.

    An older folder of that name is replaced when the new one is whole. Where `write` raises,
    nothing of it stays, and the older folder is as it was.
    """
    folder = Path(folder)
    part, old = (folder.with_name(f".{folder.name}.{end}") for end in ("part", "old"))
    for leftover in (part, old):
        shutil.rmtree(leftover, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        write(part)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    if folder.exists():
        os.replace(folder, old)
    os.replace(part, folder)
    shutil.rmtree(old, ignore_errors=True)
