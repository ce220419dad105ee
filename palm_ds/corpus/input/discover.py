"""Finds input files and splits them into work units.

    inputs, ignored = find_inputs(["news/*.jsonl.gz", "books/", "embedded"], InputOptions())
    units = split_into_units(inputs, InputOptions(), size=4 << 20)

A work unit is a list of spans: parts of files that end at the end of a document. Units depend only
on the order and sizes of the inputs, so that every worker writes the same shard for a unit.
"""

from __future__ import annotations

import glob
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from palm_ds.common.errors import UserError
from palm_ds.common.files import check_is_no_pipe
from palm_ds.common.remote_files import RemoteFolder, is_url
from palm_ds.common.rows.columnar import open_dataset
from palm_ds.common.rows.stored import first_bytes, how_to_convert, open_stored, suffixes_of
from palm_ds.corpus.input import ernie_lines, python_docs
from palm_ds.corpus.options import InputOptions

_KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",  # or "array", by its first byte
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".tsv": "tsv",
    ".csv": "csv",
}
_ROWS = ("jsonl", "parquet", "arrow")
_Files = list[tuple[Path | str, str]]  # (path or URL, displayed name)
_TAKES = {
    "documents": (*_ROWS, "text"),
    "pairs": (*_ROWS, "tsv", "csv"),
    "dialogues": _ROWS,
    "ernie": (),
}
_VERSIONS = ("ETag", "etag", "mtime", "LastModified", "updated")  # as file systems call it
_COMPRESSION_RATIO = 3  # of compressed text, roughly
EMBEDDED = "embedded"


@dataclass(frozen=True, kw_only=True)
class Input:
    """One file, Arrow folder, or the embedded text."""

    name: str  # used in ids and messages
    path: str
    kind: str  # jsonl, array, text, tsv, csv, parquet, arrow, embedded, ernie
    compression: str = ""  # "", .gz, .zst
    bytes: int
    rows: int = 0  # parquet row groups, Arrow rows or embedded documents; 0: split by bytes
    modified: int = 0  # nanoseconds
    mask_word: int = 0  # ERNIE's lines: percentage of passes in which whole words are masked


@dataclass(frozen=True)
class InputSpan:
    """Bytes, row groups or rows of an input."""

    input: int
    start: int
    end: int
    bytes: int  # approximate input bytes, for progress and for filling units


WorkUnit = tuple[InputSpan, ...]


def find_inputs(
    names: Sequence[str], options: InputOptions
) -> tuple[tuple[Input, ...], tuple[str, ...]]:
    """Finds the inputs, in the order given; files of a folder or pattern are sorted by name. Also
    returns the files in folders that are skipped because their type is unknown."""
    files: list[Input] = []
    ignored: list[str] = []
    for name in names:
        if name == EMBEDDED:
            files.append(_embedded(options))
            continue
        paths, skipped = _expand(name, options)
        ignored += skipped
        for path, shown in paths:
            files += _listed(path, shown, options)
    if not files:
        raise UserError("no input; give files, folders, patterns or `embedded`")
    return _distinct(files), tuple(ignored)


def _listed(path: Path | str, shown: str, options: InputOptions) -> list[Input]:
    """The file itself, or the files named in a list of ERNIE files."""
    if options.structure != "ernie":
        return [_describe(path, shown, options)]
    if not ernie_lines.is_list(path := Path(path)):
        return [replace(_describe(path, shown, options), mask_word=100)]
    return [
        replace(_describe(file, file.name, options), mask_word=percent)
        for file, percent in ernie_lines.read_list(path)
    ]


def _embedded(options: InputOptions) -> Input:
    if options.structure != "documents":
        raise UserError(f"input {EMBEDDED}: contains documents, not {options.structure}")
    documents = python_docs.all_documents()
    size = sum(len(text.encode("utf-8")) for _, text in documents)
    return Input(name=EMBEDDED, path="", kind="embedded", bytes=size, rows=len(documents))


def _distinct(inputs: list[Input]) -> tuple[Input, ...]:
    """Rejects duplicate files; names files of the same name by their paths."""
    seen: set[str] = set()
    for item in inputs:
        if item.path in seen:
            raise UserError(f"input {item.path or EMBEDDED} is given twice")
        seen.add(item.path)
    times = Counter(item.name for item in inputs)
    return tuple(
        item if times[item.name] == 1 else replace(item, name=item.path) for item in inputs
    )


def _expand(name: str, options: InputOptions) -> tuple[_Files, list[str]]:
    """(path, displayed name) of the files that an argument matches, and the skipped files."""
    if is_url(name):
        return _remote(name, options)
    if not name:  # a Path would be this folder
        raise UserError("input: an empty name; give files, folders, patterns or `embedded`")
    path = Path(name)
    if path.is_dir():
        return _folder(path, options)
    if path.exists():
        check_is_no_pipe(path, f"input {name}")
        return [(path, path.name)], []
    if glob.has_magic(name):
        matches = sorted(map(Path, glob.glob(name, recursive=True)))
        files: _Files = [(match, match.name) for match in matches if match.is_file()]
        if files:
            return files, []
        raise UserError(f"input {name}: no file matches this pattern")
    raise UserError(f"input {name}: no such file or folder")


def _remote(url: str, options: InputOptions) -> tuple[_Files, list[str]]:
    """The files behind a URL: one file, those that match a pattern, or those of a folder."""
    if options.structure == "ernie":
        raise UserError(f"input {url}: --format ernie reads files on this machine; copy them first")
    if "*" in url:
        before = url.partition("*")[0].rpartition("/")[0]
        matching = RemoteFolder(before).glob(url.removeprefix(f"{before}/"))
        if not matching:
            raise UserError(f"input {url}: no file matches this pattern")
        return [(file, file.rpartition("/")[2]) for file in matching], []
    folder = RemoteFolder(url)
    if folder.info().get("type") != "directory":
        return [(url, url.partition("?")[0].rpartition("/")[2])], []
    names = [name for name in folder.find() if not any(x[:1] == "." for x in name.split("/"))]
    known = [name for name in names if _kind(f"{folder.url}/{name}", options)[0]]
    if not known:
        raise UserError(f"input {url}: nothing to read; known: {_known(options)}")
    ignored = [f"{folder.url}/{name}" for name in names if name not in set(known)]
    return [(f"{folder.url}/{name}", name) for name in known], ignored


def _folder(folder: Path, options: InputOptions) -> tuple[_Files, list[str]]:
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(p.name for p in folder.iterdir() if p.is_dir())
        raise UserError(f"input {folder}: several splits; give one of {', '.join(splits)}")
    if _is_dataset(folder):
        return [(folder, folder.name)], []
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    files = [p for p in files if not any(part[0] == "." for part in p.relative_to(folder).parts)]
    known: _Files = []
    ignored: list[str] = []
    for file in files:
        shown = file.relative_to(folder).as_posix()
        if _kind(file, options)[0]:
            known.append((file, shown))
        else:
            ignored.append(str(file))
    if not known:
        there = f"its {len(ignored)} files are of unknown types" if ignored else "it has no files"
        raise UserError(f"input {folder}: nothing to read: {there}; known: {_known(options)}")
    return known, ignored


def _is_dataset(folder: Path) -> bool:
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def _kind(path: Path | str, options: InputOptions) -> tuple[str, str]:
    """(kind, compression) by the file's name; kind "" if it is unknown."""
    suffix, compression = suffixes_of(str(path).partition("?")[0] if is_url(path) else path)
    if options.structure == "ernie":
        return "ernie", compression
    kind = options.format
    if options.format == "auto" or options.structure != "documents":
        kind = _KINDS.get(suffix, "")
        if kind not in _TAKES[options.structure] or compression and kind in ("parquet", "arrow"):
            return "", compression
        if suffix == ".json" and _is_array(path):
            kind = "array"
    return kind, compression


def _is_array(file: Path | str) -> bool:
    return first_bytes(file).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _known(options: InputOptions) -> str:
    takes = _TAKES[options.structure]
    return ", ".join(ending for ending, kind in _KINDS.items() if kind in takes) or "any"


def _describe(path: Path | str, shown: str, options: InputOptions) -> Input:
    is_folder = isinstance(path, Path) and path.is_dir()
    kind, compression = ("arrow", "") if is_folder else _kind(path, options)
    if advice := how_to_convert(path):
        raise UserError(f"input {path}: {advice}")
    if not kind:
        of = "" if options.structure == "documents" else f" of {options.structure}"
        hint = "; name it with --format" if options.structure == "documents" else ""
        raise UserError(f"input {path}: unknown file type{of} ({_known(options)}){hint}")
    if is_url(path) and kind == "arrow":
        raise UserError(f"input {path}: Arrow files are read on this machine; copy it first")
    size, rows, modified = _measure(path, kind)
    return Input(
        name=shown,
        path=str(path),
        kind=kind,
        compression=compression,
        bytes=size,
        rows=rows,
        modified=modified,
    )


def _measure(path: Path | str, kind: str) -> tuple[int, int, int]:
    """Size in bytes, the number of row groups or rows, 0 if the format has none, and a number that
    changes with the file."""
    if is_url(path):
        about = RemoteFolder(str(path)).info()
        version = str(next((about[key] for key in _VERSIONS if key in about), ""))
        groups = _parquet_groups(path) if kind == "parquet" else 0
        return int(about.get("size") or 0), groups, zlib.crc32(version.encode())
    path = Path(path)
    return *_measure_local(path, kind), path.stat().st_mtime_ns


def _measure_local(path: Path, kind: str) -> tuple[int, int]:
    try:
        if kind == "parquet":
            return path.stat().st_size, _parquet_groups(path)
        if kind == "arrow":
            table = open_dataset(path)
            return max(1, table.data.nbytes), len(table)
        with path.open("rb"):
            return path.stat().st_size, 0
    except OSError as error:
        raise UserError(f"input {path}: cannot be read: {error.strerror or error}") from None


def _parquet_groups(path: Path | str) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_stored(path) as handle:
            return pq.ParquetFile(handle).metadata.num_row_groups
    except pa.ArrowInvalid as error:
        raise UserError(f"input {path}: not a parquet file: {error}") from None


def split_into_units(
    inputs: Sequence[Input], options: InputOptions, *, size: int
) -> tuple[WorkUnit, ...]:
    """Splits the inputs into work units of about `size` bytes, in order."""
    units: list[WorkUnit] = []
    filling: list[InputSpan] = []
    filled = 0
    for number, item in enumerate(inputs):
        for span in _spans(number, item, options, size):
            if filling and filled + span.bytes > size:
                units.append(tuple(filling))
                filling, filled = [], 0
            filling.append(span)
            filled += span.bytes
    if filling:
        units.append(tuple(filling))
    return tuple(units)


def unit_bytes(unit: Sequence[InputSpan]) -> int:
    """The approximate bytes of input in a work unit."""
    return sum(span.bytes for span in unit)


def _spans(number: int, item: Input, options: InputOptions, size: int) -> Iterable[InputSpan]:
    if item.compression:
        return [InputSpan(number, 0, -1, item.bytes * _COMPRESSION_RATIO)]
    pieces = -(-item.bytes // size)
    if item.kind == "parquet" or item.rows:
        return _row_spans(number, item, min(pieces, item.rows))
    as_one = item.kind in ("array", "csv")
    as_one |= item.kind == "text" and options.text_documents == "file"
    if pieces <= 1 or as_one:
        return [InputSpan(number, 0, item.bytes, item.bytes)]
    ends_at_blank = item.kind == "text" and options.text_documents == "blank_line"
    return _byte_spans(number, item, pieces, ends_at_blank)


def _row_spans(number: int, item: Input, pieces: int) -> list[InputSpan]:
    edges = [item.rows * i // pieces for i in range(pieces + 1)] if pieces else []
    return [
        InputSpan(number, start, end, item.bytes * (end - start) // item.rows)
        for start, end in zip(edges, edges[1:], strict=False)
    ]


def _byte_spans(number: int, item: Input, pieces: int, blank: bool) -> list[InputSpan]:
    """Equal parts, each extended to the end of a document."""
    edges = [0]
    with open_stored(item.path) as handle:
        for i in range(1, pieces):
            edges.append(_next_edge(handle, max(edges[-1], item.bytes * i // pieces), blank))
    edges.append(item.bytes)
    return [
        InputSpan(number, start, end, end - start)
        for start, end in zip(edges, edges[1:], strict=False)
        if end > start
    ]


def _next_edge(handle: BinaryIO, at: int, blank: bool) -> int:
    """The first offset after `at` that follows a line end or, with `blank`, an empty line."""
    handle.seek(at)
    whole = False  # whether the next read starts at the beginning of a line
    while line := handle.readline(1 << 20):
        ended = line.endswith(b"\n")
        if ended and (not blank or (whole and not line.strip())):
            break
        whole = ended
    return handle.tell()
