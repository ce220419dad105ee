"""Resolves paths, patterns and dataset folders to files of a known format."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from palm_ds.common.errors import UserError, suggest_path
from palm_ds.common.files import check_is_no_pipe
from palm_ds.common.rows.stored import how_to_convert, open_bytes, reading, suffixes_of
from palm_ds.data.reader.options import TableSettings

_KINDS = {
    ".tsv": "tsv",
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",  # or "jsonl", depending on its first line
    ".txt": "text",
    ".conll": "conll",
    ".conllu": "conll",
    ".bio": "conll",
    ".iob": "conll",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_BLOCK = 1 << 22


@dataclass(frozen=True)
class File:
    """A file, or the folder of a dataset."""

    path: str
    format: str

    def opened(self) -> BinaryIO:
        """Its bytes, decompressed."""
        return open_bytes(self.path)


def find_files(paths: str | Sequence[str], settings: TableSettings) -> tuple[File, ...]:
    """The files in the given order; those of a pattern sorted by name."""
    given = [paths] if isinstance(paths, str) else list(paths)
    if not given:
        raise UserError("no file given; name at least one")
    files = [file for name in given for file in _expand(str(name), settings)]
    for i, file in enumerate(files):
        if file in files[:i]:
            raise UserError(f"{file.path}: given twice")
    return tuple(files)


def _expand(name: str, settings: TableSettings) -> list[File]:
    path = Path(name)
    if path.is_dir():
        return [File(str(_dataset(path, settings.split)), "arrow")]
    if path.exists():
        check_is_no_pipe(path, name, ", or give predict and embed `--input -`")
        return [File(name, _format(path, settings.format))]
    if not glob.has_magic(name):
        raise UserError(f"{name}: no such file{suggest_path(name)}")
    files = [x for x in sorted(glob.glob(name, recursive=True)) if Path(x).is_file()]
    if not files:
        raise UserError(f"{name}: no file matches this pattern")
    return [File(file, _format(Path(file), settings.format)) for file in files]


def _dataset(folder: Path, split: str) -> Path:
    """The folder of one dataset within the output of `save_to_disk`."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(p.name for p in folder.iterdir() if p.is_dir())
        if split not in splits:
            what = f"has no split {split!r}" if split else "has several splits"
            raise UserError(f"{folder}: {what}; set `split` to one of {', '.join(splits)}")
        return folder / split
    if not (folder / "state.json").is_file():
        raise UserError(f"{folder}: not a dataset; {_how_to_name(folder)}")
    if split:
        raise UserError(f"{folder}: is a dataset without splits; remove `split: {split}`")
    return folder


def _how_to_name(folder: Path) -> str:
    """Advice on naming the files of a folder; ERNIE's data sets have files without a suffix."""
    files = [path for path in folder.iterdir() if path.is_file()]
    if files and not any(path.suffix and has_known_suffix(path.name) for path in files):
        return (
            f"name the files in it and their format, for ERNIE's data table: {folder}/* with "
            "read: {format: tsv}, and header: false, columns: {text_a: 0, text_b: 1, label: 2} if "
            "they have no header line"
        )
    return f"name the files in it, such as {folder}/*.tsv"


def has_known_suffix(name: str) -> bool:
    """Whether a name ends like that of a table: `train.tsv`, `train.jsonl.gz`."""
    return suffixes_of(name)[0] in _KINDS


def _format(path: Path, wanted: str) -> str:
    suffix, compression = suffixes_of(path)
    kind = wanted
    if advice := how_to_convert(path):
        raise UserError(f"{path}: {advice}")
    if wanted == "auto" and suffix == ".ann":
        raise UserError(
            f"{path}: brat's annotations are not read; write a line of JSON for each text: "
            '{"text": "Bo sings", "spans": [[0, 2, "PER"]]}'
        )
    if wanted == "auto":
        kind = _KINDS.get(suffix, "")
        if not kind:
            raise UserError(
                f"{path}: its suffix is none of {', '.join(_KINDS)}; "
                "give format: tsv, csv, jsonl, json, text, conll, parquet or arrow"
            )
        if kind == "json" and _is_lines(path):
            kind = "jsonl"
    if compression and kind in ("parquet", "arrow"):
        raise UserError(f"{path}: a {kind} file cannot be compressed as a whole; unpack it first")
    return kind


def _is_lines(path: Path) -> bool:
    """Whether the first line is a JSON object that is not the whole data."""
    with reading(path), open_bytes(path) as handle:
        line = handle.readline().removeprefix(b"\xef\xbb\xbf")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return False
    if _are_columns(value):
        raise UserError(
            f"{path}: has a key for each row, as pandas' to_json writes them; expected rows: "
            'to_json(orient="records")'
        )
    return isinstance(value, dict) and not isinstance(value.get("data"), list)


def _are_columns(value: object) -> bool:
    """Whether a JSON value is {column: {number of a row: cell}}, or {number of a row: {column:
    cell}}."""
    if not isinstance(value, dict):
        return False
    columns = list(value.values())
    alike = all(isinstance(each, dict) and each.keys() == columns[0].keys() for each in columns)
    return len(columns) > 1 and alike and any(map(_are_numbers, (value, columns[0])))


def _are_numbers(keys: Iterable[str]) -> bool:
    return all(key.isdecimal() for key in keys)


def contents_hash(files: Sequence[File], settings: TableSettings) -> str:
    """A hash of the bytes of the files, their order and the settings, but not of their names."""
    values = dataclasses.asdict(settings)
    if settings.missing_labels == "stop":  # the hash of runs from before there was this setting
        del values["missing_labels"]
    if not settings.images:  # likewise
        del values["images"]
    written = json.dumps(values, sort_keys=True)
    digest = hashlib.blake2b(written.encode(), digest_size=16)
    for file in files:
        path = Path(file.path)
        parts = [*sorted(path.glob("*.arrow")), *path.glob("dataset_info.json")]
        for part in parts if path.is_dir() else [path]:
            digest.update(f"{part.stat().st_size} ".encode())
            with part.open("rb") as handle:
                while block := handle.read(_BLOCK):
                    digest.update(block)
    return digest.hexdigest()
