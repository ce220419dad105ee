"""Answers to the rows of a pipe: a line of JSON for each row, as soon as it is computed.

    batches ──rows of the same columns──> a table ──predictor, embedder──> {"index": 0, ...}

The answer to a row does not depend on the rows that came with it, except for rounding. A row that
cannot be read ends the answers; those before it are answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.common.sparse_vectors import SparseVector
from palm_ds.data.reader.options import ColumnKey, TableSettings, without_labels
from palm_ds.data.reader.piped_rows import alike
from palm_ds.data.reader.table import ReadRows, Table
from palm_ds.data.sources.row_inputs import columns_for
from palm_ds.inference.embedder import Embedder
from palm_ds.inference.embedding_files import texts_of
from palm_ds.inference.predict_files import wanted_by
from palm_ds.inference.predictor import EncoderPass, Predictor

Record = dict[str, Any]


class Answer(Protocol):
    """Answers rows."""

    @property
    def read(self) -> TableSettings:
        """Settings to read the rows with."""
        ...

    def __call__(self, rows: ReadRows) -> Sequence[Record]:
        """A record for each of some rows, all of the same columns. Raises UserError."""
        ...


def answers(batches: Iterable[ReadRows], answer: Answer) -> Iterator[list[Record]]:
    """The records of each batch, numbered by `index`. Raises UserError after the records of the
    rows before the one that is wrong."""
    number = 0
    for batch in batches:
        for rows in alike(batch):
            for records in _answered(rows, answer):
                yield [{"index": n, **each} for n, each in enumerate(records, number)]
                number += len(records)


def _answered(rows: ReadRows, answer: Answer) -> Iterator[Sequence[Record]]:
    """All in one, or row by row up to the one that is wrong."""
    try:
        yield answer(rows)
        return
    except UserError as error:
        if len(rows.rows) == 1:
            raise UserError(_with_line(str(error), rows)) from None
    for row in rows.rows:
        yield answer(replace(rows, rows=[row]))


def _with_line(message: str, rows: ReadRows) -> str:
    """The message with the line of the only row: one about columns has none."""
    start = f"{rows.path}: "
    if not message.startswith(start):
        return message
    return f"{rows.path}:{rows.rows[0].place}: {message.removeprefix(start)}"


@dataclass(frozen=True, kw_only=True)
class PredictionAnswer:
    """Predictions of a model's tasks: of one as the row's own keys, of several by their names."""

    predictor: Predictor
    columns: Mapping[str, ColumnKey] = field(default_factory=dict)
    """{role: column}: overrides the recipe's."""

    @property
    def read(self) -> TableSettings:
        """The recipe's settings for tables."""
        return self.predictor.passes[0].read

    def __call__(self, rows: ReadRows) -> list[Record]:
        records: list[Record] = [{} for _ in rows.rows]
        for each in self.predictor.passes:
            table = self._table(rows, each)
            for record, more in zip(records, _ids(table), strict=True):
                record.update(more)
            self._predict(table, each, records)
        return records

    def _table(self, rows: ReadRows, each: EncoderPass) -> Table:
        """The rows without labels, as a pass reads them."""
        texts = each.input_task.source_roles
        own = columns_for([row.values for row in rows.rows], each.read.columns, texts)
        read = replace(
            each.read,
            columns={**own, **self.columns},
            drop={},
            bad_rows="stop",
            lost_answers="keep",
        )
        with wanted_by(each.tasks, self.predictor):
            table = Table.from_read(rows, without_labels(read))
            source = self.predictor.source(table)
            for task in (each.input_task, *each.tasks):
                task.check(source, labeled=False)
        return table

    def _predict(self, table: Table, each: EncoderPass, records: Sequence[Record]) -> None:
        for chunk in self.predictor.predict(each, self.predictor.source(table)):
            for task, predictions in chunk.predictions.items():
                for row, made in zip(chunk.rows.tolist(), predictions, strict=True):
                    records[row].update({task: made} if len(self.predictor.tasks) > 1 else made)


@dataclass(frozen=True, kw_only=True)
class EmbeddingAnswer:
    """Vectors of texts: `embedding`, or `embeddings` of a text's tokens; a sparse one is {token:
    weight}."""

    embedder: Embedder
    columns: Mapping[str, ColumnKey] = field(default_factory=dict)
    """{role: column}; the texts are `text_a`, with `text_b` pairs."""
    read: TableSettings = field(default_factory=TableSettings)

    def __call__(self, rows: ReadRows) -> list[Record]:
        read = replace(self.read, columns=self.columns)
        table = Table.from_read(rows, without_labels(read))
        texts = texts_of(table, self.columns)
        encoded = self.embedder.encode(texts)
        if self.embedder.settings.tokens:
            made = [{"embeddings": x.tolist()} for x in self.embedder.embed_tokens(encoded)]
        else:
            vectors = self.embedder.vectors_encoded(encoded)
            made = [{"embedding": self._plain(x)} for x in vectors]
        return [{**first, **more} for first, more in zip(_ids(table), made, strict=True)]

    def _plain(self, vector: np.ndarray | SparseVector) -> list[float] | dict[str, float]:
        if isinstance(vector, np.ndarray):
            return vector.tolist()
        return self.embedder.named(vector)


def _ids(table: Table) -> list[Record]:
    """The rows' own ids, if they have any."""
    if "id" not in table.columns:
        return [{} for _ in range(len(table))]
    return [{"id": each} for each in table.column("id")]
