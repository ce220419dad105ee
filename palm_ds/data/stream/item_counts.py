"""Numbers of a task's items in every block of a large corpus: counted once, kept on disk.

    <corpus>/index/items/<hash>.npy    (segments + blocks,) int64: items of each segment, each block

The hash covers the corpus, its split into blocks, the task's settings and code. Where the corpus
cannot be written to, the file is in the user's cache folder.
"""

from __future__ import annotations

import io
import json
import logging
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from palm_ds.common.atomic import write_file_atomically
from palm_ds.common.files import cache_folder, hash_of_text, locked
from palm_ds.common.plugins import source_code
from palm_ds.corpus.executors import open_executor
from palm_ds.corpus.mapped_shard import map_array

if TYPE_CHECKING:
    from palm_ds.data.sources.corpus import CorpusSplit
    from palm_ds.data.tasks.task import CorpusTask

log = logging.getLogger(__name__)
_VERSION = 2
"""Another one when the items of a task change, but not its own file."""
_MIN_SEGMENTS = 16
"""With fewer, starting worker processes takes longer than counting."""


@dataclass(frozen=True)
class ItemCounts:
    """The counts of one task; memory-mapped."""

    of_segments: np.ndarray  # (segments,) int64
    of_blocks: np.ndarray  # (blocks,) int64


def item_counts(task: CorpusTask, split: CorpusSplit, max_length: int) -> ItemCounts:
    """The counts of a task's items: read, or counted if no process has done so before. Processes
    wait for the one that counts."""
    name = f"{_hash_of(task, split, max_length)}.npy"
    segments = len(split.blocks.segments) - 1
    for folder in _folders(split):
        if (counts := _read(folder / name, segments + len(split.blocks))) is not None:
            return ItemCounts(counts[:segments], counts[segments:])
    file = _writable(_folders(split)) / name
    with locked(file.with_suffix(".lock")):
        if (counts := _read(file, segments + len(split.blocks))) is None:
            _write(file, _count(task, split, max_length))
            counts = _read(file, segments + len(split.blocks))
    assert counts is not None
    return ItemCounts(counts[:segments], counts[segments:])


def _hash_of(task: CorpusTask, split: CorpusSplit, max_length: int) -> str:
    files = {name: entry["sha256"] for name, entry in split.corpus.manifest.files.items()}
    text = json.dumps([_VERSION, files, split.describe(), task.input_key(), max_length])
    return hash_of_text(text + source_code(type(task)))[:32]


def _folders(split: CorpusSplit) -> list[Path]:
    return [split.corpus.folder.local / "index" / "items", cache_folder() / "items"]


def _writable(folders: list[Path]) -> Path:
    """The first folder that can be written to."""
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    return folders[-1]  # writing there fails with the reason


def _read(file: Path, entries: int) -> np.ndarray | None:
    """The counts in a file; None if it is absent or damaged."""
    try:
        counts = map_array(file)
    except (OSError, ValueError):
        return None
    return counts if counts.shape == (entries,) and counts.dtype == np.int64 else None


def _write(file: Path, counts: np.ndarray) -> None:
    buffer = io.BytesIO()
    np.save(buffer, counts)
    write_file_atomically(file, buffer.getvalue())


def _count(task: CorpusTask, split: CorpusSplit, max_length: int) -> np.ndarray:
    """(segments + blocks,) int64."""
    bounds = split.blocks.segments
    started, where = time.monotonic(), f"{task.name}: {split.corpus.path}"
    log.info("%s: counting the items of %d blocks, once", where, len(split.blocks))
    workers = (os.cpu_count() or 1) if len(bounds) > _MIN_SEGMENTS else 1
    count = partial(_count_segment, task, split, max_length)
    with open_executor(workers=workers, mpi=False) as run:
        of_blocks = list(run(count, range(len(bounds) - 1)))
    of_segments = [part.sum() for part in of_blocks]
    log.info("%s: %d items (%.0f s)", where, sum(of_segments), time.monotonic() - started)
    return np.concatenate([np.array(of_segments, np.int64), *of_blocks])


def _count_segment(
    task: CorpusTask, split: CorpusSplit, max_length: int, segment: int
) -> np.ndarray:
    """(blocks,) int64: the items of each block of one segment."""
    first, last = split.blocks.segments[segment : segment + 2]
    windows = (split.window(np.array([block])) for block in range(first, last))
    counts = (len(task.items(window, max_length)) if len(window) else 0 for window in windows)
    return np.fromiter(counts, np.int64, last - first)
