"""Tables: rows by number, each a dict by role with its place, from files or from a program's
memory.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.common.rows.lines import BadRecordError
from palm_ds.data.reader.block_formats import read_conll, read_smart
from palm_ds.data.reader.cell_values import parse, spellings
from palm_ds.data.reader.column_roles import OPEN, cell_of, pick, without_role
from palm_ds.data.reader.find_files import File, contents_hash, find_files
from palm_ds.data.reader.formats import (
    Row,
    read_arrow,
    read_csv,
    read_json,
    read_jsonl,
    read_parquet,
    read_text,
    read_tsv,
    unfolded,
)
from palm_ds.data.reader.options import TAG_DELIMITER, ColumnKey, TableSettings, WholeRows
from palm_ds.data.reader.regions import ImageRegions, RegionFiles

MEMORY = "memory"


@dataclass(frozen=True)
class MemoryRows(File):
    """Rows, with the name of their argument, such as `rows`."""

    rows: Sequence[Any]


@dataclass(frozen=True)
class ReadRows(File):
    """Rows of a file or a stream that are read already, with their places in it."""

    rows: Sequence[Row]


def memory_rows(name: str, rows: Sequence[Any]) -> MemoryRows:
    """Raises UserError if there are no rows, or one is empty or not a mapping."""
    if not rows:
        raise UserError(f"{name}: is empty; give at least one row")
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping) or not row:
            raise UserError(f"{name}[{index}]: expected a mapping with columns, got {row!r}")
    return MemoryRows(name, MEMORY, rows)


def read_memory(file: File, settings: TableSettings) -> Iterator[Row]:
    assert isinstance(file, MemoryRows)
    for index, row in enumerate(file.rows):
        try:
            yield unfolded(index, plain(row))
        except BadRecordError as bad:
            yield Row(index, bad=bad.args[0])


def plain(value: object) -> Any:
    """A value as JSON would return it: NumPy numbers and arrays as Python values, tuples and sets
    as lists, anything unknown as text."""
    if isinstance(value, np.generic):  # np.float64 is a float, but not written like one
        value = value.item()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, bytes):  # what is no text is refused for its surrogates
        return value.decode("utf-8", "surrogateescape")
    if isinstance(value, set | frozenset):
        return sorted(map(plain, value), key=str)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    to_list = getattr(value, "tolist", None)
    if to_list is None or isinstance(value, np.generic):  # a long double stays one
        return str(value)
    return plain(to_list())


def rows_hash(file: MemoryRows, settings: TableSettings) -> str:
    """A hash of the rows and the settings."""
    values = asdict(settings)
    if not settings.images:  # the hash of runs from before there was this setting
        del values["images"]
    text = json.dumps([values, plain(file.rows)], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


_READERS: dict[str, Callable[[File, TableSettings], Iterator[Row]]] = {
    "tsv": read_tsv,
    "csv": read_csv,
    "jsonl": read_jsonl,
    "json": read_json,
    "text": read_text,
    "conll": read_conll,
    "smart": read_smart,
    "parquet": read_parquet,
    "arrow": read_arrow,
    MEMORY: read_memory,
}
_NOUNS = {"json": "element", "parquet": "row", "arrow": "row"}  # other places are lines
Place = tuple[int, int | str]  # file; line, number or name within it


class Table:
    """Rows in the order of the files. Every row has every column."""

    def __init__(
        self,
        files: Sequence[File],
        columns: dict[str, list[Any]],
        places: Sequence[Place],
        *,
        unused: Sequence[str],
        notes: Sequence[str],
        fingerprint: str,
        images: Sequence[str] = (),
    ) -> None:
        self.files, self._columns = tuple(files), columns
        self._file = np.array([file for file, _ in places], np.int32)
        self._at = [at for _, at in places]
        self.unused = tuple(unused)
        """Columns of the first file without a role."""
        self.notes = tuple(notes)
        """Lines about rows that were skipped or are odd, each with their number and the first."""
        self.fingerprint = fingerprint
        """A hash of the files' contents and the settings."""
        self._images = RegionFiles(tuple(images))

    def __len__(self) -> int:
        return len(self._at)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {role: values[i] for role, values in self._columns.items()}

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Mapping[str, Any]],
        settings: TableSettings | None = None,
        *,
        name: str = "rows",
        copy: str = "",
    ) -> Table:
        """Reads rows in memory like those of a file; messages refer to them as `name[3]`. `copy`: a
        file with the same rows, whose fingerprint the table gets. Raises UserError."""
        settings = settings or TableSettings()
        file = memory_rows(name, rows)
        if copy:
            return _read((file,), settings, contents_hash(find_files(copy, settings), settings))
        return _read((file,), settings, rows_hash(file, settings))

    @classmethod
    def from_read(cls, rows: ReadRows, settings: TableSettings) -> Table:
        """Rows that are read already; messages name their places. Raises UserError."""
        return _read((rows,), settings, fingerprint="")

    @property
    def columns(self) -> tuple[str, ...]:
        """The roles of its columns."""
        return tuple(self._columns)

    def column(self, role: str) -> list[Any]:
        """The values of a role, one per row."""
        if role not in self._columns:
            has = ", ".join(self._columns)
            raise UserError(
                f"{', '.join(self.names)}: no column has the role {role}; the roles are {has}"
            )
        return self._columns[role]

    def regions(self, i: int) -> ImageRegions:
        """The regions of a row's image. Raises UserError."""
        image = self.column("image")[i]
        if isinstance(image, ImageRegions):
            return image
        with self._in_row(i):
            return self._images.regions(self._named_image(i))

    def region_count(self, i: int) -> int:
        """The number of regions of a row's image. Raises UserError."""
        image = self.column("image")[i]
        if isinstance(image, ImageRegions):
            return len(image)
        with self._in_row(i):
            return self._images.count(self._named_image(i))

    def image_name(self, i: int) -> str:
        """What tells the image of a row from others; empty without one, or for one in the table."""
        image = self.column("image")[i]
        if not isinstance(image, str) or not image:
            return ""
        return self._images.name_in(self._folders[int(self._file[i])], image)

    def _named_image(self, i: int) -> str:
        """Raises BadRecordError if a row has no image."""
        if not (name := self.image_name(i)):
            raise BadRecordError("image is empty")
        return name

    @cached_property
    def _folders(self) -> list[Path]:
        """The folder of each file, to which the names of .npz files are relative."""
        paths = [Path(file.path) for file in self.files]
        return [path if path.is_dir() else path.parent for path in paths]

    @contextmanager
    def _in_row(self, i: int) -> Iterator[None]:
        try:
            yield
        except BadRecordError as bad:
            raise UserError(f"{self.where(i)}: {bad}") from None

    @property
    def names(self) -> tuple[str, ...]:
        """The paths of the files, as given."""
        return tuple(file.path for file in self.files)

    def without(self, roles: Collection[str]) -> Table:
        """The same rows without these roles."""
        copied = copy.copy(self)
        copied._columns = {
            role: value for role, value in self._columns.items() if role not in roles
        }
        return copied

    def where(self, i: int) -> str:
        """The place of a row: `file:line`, `file, row 7` without lines, `rows[6]` in memory."""
        return where(self.files[int(self._file[i])], self._at[i])


def where(file: File, at: int | str) -> str:
    """A place in a file, for messages."""
    if file.format == MEMORY:
        return f"{file.path}[{at}]"
    if isinstance(at, str):
        return f"{file.path}, {at}"
    noun = _NOUNS.get(file.format)
    return f"{file.path}, {noun} {at}" if noun else f"{file.path}:{at}"


class _Notes:
    """Counts events per kind, with the first place of each."""

    def __init__(self, settings: TableSettings) -> None:
        self.settings = settings
        self.drops = drops_of(settings)
        self.found: dict[str, tuple[int, str]] = {}
        self.questions: set[str] = set()

    def add(self, kind: str, first: str) -> None:
        count, place = self.found.get(kind, (0, first))
        self.found[kind] = count + 1, place

    def add_question(self, identity: str | int) -> None:
        """Raises BadRecordError for a duplicate id: predictions refer to questions by id."""
        if str(identity) in self.questions:
            raise BadRecordError(f"another question has the id {identity}")
        self.questions.add(str(identity))

    def bad(self, place: str, reason: str) -> None:
        """Raises UserError for a bad row, or counts it if bad rows are skipped."""
        if self.settings.bad_rows == "stop":
            raise UserError(f"{place}: {reason}")
        self.add("bad row, skipped", f"{place}: {reason}")

    def lines(self) -> list[str]:
        return [f"{n:,} x {kind}; the first: {place}" for kind, (n, place) in self.found.items()]


def open_table(paths: str | Sequence[str], settings: TableSettings | None = None) -> Table:
    """Reads the rows of a file, several files, a pattern, or a dataset folder into memory.

    Raises UserError with file and line for a bad row, and with the columns if roles are unclear.
    """
    settings = settings or TableSettings()
    files = find_files(paths, settings)
    return _read(files, settings, contents_hash(files, settings))


def read_rows(
    paths: str | Sequence[str], format: str = "auto"
) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Each row of files with its place, as values by column: all of them, whatever their roles, one
    row after another. Raises UserError with file and line for a bad row."""
    settings = WholeRows(format=format)
    for file in find_files(paths, settings):
        for row in rows_in(file, settings):
            if row.bad:
                raise UserError(f"{where(file, row.place)}: {row.bad}")
            if row.values:
                yield where(file, row.place), row.values


def _read(files: Sequence[File], settings: TableSettings, fingerprint: str) -> Table:
    notes = _Notes(settings)
    roles, unused, places, raw = _raw_rows(files, settings, notes)
    placed = [role for role in ("spans", "scene_graph") if role in roles]
    if settings.strip_spaces and placed:
        raise UserError(
            f"{files[0].path}: strip_spaces would shift the places of {placed[0]}; remove it"
        )
    split = _is_split(roles, raw, settings)
    kept: list[Place] = []
    columns: dict[str, list[Any]] = {}
    for (number, at), cells in zip(places, raw, strict=True):
        row = dict(zip(roles, cells, strict=True))
        values = _values(row, where(files[number], at), split, notes)
        if values is None:
            continue
        kept.append((number, at))
        for role, value in values.items():
            columns.setdefault(role, []).append(value)
    if not kept:
        raise UserError("; ".join([f"{', '.join(f.path for f in files)}: no rows", *notes.lines()]))
    return Table(
        files,
        columns,
        kept,
        unused=unused,
        notes=notes.lines(),
        fingerprint=fingerprint,
        images=settings.images,
    )


def _is_split(
    roles: Sequence[str], raw: Sequence[tuple[Any, ...]], settings: TableSettings
) -> bool:
    """Whether text_a and label are PALM's cells of tokens and tags, separated by control B."""
    named = {"tokens", "tags"} & set(roles) or "text_a" not in roles
    if settings.tag_delimiter != TAG_DELIMITER or named:
        return False
    at = roles.index("text_a")
    return any(isinstance(cells[at], str) and TAG_DELIMITER in cells[at] for cells in raw)


def _values(row: dict[str, Any], place: str, split: bool, notes: _Notes) -> dict[str, Any] | None:
    """The checked values of a row; None if it is skipped."""
    if kind := dropped(row, notes.drops):
        notes.add(kind, place)
        return None
    try:
        values = parse(row, notes.settings, split, lambda kind: notes.add(kind, place))
        if "question" in values and "id" in values:
            notes.add_question(values["id"])
        return values
    except BadRecordError as bad:
        notes.bad(place, bad.args[0])
        return None


def _raw_rows(
    files: Sequence[File], settings: TableSettings, notes: _Notes
) -> tuple[tuple[str, ...], list[str], list[Place], list[tuple[Any, ...]]]:
    """The roles, the columns without a role, and each row's place and values in role order."""
    roles: tuple[str, ...] = ()
    unused: list[str] = []
    places: list[Place] = []
    raw: list[tuple[Any, ...]] = []
    for number, file in enumerate(files):
        keys: dict[str, ColumnKey] = {}
        for row, sample in _with_sample(_full_rows(file, settings, notes), file.format):
            if not keys:
                keys = pick(list(sample), sample, settings, file)
                if not roles:
                    roles, unused = tuple(keys), without_role(list(sample), keys.values())
                _check_roles(roles, keys, files[0], file)
            try:
                raw.append(tuple(cell_of(row.values, role, keys[role]) for role in roles))
                places.append((number, row.place))
            except BadRecordError as bad:
                notes.bad(where(file, row.place), bad.args[0])
        if not keys and len(files) > 1:
            notes.add("file without a row", file.path)
    return roles, unused, places, raw


def _with_sample(rows: Iterator[Row], format: str) -> Iterator[tuple[Row, Mapping[Any, Any]]]:
    """Each row with a sample value of every column: from the row itself, or from all rows if they
    may differ in their columns, of the first one that is not empty."""
    if format not in OPEN:
        yield from ((row, row.values) for row in rows)
        return
    every = list(rows)
    sample: dict[Any, Any] = {}
    for row in reversed(every):
        for name, value in row.values.items():
            if name not in sample or value not in (None, "", [], {}):
                sample[name] = value
    yield from ((row, sample) for row in every)


def rows_in(file: File, settings: TableSettings) -> Iterator[Row]:
    """The rows of a file, one after another, bad ones too."""
    return _READERS[file.format](file, settings)


def _full_rows(file: File, settings: TableSettings, notes: _Notes) -> Iterator[Row]:
    """The readable rows. Empty lines are noted, except at the end of the file; so are rows without
    a label for their annotation tool, which are left out if labels are needed."""
    empty: list[str] = []
    labeled = settings.missing_labels == "stop" and "answer" not in settings.columns.values()
    for row in file.rows if isinstance(file, ReadRows) else rows_in(file, settings):
        if row.bad:
            notes.bad(where(file, row.place), row.bad)
        elif row.unlabeled and labeled:
            notes.add(row.unlabeled, where(file, row.place))
        elif row.values:
            for place in empty:
                notes.add("empty line", place)
            empty = []
            yield row
        else:
            empty.append(where(file, row.place))


def _check_roles(roles: Sequence[str], keys: dict[str, ColumnKey], first: File, file: File) -> None:
    if set(roles) != set(keys):
        raise UserError(
            f"{file.path}: has {', '.join(keys)}, but {first.path} has {', '.join(roles)}; "
            "files of one table must have the same columns"
        )


def drops_of(settings: TableSettings) -> dict[str, set[str]]:
    """{role: the values whose rows the settings drop}, for `dropped`."""
    return {role: {_plain(value) for value in values} for role, values in settings.drop.items()}


def dropped(row: Mapping[str, Any], drops: Mapping[str, set[str]]) -> str:
    """A note about a row that the settings drop; "" for any other row."""
    for role, values in drops.items():
        if role in row and (text := _plain(row[role])) in values:
            return f"row with {role} {text!r}, dropped"
    return ""


def _plain(value: object) -> str:
    """A value as written in the settings."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return spellings(value.strip() if isinstance(value, str) else repr(value))[0]
