"""The hash of a file."""

from __future__ import annotations

import hashlib
from pathlib import Path

_BLOCK = 1 << 20


def sha256_of_file(path: Path) -> str:
    """SHA-256 of the contents as hexadecimal digits, in bounded memory."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
