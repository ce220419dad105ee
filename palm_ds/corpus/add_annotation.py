"""Adds annotations to an existing corpus, from the same input.

    palm-ds corpus annotate data/wiki wiki/*.jsonl.gz --annotation capital

Every shard is rewritten under a new name with the annotations added, and its ids are compared with
the old ones. Then `state.json` and the manifest are replaced atomically (either order is
consistent), and the old shards are removed. Processes that have the corpus open can keep reading
the shards that they have mapped, but no others; a run resumes with the files it began with only.
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

from palm_ds.common.atomic import naming
from palm_ds.common.config import differences
from palm_ds.common.errors import UserError
from palm_ds.common.json_files import write_json
from palm_ds.common.remote_files import is_url
from palm_ds.corpus import work_dir
from palm_ds.corpus.annotations import Document, TokenAnnotation, apply_annotation, find_annotation
from palm_ds.corpus.executors import check_mpi, open_executor
from palm_ds.corpus.input.discover import InputSpan, find_inputs
from palm_ds.corpus.manifest import Manifest, check_files, read_manifest, write_manifest
from palm_ds.corpus.options import InputOptions, ScreenOptions, TextOptions, restored
from palm_ds.corpus.progress_bar import show_progress
from palm_ds.corpus.worker import load_worker, read_documents
from palm_ds.corpus.writer import HashingFile, as_arrow, content_fingerprint, write_dataset_files

log = logging.getLogger(__name__)


def add_annotations(
    corpus: str | Path,
    inputs: Sequence[str],
    annotations: Sequence[str],
    *,
    workers: int = 1,
    mpi: bool = False,
    console: Console | None = None,
) -> Manifest:
    """Adds the annotations to the corpus atomically: if anything fails, it is unchanged."""
    console = console or Console(quiet=True)
    if is_url(corpus):
        raise UserError(
            f"corpus {corpus}: annotations are added to a corpus on this machine; copy it here "
            "first, or prepare it with --annotation"
        )
    folder = Path(corpus)
    if mpi:
        check_mpi()
    manifest = read_manifest(folder)
    names = [find_annotation(annotation)[0] for annotation in annotations]
    for i, name in enumerate(names):
        if name in manifest.annotations or name in names[:i]:
            raise UserError(f"corpus {folder}: already has the annotation {name!r}")
    check_files(folder, manifest, hashes=False)
    job = _job(folder, manifest, inputs, annotations)
    working = folder.with_name(folder.name + ".adding")
    working.mkdir(exist_ok=True)
    with naming(folder), work_dir.exclusive_lock(working):
        _lay_out(working, folder, job, manifest)
        tasks = [(str(working), str(folder), i, s.name) for i, s in enumerate(manifest.shards)]
        with (
            show_progress(console, sum(item.bytes for item in job.inputs)) as watch,
            open_executor(workers=workers, mpi=mpi, watch=watch) as run,
        ):
            files = list(run(_rewrite, tasks))
        manifest = _commit(working, folder, manifest, files, names)
        shutil.rmtree(working)
    log.info("%s: annotations %s", folder, ", ".join(manifest.annotations))
    return manifest


def _job(
    folder: Path, manifest: Manifest, inputs: Sequence[str], annotations: Sequence[str]
) -> work_dir.PreparationJob:
    """The job that prepared the corpus, with the inputs as they are now."""
    options = manifest.options
    if "units" not in options:
        raise UserError(
            f"corpus {folder}: was not prepared from text; annotations cannot be added to it"
        )
    source = restored(InputOptions, options["input"])
    files, _ = find_inputs(inputs, source)
    text = restored(TextOptions, options["text"])
    screening = {x: y for x, y in options.get("screen", {}).items() if x != "not_in"}
    job = work_dir.PreparationJob(
        text=text,
        input=source,
        tokenizer=options["tokenizer"],
        annotations=tuple(annotations),
        strict=False,
        sample_bytes=options["sample_bytes"],
        lexicons=work_dir.hash_lexicons([*text.lexicon_phrase, *text.lexicon_entity]),
        inputs=files,
        units=tuple(tuple(InputSpan(*span) for span in unit) for unit in options["units"]),
        screen=restored(ScreenOptions, screening),
    )
    there = {"inputs": list(manifest.inputs), "lexicons": options["lexicons"]}
    now = {"inputs": list(job.input_entries()), "lexicons": dict(job.lexicons)}
    if changed := differences(there, now):
        raise UserError(
            f"corpus {folder}: was prepared from a different input ({changed[0]}); give the same"
        )
    return job


def _lay_out(working: Path, folder: Path, job: work_dir.PreparationJob, manifest: Manifest) -> None:
    """Fills the working folder with the files that workers read."""
    shutil.copytree(folder / "tokenizer", working / "tokenizer", dirs_exist_ok=True)
    (working / work_dir.COLLOCATIONS).unlink(missing_ok=True)
    if (folder / work_dir.COLLOCATIONS).is_file():
        shutil.copy(folder / work_dir.COLLOCATIONS, working / work_dir.COLLOCATIONS)
    write_json(working / work_dir.LABELS, manifest.options.get("labels", []))
    work_dir.save_job(working, job)


def _next_name(name: str) -> str:
    """data-00000-of-00002.arrow, data-00000-of-00002-v2.arrow, ...-v3.arrow"""
    stem, _, version = name.removesuffix(".arrow").partition("-v")
    return f"{stem}-v{int(version or 1) + 1}.arrow"


def _rewrite(task: tuple[str, str, int, str]) -> tuple[str, dict[str, Any]]:
    """Rewrites one shard into the working folder; returns its new name and manifest entry."""
    working, folder, number, name = Path(task[0]), Path(task[1]), task[2], task[3]
    job, analyzer, annotations = load_worker(working, (working / "job.json").stat().st_mtime_ns)
    documents, dropped = read_documents(job, number, analyzer), job.screen.active
    new = _next_name(name)
    with (
        pa.memory_map(str(folder / name)) as source,
        pa.ipc.open_stream(source) as stream,
        (working / new).open("wb") as handle,
    ):
        sink = HashingFile(handle)
        schema = stream.schema
        for annotation in annotations:
            schema = schema.append(pa.field(annotation, pa.list_(pa.uint8())))
        with pa.ipc.new_stream(sink, schema) as out:
            for batch in stream:
                out.write_batch(
                    _with_annotations(batch, schema, documents, dropped, annotations, folder)
                )
        if not dropped and (extra := next(documents, None)) is not None:
            raise _other_input(folder, f"document {extra.id!r} is new")
    return new, sink.entry()


def _with_annotations(
    batch: pa.RecordBatch,
    schema: pa.Schema,
    documents: Iterator[Document],
    some_dropped: bool,
    annotations: dict[str, TokenAnnotation],
    folder: Path,
) -> pa.RecordBatch:
    """Appends a column per annotation to a record batch, from the next documents. If some were
    dropped from the corpus, those with other ids or tokens are skipped."""
    values: dict[str, list[np.ndarray]] = {name: [] for name in annotations}
    offsets = batch.column("ids").offsets
    edges, ids = offsets.to_numpy(), batch.column("ids").values.to_numpy()
    for row, name in enumerate(batch.column("id").to_pylist()):
        tokens = ids[edges[row] : edges[row + 1]]
        document = next(documents, None)
        while some_dropped and document is not None and not _is_same(document, name, tokens):
            document = next(documents, None)
        if document is None:
            raise _other_input(folder, f"document {name!r} is missing")
        if document.id != name:
            raise _other_input(folder, f"document {document.id!r} is in the place of {name!r}")
        if not _is_same(document, name, tokens):
            raise _other_input(folder, f"document {name!r} has different tokens")
        for annotation, function in annotations.items():
            values[annotation].append(apply_annotation(annotation, function, document))
    columns = list(batch.columns)
    for some in values.values():
        columns.append(pa.ListArray.from_arrays(offsets, as_arrow(np.concatenate(some))))
    return pa.record_batch(columns, schema=schema)


def _is_same(document: Document, name: str, tokens: np.ndarray) -> bool:
    return document.id == name and np.array_equal(document.ids, tokens)


def _other_input(folder: Path, what: str) -> UserError:
    return UserError(
        f"corpus {folder}: was prepared from a different input: {what}; nothing was changed"
    )


def _commit(
    working: Path,
    folder: Path,
    manifest: Manifest,
    files: Sequence[tuple[str, dict[str, Any]]],
    names: Sequence[str],
) -> Manifest:
    """Moves the new shards and then the new manifest into place, and removes the old shards."""
    old = {shard.name for shard in manifest.shards}
    shards = tuple(
        replace(shard, name=name) for shard, (name, _) in zip(manifest.shards, files, strict=True)
    )
    entries = {name: entry for name, entry in manifest.files.items() if name not in old}
    new = replace(
        manifest,
        annotations=(*manifest.annotations, *names),
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
