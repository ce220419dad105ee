"""SHA-256 of files, texts and plain values, in hexadecimal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

_BLOCK = 1 << 20


def sha256_of_file(path: Path) -> str:
    """SHA-256 of a file's contents, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def hash_of_text(text: str) -> str:
    """SHA-256 of a text as UTF-8."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def fingerprint(value: object, default: Callable[[object], object] | None = None) -> str:
    """16 digits of the hash of a value as JSON, whatever the order of its keys. `default` makes
    JSON of what is none. Stored in run folders: it must not change."""
    return hash_of_text(json.dumps(value, sort_keys=True, default=default))[:16]
