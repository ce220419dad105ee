"""A preparation in progress: `OUT.partial`, which a run that was stopped finds again.

    OUT.partial/job.json            what is to be made, and of what; a run with another is refused
                tokenizer/          as loaded or trained
                collocations.tsv    as mined
                labels.json         of pairs: their labels' names
                data-*.arrow        finished shards
                parts/00003.json    written last: shard 3 is done, with this hash

Workers, on whatever machine, read all they need from this folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from palm_ds.common.config import differences
from palm_ds.common.errors import UserError
from palm_ds.common.file_hash import sha256_of_file
from palm_ds.common.json_files import write_json
from palm_ds.corpus.input.discover import Input, Span, Unit
from palm_ds.corpus.input.options import InputOptions, input_options
from palm_ds.corpus.manifest import Shard
from palm_ds.corpus.options import TextOptions
from palm_ds.corpus.writer import ShardSummary, save_arrays, shard_name

NAME = "job.json"
COLLOCATIONS = "collocations.tsv"
LABELS = "labels.json"


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that decides the bytes of a corpus."""

    text: TextOptions
    input: InputOptions
    tokenizer: Mapping[str, Any]  # {"path", "fingerprint"} or {"train", "vocab_size"}
    marks: tuple[str, ...]  # names, or module:function
    strict: bool
    sample_bytes: int  # of text, for training a tokenizer and mining collocations
    lexicons: Mapping[str, str]  # sha256 of each lexicon file
    inputs: tuple[Input, ...]
    units: tuple[Unit, ...]

    def options(self) -> dict[str, Any]:
        """What the manifest keeps of it."""
        return {
            "text": asdict(self.text),
            "input": asdict(self.input),
            "tokenizer": dict(self.tokenizer),
            "sample_bytes": self.sample_bytes,
            "lexicons": dict(self.lexicons),
            "units": [[list(vars(span).values()) for span in unit] for unit in self.units],
        }

    def input_entries(self) -> tuple[dict[str, Any], ...]:
        """The manifest's list of inputs."""
        keys = ("name", "kind", "compression", "bytes", "rows")
        entries = tuple({key: getattr(item, key) for key in keys} for item in self.inputs)
        for item, entry in zip(self.inputs, entries, strict=True):
            if item.kind == "ernie":
                entry["mask_word"] = item.mask_word
        return entries


def save_job(folder: Path, job: Job) -> None:
    """Writes job.json."""
    write_json(folder / NAME, _state(job))


def _state(job: Job) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(job)))  # tuples as lists, as they come back


def load_job(folder: Path) -> Job:
    """The job of a folder that this program made."""
    state = json.loads((folder / NAME).read_text("utf-8"))
    state["text"] = text_options(state["text"])
    state["input"] = input_options(state["input"])
    state["marks"] = tuple(state["marks"])
    state["inputs"] = tuple(Input(**item) for item in state["inputs"])
    state["units"] = tuple(tuple(Span(**s) for s in unit) for unit in state["units"])
    return Job(**state)


def text_options(state: Mapping[str, Any]) -> TextOptions:
    """Options as JSON gives them back: lists are tuples again."""
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in state.items()}
    return TextOptions(**values)


def difference(folder: Path, job: Job) -> str | None:
    """The first option that has changed since the folder's job: "text.lower: True -> False"."""
    try:
        there = json.loads((folder / NAME).read_text("utf-8"))
    except (OSError, ValueError):
        return "its job.json cannot be read"
    return next(iter(differences(there, _state(job))), None)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One preparation at a time in a folder. The lock ends with the process, however it ends."""
    with (folder / ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: another preparation is writing there") from None
        yield


def part_file(folder: Path, number: int, suffix: str) -> Path:
    """parts/00003.json and its companions."""
    return folder / "parts" / f"{number:05d}{suffix}"


def save_part(folder: Path, number: int, summary: ShardSummary, about: Mapping[str, Any]) -> None:
    """Says that a shard is done; `about`: counts of lines and rejections."""
    save_arrays(part_file(folder, number, ".npz"), summary)
    state = {
        "shard": asdict(summary.shard),
        "text_bytes": summary.text_bytes,
        "units": dict(summary.units),
        "file": dict(summary.file),
        "arrays": sha256_of_file(part_file(folder, number, ".npz")),
        **about,
    }
    write_json(part_file(folder, number, ".json"), state)


def load_part(folder: Path, number: int) -> tuple[ShardSummary, dict[str, Any]]:
    """A finished shard's summary and what `save_part` was told about it."""
    state = json.loads(part_file(folder, number, ".json").read_text("utf-8"))
    with np.load(part_file(folder, number, ".npz")) as arrays:
        summary = ShardSummary(
            shard=Shard(**state["shard"]),
            text_bytes=state["text_bytes"],
            units=state.get("units", {}),
            file=state["file"],
            **{name: arrays[name] for name in arrays.files},
        )
    return summary, state


def is_done(folder: Path, number: int, units: int) -> bool:
    """Whether a shard was finished, and is still what was written then."""
    try:
        state = json.loads(part_file(folder, number, ".json").read_text("utf-8"))
        shard = folder / shard_name(number, units)
        return (
            sha256_of_file(shard) == state["file"]["sha256"]
            and sha256_of_file(part_file(folder, number, ".npz")) == state["arrays"]
            and (not state["rejected"] or part_file(folder, number, ".rejected").is_file())
        )
    except (OSError, ValueError, KeyError):
        return False


def read_collocations(folder: Path) -> list[tuple[str, str]]:
    """The pairs in collocations.tsv."""
    file = folder / COLLOCATIONS
    if not file.is_file():
        return []
    rows = (line.split("\t")[:2] for line in file.read_text("utf-8").split("\n")[1:] if line)
    return [(a, b) for a, b in rows]


def read_labels(folder: Path) -> list[str]:
    """The names in labels.json."""
    file = folder / LABELS
    return json.loads(file.read_text("utf-8")) if file.is_file() else []


def hash_lexicons(files: Sequence[str]) -> dict[str, str]:
    """sha256 of each file."""
    out = {}
    for file in files:
        try:
            out[file] = sha256_of_file(Path(file))
        except OSError as error:
            raise UserError(f"lexicon {file}: cannot be read: {error.strerror}") from None
    return out


def tokenizer_hash(folder: Path) -> str:
    """A hash of a tokenizer's file or folder, without loading it."""
    files = sorted(p for p in folder.rglob("*") if p.is_file()) if folder.is_dir() else [folder]
    digest = hashlib.sha256("".join(map(sha256_of_file, files)).encode())
    return digest.hexdigest()
