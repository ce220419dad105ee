"""Rows of parquet and Arrow files: only the needed columns, with class numbers as names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from palm_ds.common.errors import UserError
from palm_ds.corpus.input.discover import open_dataset
from palm_ds.data.reader.column_roles import pick
from palm_ds.data.reader.find_files import File
from palm_ds.data.reader.options import TableSettings
from palm_ds.data.reader.text_formats import Row

_ROWS = 1000  # converted to Python values per batch

Rename = Callable[[Any], Any]


def read_parquet(file: File, settings: TableSettings) -> Iterator[Row]:
    """The rows of a parquet file; its schema may have class names, written by `datasets`."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file.path, memory_map=True) as table:
            schema = table.schema_arrow
            known = b"huggingface" in (schema.metadata or {})
            features = datasets.Features.from_arrow_schema(schema) if known else {}
            sample = next(table.iter_batches(1), None)
            first = sample.to_pylist() if sample is not None else []
            if not first:
                return
            wanted = _wanted(schema.names, first[0], file, settings)
            batches = table.iter_batches(_ROWS, columns=wanted)
            yield from _rows((batch.to_pylist() for batch in batches), features)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{file.path}: damaged, or not a parquet file: {reason}") from None


def read_arrow(file: File, settings: TableSettings) -> Iterator[Row]:
    """The rows of an Arrow file, or of a folder saved by `datasets`."""
    table = open_dataset(file.path)
    if not len(table):
        return
    arrow: Any = table.with_format("arrow")  # slices are pyarrow tables
    first = arrow[:1].to_pylist()[0]
    wanted = _wanted(table.column_names, first, file, settings)
    arrow = arrow.select_columns(wanted)
    batches = (arrow[at : at + _ROWS].to_pylist() for at in range(0, len(arrow), _ROWS))
    yield from _rows(batches, table.features)


def _wanted(
    names: Sequence[str], first: dict[str, Any], file: File, settings: TableSettings
) -> list[str]:
    """The columns of the roles. A dot is part of a name, or leads into a nested value."""
    keys: list[Any] = []
    for key in pick(list(names), first, settings, file).values():
        keys += key if isinstance(key, list) else [key]
    return list(dict.fromkeys(key if key in names else key.split(".")[0] for key in keys))


def _rows(batches: Iterator[list[dict[str, Any]]], features: Any) -> Iterator[Row]:
    rows = renamed_rows((values for batch in batches for values in batch), features)
    yield from (Row(number, values) for number, values in enumerate(rows, 1))


def renamed_rows(
    rows: Iterable[dict[str, Any]], features: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Rows of a Dataset with these features, their class numbers replaced by names (-1, which
    stands for no label, by None), in place."""
    renames = {name: rename for name in features if (rename := _rename(features[name]))}
    for values in rows:
        for name in renames.keys() & values.keys():
            values[name] = renames[name](values[name])
        yield values


def _rename(feature: Any) -> Rename | None:
    """A function from class numbers to names within a value; None if it has no classes."""
    if names := getattr(feature, "names", None):
        return lambda value: names[value] if value is not None and value >= 0 else None
    if isinstance(feature, dict):
        inner = {key: rename for key in feature if (rename := _rename(feature[key]))}
        return (lambda value: _renamed(value, inner)) if inner else None
    item = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    rename = _rename(item) if item is not None else None
    if rename is None or isinstance(
        item, dict
    ):  # lists of dicts are stored in two ways; no role uses them
        return None
    each = rename
    return lambda value: None if value is None else [each(x) for x in value]


def _renamed(value: Mapping[str, Any] | None, inner: dict[str, Rename]) -> dict[str, Any] | None:
    if value is None:
        return None
    return {key: inner[key](x) if key in inner else x for key, x in value.items()}
