"""Writes JSON files: UTF-8, indented, complete or absent."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from palm_ds.common.atomic import write_file_atomically


def write_json(path: str | Path, content: object) -> None:
    """Replaces a file with `content`, atomically."""
    text = json.dumps(content, indent=2, ensure_ascii=False)
    write_file_atomically(path, text + "\n")


def nan_to_null(value: object) -> object:
    """The same values with NaN and infinities, which JSON lacks, replaced by None."""
    if isinstance(value, Mapping):
        return {str(key): nan_to_null(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [nan_to_null(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
