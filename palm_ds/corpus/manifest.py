"""What a finished corpus says of itself: counts, options, tokenizer, and a hash of every file.

`manifest.json` is written last and replaced in one step, so that a corpus is what its manifest
says or is refused. It holds no time and no path of the machine: the same input and options give
the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from palm_ds.common.errors import UserError
from palm_ds.common.file_hash import sha256_of_file
from palm_ds.common.json_files import write_json

VERSION = 1
UNITS = ("word", "phrase", "entity")
"""Annotations that mark units: 1 at the first token of each."""
_LATER = ("units",)
"""Keys that manifests written by older versions lack."""
NAME = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One Arrow file."""

    name: str
    documents: int
    sentences: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of manifest.json."""

    version: int = VERSION
    documents: int
    sentences: int
    tokens: int
    text_bytes: int = 0  # UTF-8 bytes of the documents' text
    rejected: int = 0  # lines and rows that were not taken; rejected.jsonl names them
    ids_type: str  # uint8, uint16 or uint32
    marks: tuple[str, ...]  # the columns beside `id` and `ids`, in order
    units: Mapping[str, int] = field(default_factory=dict)  # words, phrases and entities, by column
    tokenizer: Mapping[str, Any]  # fingerprint, kind, size
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[Mapping[str, Any], ...] = ()
    shards: tuple[Shard, ...]
    files: Mapping[str, Mapping[str, Any]]  # name -> bytes, sha256


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replaces the manifest in one step."""
    write_json(folder / NAME, asdict(manifest))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder that should be a corpus."""
    if not folder.is_dir():
        raise UserError(f"corpus {folder}: no such folder; make one with palm-ds prepare")
    file = folder / NAME
    if not file.is_file():
        raise UserError(f"corpus {folder}: no {NAME}; not a corpus, or not finished")
    try:
        state = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"{file}: not JSON: {error}") from None
    return _manifest_from(state, file)


def _manifest_from(state: Any, file: Path) -> Manifest:
    if not isinstance(state, dict) or "version" not in state:
        raise UserError(f"{file}: not the manifest of a corpus: it has no key `version`")
    if state["version"] != VERSION:
        raise UserError(
            f"{file}: version {state['version']!r}, where this program reads {VERSION}; "
            "prepare the corpus again"
        )
    names = [f.name for f in fields(Manifest)]
    names = [name for name in names if name in state or name not in _LATER]
    missing = [name for name in names if name not in state]
    if missing:
        raise UserError(f"{file}: key `{missing[0]}` is missing; prepare the corpus again")
    try:
        values = {name: state[name] for name in names}
        values["marks"] = tuple(values["marks"])
        values["inputs"] = tuple(values["inputs"])
        values["shards"] = tuple(Shard(**shard) for shard in values["shards"])
        return Manifest(**values)
    except TypeError as error:
        raise UserError(f"{file}: damaged: {error}; prepare the corpus again") from None


def check_files(folder: Path, manifest: Manifest, *, hashes: bool) -> None:
    """Every file that the manifest names is there, of the right size and, if asked, contents."""
    for name, stated in manifest.files.items():
        file = folder / name
        if not file.is_file():
            raise UserError(f"corpus {folder}: {name} is missing; prepare the corpus again")
        size = file.stat().st_size
        if size != stated["bytes"]:
            raise UserError(
                f"corpus {folder}: {name} has {size} bytes where the manifest says "
                f"{stated['bytes']}; copy or prepare the corpus again"
            )
        if hashes and sha256_of_file(file) != stated["sha256"]:
            raise UserError(
                f"corpus {folder}: {name} is not the file that was written (its sha256 differs "
                "from the manifest's); copy or prepare the corpus again"
            )


def describe_file(file: Path) -> dict[str, Any]:
    """The manifest's entry for a file."""
    return {"bytes": file.stat().st_size, "sha256": sha256_of_file(file)}
