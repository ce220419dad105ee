"""Rows as a program gives them: files, texts, pairs, mappings, `datasets`, data frames.

    "new.tsv", Path("a.tsv"), [Path("a.tsv"), Path("b.tsv")]     files, patterns, folders
    ["a text", "another"]                                        texts, never files
    [("a text", "its pair"), ...]                                pairs of texts
    [("a text", 1.5), ("a text", "its pair", "good"), ...]       one or two texts and a label
    [{"text_a": "a text", "label": "good"}, ...]                 mappings with columns
    datasets.Dataset, pandas.DataFrame, a generator, a function that returns any of these

A str alone is a file, a str in a list is a text. Class numbers of a Dataset become their names. Of
rows from the Hugging Face hub, the names of their data sets are known, for a model card.
"""

from __future__ import annotations

import glob
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.common.rows.columnar import renamed_rows
from palm_ds.data.reader import ColumnKey, Table, TableSettings, open_table
from palm_ds.data.reader.find_files import has_known_suffix

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
    from pandas import DataFrame, Series
    from typing_extensions import TypeIs

    Frame: TypeAlias = Dataset | IterableDataset | DataFrame
    Splits: TypeAlias = DatasetDict | IterableDatasetDict
else:
    Frame = Splits = Any

Row: TypeAlias = str | tuple[Any, ...] | Mapping[str, Any]
"""A text, a pair of texts, texts with a label, or a mapping with columns."""
Rows: TypeAlias = str | Path | Iterable[Path | Row] | Callable[[], Iterable[Path | Row]] | Frame
"""A file, a pattern or a `datasets` folder; several; or rows (see the module)."""
COLUMNS = '{role: column}, such as {"text_a": "sentence"}'
"""What an argument `columns` is, for messages."""
Listed: TypeAlias = str | list[str] | tuple[Mapping[str, Any], ...]
"""Paths of files, or a tuple of rows."""


class Pairs(tuple[Mapping[str, Any], ...]):
    """Rows that were given as pairs of texts, with labels or without: a task that reads one would
    lose the other."""


DEV_SPLITS = ("validation", "dev", "valid", "test")
"""The split of a DatasetDict to evaluate on: the first of these that it has."""
TUPLE_ROLES = ("text_a", "text_b", "label")
"""The roles of a tuple's elements; the second text may be left out."""
_EXACT = 1 << 53
"""Whole numbers from here on may not be exact as floats."""
_PART = r"([\w.-]+)"
_DATASET_PLACES = (
    re.compile(rf"hf://datasets/{_PART}/([\w.-]+?)(?:@[^/]*)?(?:/|$)"),
    re.compile(rf"/datasets--{_PART}--{_PART}/snapshots/"),  # the hub's cache
    re.compile(rf"/([\w.-]+?)___{_PART}/"),  # the cache of `datasets` itself
)
_KINDS = {
    "text": "a text",
    "pair": "a pair of texts",
    "tuple": "a tuple of texts and a label",
    "mapping": "a mapping",
    "file": "a Path",
}


def train_and_dev(train: Rows | Splits | None, dev: Rows | None) -> tuple[Rows | None, Rows | None]:
    """Rows to train and to evaluate on, from arguments of these names: a DatasetDict as `train` has
    both. Raises UserError for one without training rows."""
    if not _are_splits(train):
        return train, dev
    if "train" not in train:
        has = ", ".join(map(str, train)) or "none"
        raise UserError(f"train: no split 'train'; it has {has}; give one of them: data[NAME]")
    second = next((train[name] for name in DEV_SPLITS if name in train), None)
    return train["train"], second if dev is None else dev


def listed(rows: Rows, name: str = "rows", tuple_roles: Sequence[str] = TUPLE_ROLES) -> Listed:
    """The paths of the files, or the rows as mappings, generated once. Messages refer to the
    argument `name`. `tuple_roles`: of a tuple's elements; `negatives` are all that remain. Raises
    UserError."""
    given: Any = rows() if callable(rows) else rows
    if isinstance(given, str | Path):
        return _file(given, name)
    if _are_splits(given):
        has = ", ".join(map(str, given))
        raise UserError(f"{name}: has the splits {has}; give one of them: data[NAME]")
    if _is_of(given, "datasets", "Dataset", "IterableDataset"):
        return tuple(renamed_rows(_plain_format(given), given.features or {}))
    if _is_of(given, "pandas", "DataFrame"):
        return tuple(_records(given))
    if isinstance(given, Mapping):
        columns = bool(given) and all(isinstance(x, list | np.ndarray) for x in given.values())
        how = "; of columns pandas.DataFrame(...) makes rows" if columns else ""
        raise UserError(
            f"{name}: expected a list of rows, got one mapping; give [{{...}}, ...]{how}"
        )
    if converts := next((x for x in ("to_pylist", "to_dicts") if hasattr(given, x)), ""):
        raise UserError(f"{name}: is a {type(given).__name__}; give its rows: .{converts}()")
    if not isinstance(given, Iterable) or isinstance(given, bytes):
        raise UserError(f"{name}: expected a file or a list of rows, got {given!r:.60}")
    return _rows(tuple(given), name, tuple_roles)


def open_rows(rows: Listed, settings: TableSettings, name: str) -> Table:
    """The table of files or rows; messages refer to rows as `name[0]`. Raises UserError."""
    if isinstance(rows, tuple):
        return Table.from_rows(rows, settings, name=name)
    return open_table(rows, settings)


def columns_for(
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, ColumnKey],
    texts: Sequence[str] = (),
) -> dict[str, ColumnKey]:
    """The columns, {role: column}, by which rows in memory are read that may not come from the file
    that `columns` describes: a role whose column they lack is found by its own name instead.
    `texts`: roles that texts and pairs have."""
    has = {key for row in rows if isinstance(row, Mapping) for key in row}
    plain = has <= {"text_a", "text_b"} and not has & set(texts)
    chosen = (
        {} if plain else {role: column for role, column in columns.items() if _among(column, has)}
    )
    if plain and texts:
        chosen |= dict(zip(texts, sorted(has), strict=False))
    return chosen


def _among(column: ColumnKey, names: set[str]) -> bool:
    """Whether rows with these columns have this one: `a.b` is b inside a."""
    if isinstance(column, list):
        return all(_among(each, names) for each in column)
    return column == "" or column in names or str(column).split(".")[0] in names


# ---- files ----


def _file(given: str | Path, name: str) -> str:
    """The path of a file. Raises UserError for a str that is rather a text."""
    path = str(given)
    named = isinstance(given, Path) or has_known_suffix(path)
    if not named and not Path(path).exists() and not glob.glob(path, recursive=True):
        raise UserError(f"{name}: no file {path[:80]!r}; put a text into a list: [{path[:40]!r}]")
    return path


# ---- rows ----


def _rows(given: tuple[Any, ...], name: str, tuple_roles: Sequence[str]) -> Listed:
    """Elements that are all files, texts, tuples or mappings."""
    kinds = [_kind(value) for value in given]
    for index, (kind, each) in enumerate(zip(kinds, given, strict=True)):
        if not kind:
            expected = "a mapping with columns, a text or a pair of texts"
            raise UserError(f"{name}[{index}]: expected {expected}, got {each!r:.60}")
        if kind != kinds[0]:
            first = _KINDS[kinds[0]]
            raise UserError(f"{name}[{index}]: is {_KINDS[kind]}, but {name}[0] is {first}")
    if not given or kinds[0] == "mapping":
        return given
    if kinds[0] == "file":
        return [str(value) for value in given]
    if kinds[0] == "text":
        _check_texts(given, name)
        return tuple({"text_a": str(value)} for value in given)
    if kinds[0] == "pair" and tuple(tuple_roles) == TUPLE_ROLES:
        return Pairs({"text_a": str(one), "text_b": str(other)} for one, other in given)
    rows = (_by_role(value, f"{name}[{i}]", tuple_roles) for i, value in enumerate(given))
    pairs = tuple(tuple_roles) == TUPLE_ROLES and any(len(value) == 3 for value in given)
    return Pairs(rows) if pairs else tuple(rows)


def _by_role(given: Sequence[Any], where: str, roles: Sequence[str]) -> dict[str, Any]:
    """A tuple as a mapping. Raises UserError for one of another length."""
    if roles[-1] == "negatives":
        row = dict(zip(roles[:2], given[:2], strict=True))
        return {**row, "negatives": list(given[2:])} if len(given) > 2 else row
    if len(given) > len(roles):
        raise UserError(
            f"{where}: {len(given)} elements; expected one or two texts and a label, or a mapping"
        )
    own = roles if len(given) == len(roles) else (roles[0], roles[-1])
    return dict(zip(own, given, strict=True))


def _kind(each: object) -> str:
    """The kind of an element; empty if it is none."""
    if isinstance(each, str):
        return "text"
    if isinstance(each, Path):
        return "file"
    if isinstance(each, Mapping):
        return "mapping"
    if not isinstance(each, tuple | list | np.ndarray) or len(each) < 2:
        return ""
    *texts, last = each
    if not all(isinstance(text, str) for text in texts) or not isinstance(
        last, str | Real | np.bool_
    ):
        return ""
    return "pair" if len(each) == 2 and isinstance(last, str) else "tuple"


def _check_texts(texts: Sequence[str], name: str) -> None:
    """Raises UserError if all of the texts are names of tables."""
    if all(has_known_suffix(text) for text in texts):
        example = repr(str(texts[0]))[:80]
        raise UserError(
            f"{name}[0]: {example} looks like a file, but a str in a list is a text; for files "
            f"give Path({example}), for texts {{'text_a': {example}}}"
        )


# ---- other libraries, which are never imported here: the program has done that ----


def _is_of(given: object, library: str, *names: str) -> bool:
    """Whether this is an object of one of the library's classes."""
    module = sys.modules.get(library)
    classes = tuple(getattr(module, name) for name in names if hasattr(module, name))
    return bool(classes) and isinstance(given, classes)


def _are_splits(given: object) -> TypeIs[Splits]:
    return _is_of(given, "datasets", "DatasetDict", "IterableDatasetDict")


def _plain_format(given: Dataset | IterableDataset) -> Iterator[dict[str, Any]]:
    """The rows of a Dataset as Python values, whatever its format."""
    if _is_of(given, "datasets", "Dataset"):
        given = given.with_format(None)
    return (dict(row) for row in given)


def _records(frame: DataFrame) -> Iterator[dict[str, Any]]:
    """The rows of a DataFrame; missing values (NaN, NaT, NA) as None."""
    if frame.columns.has_duplicates:
        twice = frame.columns[frame.columns.duplicated()][0]
        raise UserError(f"rows: two columns of the DataFrame are called {twice!r}")
    names = [str(name) for name in frame.columns]
    whole = {i: "Int64" for i in range(len(names)) if _were_whole(frame.iloc[:, i])}
    frame = frame.set_axis(range(len(names)), axis=1).astype(whole)
    plain = frame.astype(object).where(frame.notna(), None)
    for values in plain.itertuples(index=False, name=None):
        yield dict(zip(names, values, strict=True))


def _were_whole(column: Series) -> bool:
    """Whether the whole numbers of a column are floats only because some are missing."""
    if not isinstance(column.dtype, np.dtype) or column.dtype.kind != "f":
        return False
    given = column.dropna()
    return (
        0 < len(given) < len(column) and bool((given % 1 == 0).all()) and given.abs().max() < _EXACT
    )


def dataset_names_in(paths: Iterable[str]) -> set[str]:
    """{owner/name} on the Hugging Face hub of files in its cache, folders saved by `datasets`, and
    URLs."""
    return {
        name
        for path in paths
        for name in (_dataset_name(path), *_of_saved_dataset(Path(path)))
        if name
    }


def dataset_names_of(rows: object) -> set[str]:
    """{owner/name} that a Dataset was loaded from; empty for other rows, and if it does not say."""
    info = getattr(rows, "info", None)
    urls = getattr(info, "download_checksums", None) or {}
    files: list[dict[str, Any]] = getattr(rows, "cache_files", None) or []
    named = [*urls, *(str(file.get("filename", "")) for file in files if isinstance(file, dict))]
    return {name for name in map(_dataset_name, named) if name}


def _dataset_name(path: str) -> str:
    match = next((x for place in _DATASET_PLACES if (x := place.search(path))), None)
    return f"{match[1]}/{match[2]}" if match else ""


def _of_saved_dataset(folder: Path) -> set[str]:
    """Of a folder that `Dataset.save_to_disk` wrote."""
    try:
        about = json.loads((folder / "dataset_info.json").read_text("utf-8"))
        return set(map(_dataset_name, about.get("download_checksums") or {}))
    except (OSError, ValueError, AttributeError, TypeError):
        return set()
