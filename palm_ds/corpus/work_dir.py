"""The working folder of a preparation, `OUT.partial`, from which an interrupted run resumes.

    OUT.partial/job.json            inputs and options; a run with different ones is refused
                tokenizer/          loaded or trained
                collocations.tsv    mined phrases
                labels.json         label names of pairs
                dropped.jsonl       documents that the screening dropped
                data-*.arrow        finished shards
                parts/00003.json    written last: shard 3 is finished, with this hash

Workers on any machine read all they need from this folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from palm_ds.common.config import differences
from palm_ds.common.errors import UserError
from palm_ds.common.files import hash_of_text, locked, sha256_of_file
from palm_ds.common.json_files import write_json
from palm_ds.corpus.input.discover import Input, InputSpan, WorkUnit
from palm_ds.corpus.manifest import Shard
from palm_ds.corpus.options import InputOptions, ScreenOptions, TextOptions, restored
from palm_ds.corpus.writer import ShardSummary, load_lengths, save_lengths, shard_name

NAME = "job.json"
COLLOCATIONS = "collocations.tsv"
LABELS = "labels.json"
DROPPED = "dropped.jsonl"


@dataclass(frozen=True, kw_only=True)
class PreparationJob:
    """Everything that determines the bytes of a corpus."""

    text: TextOptions
    input: InputOptions
    tokenizer: Mapping[str, Any]  # {"path", "fingerprint"} or {"train", "vocab_size"}
    annotations: tuple[str, ...]  # names, or module:function
    strict: bool
    sample_bytes: int  # of text, for training a tokenizer and mining collocations
    lexicons: Mapping[str, str]  # sha256 of each lexicon file
    inputs: tuple[Input, ...]
    units: tuple[WorkUnit, ...]
    screen: ScreenOptions = ScreenOptions()
    excluded: tuple[Input, ...] = ()  # whose documents must not be in the corpus
    excluded_units: tuple[WorkUnit, ...] = ()

    def options(self) -> dict[str, Any]:
        """The options recorded in the manifest."""
        return {
            "text": asdict(self.text),
            "input": asdict(self.input),
            "tokenizer": dict(self.tokenizer),
            "sample_bytes": self.sample_bytes,
            "lexicons": dict(self.lexicons),
            "units": [[list(vars(span).values()) for span in unit] for unit in self.units],
            **self._screening(),
        }

    def _screening(self) -> dict[str, Any]:
        """Settings by which documents were dropped, if any were."""
        if not self.screen.active:
            return {}
        excluded = [[item.name, item.bytes] for item in self.excluded]
        return {"screen": {**asdict(self.screen), "not_in": excluded}}

    def input_entries(self) -> tuple[dict[str, Any], ...]:
        """The inputs recorded in the manifest."""
        keys = ("name", "kind", "compression", "bytes", "rows")
        entries = tuple({key: getattr(item, key) for key in keys} for item in self.inputs)
        for item, entry in zip(self.inputs, entries, strict=True):
            if item.kind == "ernie":
                entry["mask_word"] = item.mask_word
        return entries


def save_job(folder: Path, job: PreparationJob) -> None:
    """Writes job.json."""
    write_json(folder / NAME, _state(job))


def _state(job: PreparationJob) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(job)))  # with tuples as lists, as read from JSON


def load_job(folder: Path) -> PreparationJob:
    """Reads the job of a working folder. A worker keeps it between its work units: that of many
    input files takes seconds to read."""
    return _read_job(folder, (folder / NAME).stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _read_job(folder: Path, made: int) -> PreparationJob:
    """`made`: the time of job.json, so that a new job is not taken for the one kept."""
    state = json.loads((folder / NAME).read_text("utf-8"))
    state["text"] = restored(TextOptions, state["text"])
    state["input"] = restored(InputOptions, state["input"])
    state["annotations"] = tuple(state["annotations"])
    for key in ("inputs", "excluded"):
        state[key] = tuple(Input(**item) for item in state[key])
    for key in ("units", "excluded_units"):
        state[key] = tuple(tuple(InputSpan(**s) for s in unit) for unit in state[key])
    state["screen"] = restored(ScreenOptions, state["screen"])
    return PreparationJob(**state)


def save_dropped(folder: Path, number: int, records: Sequence[int]) -> None:
    """Writes the numbers of a unit's records that are dropped, ascending."""
    np.save(part_file(folder, number, ".dropped.npy"), np.array(records, np.int64))


def load_dropped(folder: Path, number: int) -> frozenset[int]:
    """The numbers of a unit's records that are dropped."""
    file = part_file(folder, number, ".dropped.npy")
    return frozenset(np.load(file).tolist()) if file.is_file() else frozenset()


def changed_option(folder: Path, job: PreparationJob) -> str | None:
    """The first difference to the folder's job, such as "text.lower: True -> False", or None."""
    try:
        there = json.loads((folder / NAME).read_text("utf-8"))
    except (OSError, ValueError):
        return "job.json cannot be read"
    return next(iter(differences(there, _state(job))), None)


def exclusive_lock(folder: Path) -> AbstractContextManager[None]:
    """Admits one preparation at a time to a folder. The lock ends with the process in any case."""
    busy = f"{folder}: another preparation is writing to this folder"
    return locked(folder / ".lock", busy=busy)


def part_file(folder: Path, number: int, suffix: str) -> Path:
    """The path of parts/00003.json and its companions."""
    return folder / "parts" / f"{number:05d}{suffix}"


def save_part(folder: Path, number: int, summary: ShardSummary, about: Mapping[str, Any]) -> None:
    """Records that a shard is finished; `about` has the counts of lines and rejections."""
    save_lengths(part_file(folder, number, ".npz"), summary.lengths)
    state = {
        "shard": asdict(summary.shard),
        "text_bytes": summary.text_bytes,
        "units": dict(summary.span_counts),
        "file": dict(summary.file),
        "arrays": sha256_of_file(part_file(folder, number, ".npz")),
        **about,
    }
    write_json(part_file(folder, number, ".json"), state)


def load_part(folder: Path, number: int) -> tuple[ShardSummary, dict[str, Any]]:
    """Reads a finished shard's summary, and the state that `save_part` wrote."""
    state = json.loads(part_file(folder, number, ".json").read_text("utf-8"))
    summary = ShardSummary(
        shard=Shard(**state["shard"]),
        text_bytes=state["text_bytes"],
        span_counts=state["units"],
        file=state["file"],
        lengths=partial(load_lengths, part_file(folder, number, ".npz")),
    )
    return summary, state


def is_done(folder: Path, number: int, units: int) -> bool:
    """Whether a shard is finished and its files are unchanged."""
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
    """Reads the pairs in collocations.tsv."""
    file = folder / COLLOCATIONS
    if not file.is_file():
        return []
    rows = (line.split("\t")[:2] for line in file.read_text("utf-8").split("\n")[1:] if line)
    return [(a, b) for a, b in rows]


def read_labels(folder: Path) -> list[str]:
    """Reads the names in labels.json."""
    file = folder / LABELS
    return json.loads(file.read_text("utf-8")) if file.is_file() else []


def hash_lexicons(files: Sequence[str]) -> dict[str, str]:
    """The SHA-256 of each file."""
    out = {}
    for file in files:
        try:
            out[file] = sha256_of_file(Path(file))
        except OSError as error:
            raise UserError(f"lexicon {file}: cannot be read: {error.strerror}") from None
    return out


def hash_tokenizer(folder: Path) -> str:
    """A hash of a tokenizer's file or folder, without loading it."""
    files = sorted(p for p in folder.rglob("*") if p.is_file()) if folder.is_dir() else [folder]
    return hash_of_text("".join(map(sha256_of_file, files)))
