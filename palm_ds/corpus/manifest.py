"""The manifest of a corpus: counts, options, tokenizer, and a hash of every file and of itself.

`manifest.json` is written last and replaced atomically; a corpus that does not match its manifest
is refused. It contains no timestamps and no absolute paths: the same input and options give the
same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Any

from palm_ds.common.errors import UserError, suggest_path
from palm_ds.common.files import sha256_of_file
from palm_ds.common.json_files import seal_problem, write_sealed_json

VERSION = 2
COUNTED_ANNOTATIONS = ("word", "phrase", "entity")
"""Annotations of spans, with 1 at the first token of each, that the manifest counts."""
_KEYS = {"annotations": "marks", "span_counts": "units"}
"""Keys in manifest.json that differ from the name of their field."""
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
    dropped: Mapping[str, int] = field(
        default_factory=dict
    )  # documents that were left out, by reason; dropped.jsonl names them
    ids_type: str  # uint8, uint16 or uint32
    annotations: tuple[str, ...]  # the columns after `id` and `ids`, in order
    span_counts: Mapping[str, int] = field(
        default_factory=dict
    )  # words, phrases and entities, by column
    tokenizer: Mapping[str, Any]  # fingerprint, kind, size
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[Mapping[str, Any], ...] = ()
    shards: tuple[Shard, ...]
    files: Mapping[str, Mapping[str, Any]]  # name -> bytes, sha256

    @property
    def undivided(self) -> bool:
        """Whether every file of text became one long document, for lack of an empty line."""
        texts = [entry for entry in self.inputs if entry.get("kind") == "text"]
        by_blank_line = self.options.get("input", {}).get("text_documents") == "blank_line"
        single = len(texts) == len(self.inputs) == self.documents
        return by_blank_line and single and self.sentences >= 10 * self.documents

    @property
    def languages(self) -> tuple[str, ...]:
        """The language of its documents, of pairs those of the two texts; empty: it names none."""
        return tuple(self.options.get("input", {}).get("languages", ()))

    def counts(self) -> dict[str, Any]:
        """Size of the corpus: its documents, tokens and more, in numbers."""
        names = ("documents", "sentences", "tokens", "text_bytes", "rejected", "dropped")
        size = self.tokenizer["size"]
        return {name: getattr(self, name) for name in names} | {"vocabulary": size}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replaces the manifest atomically."""
    state = {_KEYS.get(name, name): value for name, value in asdict(manifest).items()}
    write_sealed_json(folder / NAME, {**state, "version": VERSION})


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a corpus. Raises UserError if the folder is not a finished corpus."""
    if not folder.is_dir():
        hint = suggest_path(folder) or "; create it with palm-ds prepare"
        raise UserError(f"corpus {folder}: no such folder{hint}")
    file = folder / NAME
    if not file.is_file():
        raise UserError(f"corpus {folder}: no {NAME}; not a corpus, or not finished")
    try:
        text = file.read_bytes().decode("utf-8")
        state = json.loads(text)
    except ValueError as error:
        raise UserError(f"{file}: not JSON: {error}") from None
    _check_seal(text, state, file)
    return _manifest_from(state, file)


def _check_seal(text: str, state: object, file: Path) -> None:
    """Raises UserError if the manifest is not as it was written."""
    if not isinstance(state, dict) or "version" not in state:
        raise UserError(f"{file}: not a corpus manifest: it has no key `version`")
    if state["version"] != VERSION:
        raise UserError(
            f"{file}: version {state['version']!r}, but this program reads version {VERSION}; "
            "prepare the corpus again"
        )
    if problem := seal_problem(text, state):
        raise UserError(f"{file}: {problem}; copy or prepare the corpus again")


def _manifest_from(state: Mapping[str, Any], file: Path) -> Manifest:
    keys = {f.name: _KEYS.get(f.name, f.name) for f in fields(Manifest)}
    missing = [key for key in keys.values() if key not in state]
    if missing:
        raise UserError(f"{file}: key `{missing[0]}` is missing; prepare the corpus again")
    try:
        values = {name: state[key] for name, key in keys.items()}
        values["annotations"] = tuple(values["annotations"])
        values["inputs"] = tuple(values["inputs"])
        values["shards"] = tuple(Shard(**shard) for shard in values["shards"])
        _check_names([*values["files"], *(shard.name for shard in values["shards"])])
        return Manifest(**values)
    except (TypeError, ValueError) as error:
        raise UserError(f"{file}: damaged: {error}; prepare the corpus again") from None


def _check_names(names: Iterable[object]) -> None:
    """Raises ValueError for a file elsewhere: those of a corpus behind a URL are written to the
    cache under their names."""
    for name in names:
        path = PurePosixPath(str(name))
        inside = not path.is_absolute() and ".." not in path.parts and path.name
        if not inside or str(path) != name or not str(path).isprintable():
            raise ValueError(f"{str(name)[:80]!r} is not a file within it")


def check_files(folder: Path, manifest: Manifest, *, hashes: bool) -> None:
    """Checks that every file in the manifest exists and has its size and, with `hashes`, its
    contents."""
    for name, stated in manifest.files.items():
        if problem := file_problem(folder / name, stated, hashes=hashes):
            raise UserError(f"corpus {folder}: {name} {problem}; copy or prepare the corpus again")


def file_problem(file: Path, stated: Mapping[str, Any], *, hashes: bool) -> str:
    """The difference of a file from its entry in the manifest, or nothing."""
    if not file.is_file():
        return "is missing"
    size = file.stat().st_size
    if size != stated["bytes"]:
        return f"has {size} bytes, but the manifest says {stated['bytes']}"
    if hashes and sha256_of_file(file) != stated["sha256"]:
        return "was changed or damaged (its sha256 differs from the manifest's)"
    return ""


def describe_file(file: Path) -> dict[str, Any]:
    """The manifest entry of a file."""
    return {"bytes": file.stat().st_size, "sha256": sha256_of_file(file)}
