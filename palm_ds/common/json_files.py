"""JSON files: UTF-8, indented, complete or absent; and sealed ones, which carry a hash of their own
bytes, so that no change to them goes unnoticed.

    {
      "sha256_of_this_file": "3a7b...",      its bytes with these 64 digits as zeros
      ...

Files that others are checked against need this: a flipped bit in a count or in the hash of another
file would otherwise be believed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from palm_ds.common.atomic import write_file_atomically
from palm_ds.common.files import hash_of_text


def write_json(path: str | Path, content: object) -> None:
    """Replaces a file with `content`, atomically."""
    text = json.dumps(content, indent=2, ensure_ascii=False)
    write_file_atomically(path, text + "\n")


SEAL = "sha256_of_this_file"
_ZEROS = "0" * 64


def write_sealed_json(path: str | Path, content: Mapping[str, object]) -> None:
    """Replaces a file with `content` and its seal, atomically."""
    write_file_atomically(path, sealed_json(content))


def sealed_json(content: Mapping[str, object]) -> str:
    """`content` with its seal, as the text of a file."""
    text = json.dumps({SEAL: _ZEROS, **content}, indent=2, ensure_ascii=False) + "\n"
    return text.replace(_ZEROS, hash_of_text(text), 1)


def seal_problem(text: str, state: Mapping[str, object]) -> str:
    """Reason why the text of a file is not as it was written, or nothing. `state`: its parsed
    JSON."""
    seal = state.get(SEAL)
    if not isinstance(seal, str) or len(seal) != len(_ZEROS):
        return f"`{SEAL}` is missing"
    if hash_of_text(text.replace(seal, _ZEROS, 1)) != seal:
        return "has changed since it was written (checksum mismatch)"
    return ""
