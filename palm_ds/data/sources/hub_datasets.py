"""Names of data sets on the Hugging Face hub, for the `datasets:` of a model card.

hf://datasets/owner/name@revision/train.parquet      a URL
.../datasets--owner--name/snapshots/COMMIT/...       a file in the hub's cache
a folder saved by `datasets`, a Dataset              what it was downloaded from
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_PART = r"([\w.-]+)"
_PLACES = (
    re.compile(rf"hf://datasets/{_PART}/([\w.-]+?)(?:@[^/]*)?(?:/|$)"),
    re.compile(rf"/datasets--{_PART}--{_PART}/snapshots/"),
    re.compile(rf"/([\w.-]+?)___{_PART}/"),  # the cache of `datasets` itself
)


def names_in(paths: Iterable[str]) -> set[str]:
    """{owner/name} of files, folders and URLs."""
    return {name for path in paths for name in (_name(path), *_of_folder(Path(path))) if name}


def names_of(rows: object) -> set[str]:
    """{owner/name} that a Dataset was loaded from; empty for other rows, and if it does not say."""
    info = getattr(rows, "info", None)
    urls = getattr(info, "download_checksums", None) or {}
    files: list[dict[str, Any]] = getattr(rows, "cache_files", None) or []
    named = [*urls, *(str(file.get("filename", "")) for file in files if isinstance(file, dict))]
    return {name for name in map(_name, named) if name}


def _name(path: str) -> str:
    found = next((x for place in _PLACES if (x := place.search(path))), None)
    return f"{found[1]}/{found[2]}" if found else ""


def _of_folder(folder: Path) -> set[str]:
    """Of a folder that `Dataset.save_to_disk` wrote."""
    try:
        about = json.loads((folder / "dataset_info.json").read_text("utf-8"))
        return set(map(_name, about.get("download_checksums") or {}))
    except (OSError, ValueError, AttributeError, TypeError):
        return set()
