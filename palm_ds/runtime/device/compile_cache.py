"""Keeps what torch.compile and Triton compiled for the next start.

torch's own folder is in /tmp, which job schedulers empty. Here it is below the user's cache folder,
one for each host: processes of a host share it (torch writes under temporary names and renames),
and hosts that share a home directory never wait for each other's locks. What the user has set in
TORCHINDUCTOR_CACHE_DIR or TRITON_CACHE_DIR stays.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from palm_ds.common.cache_folder import cache_folder

TORCH, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


def use_compile_cache() -> Path | None:
    """Set the folders for this process and those it starts; they are made when something is
    compiled. Returns torch's; None if the user's cache cannot be written to, so that torch uses its
    own."""
    if TORCH in os.environ:
        return Path(os.environ[TORCH])
    folder = cache_folder() / "compile" / socket.gethostname()
    if not os.access(_nearest(folder), os.W_OK):
        return None
    os.environ[TORCH] = str(folder)
    os.environ.setdefault(TRITON, str(folder / "triton"))
    return folder


def _nearest(folder: Path) -> Path:
    """The folder, or the first above it that exists."""
    return next(each for each in (folder, *folder.parents) if each.exists())
