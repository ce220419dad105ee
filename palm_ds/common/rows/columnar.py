"""Rows of parquet and Arrow files, with the names of classes instead of their numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palm_ds.common.errors import UserError, first_line

if TYPE_CHECKING:
    import pyarrow as pa

Rename = Callable[[Any], Any]
_FEATHER = b"ARROW1"  # the first bytes of an Arrow file that is no stream


def open_dataset(path: str | Path):
    """Opens an Arrow folder (`save_to_disk`) or file, memory-mapped by `datasets`. A file is a
    stream, as `datasets` writes it, or has Arrow's file format (Feather)."""
    import datasets
    import pyarrow as pa
    from datasets.table import InMemoryTable

    try:
        if Path(path).is_dir():
            return datasets.Dataset.load_from_disk(str(path))
        with Path(path).open("rb") as file:
            stream = file.read(len(_FEATHER)) != _FEATHER
        if stream:
            return datasets.Dataset.from_file(str(path))
        mapped = pa.memory_map(str(path))
        return datasets.Dataset(InMemoryTable(pa.ipc.open_file(mapped).read_all()))
    except (pa.ArrowException, ValueError, OSError, KeyError) as error:
        raise UserError(f"input {path}: not an Arrow dataset: {first_line(error)}") from None


def dataset_rows(
    table: Any, columns: Sequence[str], start: int, end: int, *, size: int
) -> Iterator[dict[str, Any]]:
    """Rows start .. end of an opened dataset, read `size` at a time."""
    arrow = table.select_columns(list(columns)).with_format("arrow")  # slices are pyarrow tables
    for at in range(start, end, size):
        yield from renamed_rows(arrow[at : min(at + size, end)].to_pylist(), table.features)


def parquet_features(schema: pa.Schema) -> Mapping[str, Any]:
    """Features in the schema of a parquet file, if `datasets` wrote it."""
    if b"huggingface" not in (schema.metadata or {}):
        return {}
    import datasets

    return datasets.Features.from_arrow_schema(schema)


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


def _rename(feature: object) -> Rename | None:
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
    return lambda value: None if value is None else [each(item) for item in value]


def _renamed(value: Mapping[str, Any] | None, inner: dict[str, Rename]) -> dict[str, Any] | None:
    if value is None:
        return None
    return {key: inner[key](item) if key in inner else item for key, item in value.items()}
