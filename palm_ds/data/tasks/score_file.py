"""A file of a teacher's scores: parquet, written by `palm-ds teach`.

    source   row   TASK                  per row of a table: the scores of its labels, one after
    train    0     [0.3, -1.2]           another

    step  row   TASK.ids         TASK    per row of a step: the k best tokens of each masked token
    0     17    [1037, 29, ...]  [...]   and their log-probabilities, one after another

The schema's metadata says what they belong to, so that training refuses the file of other data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from palm_ds.common.config import parse
from palm_ds.common.errors import UserError, suggest_path

if TYPE_CHECKING:
    import pyarrow as pa

_KEY = b"palm_ds"


@dataclass(frozen=True, kw_only=True)
class ScoreFileInfo:
    """Teachers, tasks and data that the scores of a file belong to."""

    teacher: dict[str, str]
    """{folder: a hash of its files}"""
    labels: dict[str, list[str]]
    """{task with a column: its class names, in the order of the scores}"""
    tables: dict[str, str] = field(default_factory=dict)
    """{source: a hash of its table}; with a column `row` of rows of the table"""
    stream: str = ""
    """A hash of what determines the rows of every step; with columns `step` and `row`"""
    top_k: int = 0
    """Tokens per masked token"""
    scales: dict[str, tuple[float, float]] = field(default_factory=dict)
    """{task of numbers: their mean and deviation}, by which its scores are standardized"""


def ids_column(task: str) -> str:
    """The column with the tokens of masked words."""
    return f"{task}.ids"


def with_info(schema: pa.Schema, info: ScoreFileInfo) -> pa.Schema:
    """The schema of a file with these contents."""
    return schema.with_metadata({_KEY: json.dumps(asdict(info)).encode()})


def read_info(path: Path) -> ScoreFileInfo:
    """Raises UserError for a file that `palm-ds teach` did not write."""
    import pyarrow.parquet as pq

    if not path.is_file():
        raise UserError(f"{path}: no such file{suggest_path(path)}; `palm-ds teach` writes it")
    with reading(path):
        stored = (pq.read_schema(path).metadata or {}).get(_KEY)
    if stored is None:
        raise UserError(f"{path}: is not a file of scores; `palm-ds teach` writes one")
    values: Mapping[str, Any] = json.loads(stored)
    return parse(ScoreFileInfo, values, str(path))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raises UserError for a file that cannot be read in this context."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: is not a parquet file, or damaged: {error}") from None


def read_lists(table: pa.Table, column: str) -> tuple[np.ndarray, np.ndarray]:
    """The values of a column of lists (all,), and where those of each row begin (rows + 1,)."""
    lists = table.column(column).combine_chunks()
    chunk = lists.chunk(0) if hasattr(lists, "chunk") and lists.num_chunks else lists
    offsets = chunk.offsets.to_numpy().astype(np.int64)
    values = chunk.values.to_numpy(zero_copy_only=False)
    return values, offsets
