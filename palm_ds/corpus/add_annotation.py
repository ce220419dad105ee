"""Adds a mark to a corpus that exists, from the same input.

    palm-ds corpus annotate data/wiki wiki/*.jsonl.gz --annotation capital

Every shard is written anew under a name of its own, with the column added and the ids compared on
the way. Then `state.json` and the manifest are replaced, each in one step and each right whichever
of them a reader finds; then the old shards go. Who has the corpus open keeps reading.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console

from palm_ds.common.config import differences
from palm_ds.common.errors import UserError
from palm_ds.common.json_files import write_json
from palm_ds.corpus.annotations import Document, Mark, apply_mark, find_mark
from palm_ds.corpus.executors import check_mpi, open_executor
from palm_ds.corpus.input.discover import Span, find_inputs
from palm_ds.corpus.input.options import input_options
from palm_ds.corpus.manifest import (
    Manifest,
    check_files,
    read_manifest,
    write_manifest,
)
from palm_ds.corpus.progress_bar import progress
from palm_ds.corpus.work_dir import (
    COLLOCATIONS,
    LABELS,
    Job,
    hash_lexicons,
    locked,
    save_job,
    text_options,
)
from palm_ds.corpus.worker import documents_of, prepared
from palm_ds.corpus.writer import HashingFile, as_arrow, content_fingerprint, write_dataset_files

log = logging.getLogger(__name__)


def add_marks(
    corpus: str | Path,
    inputs: Sequence[str],
    marks: Sequence[str],
    *,
    workers: int = 1,
    mpi: bool = False,
    console: Console | None = None,
) -> Manifest:
    """Adds the marks to the corpus in one step; it stays as it is if anything goes wrong."""
    console = console or Console(quiet=True)
    folder = Path(corpus)
    if mpi:
        check_mpi()
    manifest = read_manifest(folder)
    names = [find_mark(mark)[0] for mark in marks]
    for i, name in enumerate(names):
        if name in manifest.marks or name in names[:i]:
            raise UserError(f"corpus {folder}: has the mark {name!r} already")
    check_files(folder, manifest, hashes=False)
    job = _job(folder, manifest, inputs, marks)
    working = folder.with_name(folder.name + ".adding")
    working.mkdir(exist_ok=True)
    with locked(working):
        _lay_out(working, folder, job, manifest)
        tasks = [(str(working), str(folder), i, s.name) for i, s in enumerate(manifest.shards)]
        with (
            progress(console, sum(item.bytes for item in job.inputs)) as watch,
            open_executor(workers=workers, mpi=mpi, watch=watch) as run,
        ):
            files = list(run(_rewrite, tasks))
        manifest = _commit(working, folder, manifest, files, names)
        shutil.rmtree(working)
    log.info("%s: marks %s", folder, ", ".join(manifest.marks))
    return manifest


def _job(folder: Path, manifest: Manifest, inputs: Sequence[str], marks: Sequence[str]) -> Job:
    """The job the corpus was made by, with the inputs as they are found now."""
    options = manifest.options
    if "units" not in options:
        raise UserError(f"corpus {folder}: was not made from text; a mark cannot be added to it")
    source = input_options(options["input"])
    found, _ = find_inputs(inputs, source)
    text = text_options(options["text"])
    job = Job(
        text=text,
        input=source,
        tokenizer=options["tokenizer"],
        marks=tuple(marks),
        strict=False,
        sample_bytes=options["sample_bytes"],
        lexicons=hash_lexicons([*text.lexicon_phrase, *text.lexicon_entity]),
        inputs=found,
        units=tuple(tuple(Span(*span) for span in unit) for unit in options["units"]),
    )
    there = {"inputs": list(manifest.inputs), "lexicons": options["lexicons"]}
    now = {"inputs": list(job.input_entries()), "lexicons": dict(job.lexicons)}
    if changed := differences(there, now):
        raise UserError(f"corpus {folder}: was made from another input ({changed[0]})")
    return job


def _lay_out(working: Path, folder: Path, job: Job, manifest: Manifest) -> None:
    """Puts into the working folder what a worker looks for in one."""
    shutil.copytree(folder / "tokenizer", working / "tokenizer", dirs_exist_ok=True)
    (working / COLLOCATIONS).unlink(missing_ok=True)
    if (folder / COLLOCATIONS).is_file():
        shutil.copy(folder / COLLOCATIONS, working / COLLOCATIONS)
    write_json(working / LABELS, manifest.options.get("labels", []))
    save_job(working, job)


def _next_name(name: str) -> str:
    """data-00000-of-00002.arrow, data-00000-of-00002-v2.arrow, ...-v3.arrow"""
    stem, _, version = name.removesuffix(".arrow").partition("-v")
    return f"{stem}-v{int(version or 1) + 1}.arrow"


def _rewrite(task: tuple[str, str, int, str]) -> tuple[str, dict[str, Any]]:
    """Writes one shard anew into the working folder: its new name, and the manifest's entry."""
    working, folder, number, name = Path(task[0]), Path(task[1]), task[2], task[3]
    job, analyser, marks = prepared(working, (working / "job.json").stat().st_mtime_ns)
    documents = documents_of(job, number, analyser)
    new = _next_name(name)
    with (
        pa.memory_map(str(folder / name)) as source,
        pa.ipc.open_stream(source) as stream,
        (working / new).open("wb") as handle,
    ):
        sink = HashingFile(handle)
        schema = stream.schema
        for mark in marks:
            schema = schema.append(pa.field(mark, pa.list_(pa.uint8())))
        with pa.ipc.new_stream(sink, schema) as out:
            for batch in stream:
                out.write_batch(_with_marks(batch, schema, documents, marks, folder))
        if (extra := next(documents, None)) is not None:
            raise _other_input(folder, f"document {extra.id!r} is new")
    return new, sink.entry()


def _with_marks(
    batch: pa.RecordBatch,
    schema: pa.Schema,
    documents: Iterator[Document],
    marks: dict[str, Mark],
    folder: Path,
) -> pa.RecordBatch:
    """A record batch with a column for each mark, made of the next documents."""
    values: dict[str, list[np.ndarray]] = {name: [] for name in marks}
    offsets = batch.column("ids").offsets
    edges, ids = offsets.to_numpy(), batch.column("ids").values.to_numpy()
    for row, name in enumerate(batch.column("id").to_pylist()):
        document = next(documents, None)
        if document is None:
            raise _other_input(folder, f"document {name!r} is missing")
        if document.id != name:
            raise _other_input(folder, f"document {document.id!r} stands where {name!r} was")
        if not np.array_equal(document.ids, ids[edges[row] : edges[row + 1]]):
            raise _other_input(folder, f"document {name!r} has other tokens now")
        for mark, function in marks.items():
            values[mark].append(apply_mark(mark, function, document))
    columns = list(batch.columns)
    for some in values.values():
        columns.append(pa.ListArray.from_arrays(offsets, as_arrow(np.concatenate(some))))
    return pa.record_batch(columns, schema=schema)


def _other_input(folder: Path, what: str) -> UserError:
    return UserError(f"corpus {folder}: was made from another input: {what}; nothing was changed")


def _commit(
    working: Path,
    folder: Path,
    manifest: Manifest,
    files: Sequence[tuple[str, dict[str, Any]]],
    names: Sequence[str],
) -> Manifest:
    """Puts the new shards and then the new manifest in place, and removes what it does not name."""
    old = {shard.name for shard in manifest.shards}
    shards = tuple(
        replace(shard, name=name) for shard, (name, _) in zip(manifest.shards, files, strict=True)
    )
    entries = {name: entry for name, entry in manifest.files.items() if name not in old}
    new = replace(
        manifest,
        marks=(*manifest.marks, *names),
        shards=shards,
        files={**dict(files), **entries},
    )
    for name, _ in files:
        (working / name).replace(folder / name)
    write_dataset_files(folder, shards, content_fingerprint(entry for _, entry in files))
    write_manifest(folder, new)
    for file in folder.glob("data-*.arrow"):
        if file.name not in new.files:
            file.unlink()
    return new
