"""Writes and reads prediction files, one task at a time.

    TASK.predictions.json   a line per row: {"index": 0, "label": ..., "logits": ..., "probs": ...}
    TASK.tsv                index, prediction: the submission format of GLUE and CLUE (on request)
    TASK.NAME               further files of a task (`prediction_files`): conll for tagging;
                            SQuAD's predictions.json, nbest_predictions.json and null_odds.json for
                            reading comprehension

If a task writes its own predictions.json, the lines per row are in TASK.rows.json. Also readable:
SQuAD's {id: answer}, index<TAB>prediction or id<TAB>prediction, both with a comma too, one
prediction per line, and CoNLL.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

from palm_ds.common.atomic import check_not_current
from palm_ds.common.errors import UserError
from palm_ds.common.rows.cells import CellRow, csv_rows, tsv_rows
from palm_ds.common.rows.lines import BadRecordError, Lines, NumberedLines
from palm_ds.data.reader import Table, TableSettings, open_table
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.interfaces import CELL, PredictionFiles, StoredPrediction

ABOUT, SCORES = "about.json", "scores.json"
REPORT = "report"
"""The entry of a task's scores with those by class."""
LINES = "predictions.json"


@dataclass(frozen=True)
class FinishedPredictions:
    """The predictions of one task, read again from their parts whenever they are needed: there may
    be more of them than fit into memory."""

    parts: Sequence[Path]
    """Files of rows that follow one another, with a line of JSON for each task: a list."""
    line: int
    """Of the task."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """One for each row, empty if the task predicts nothing for it."""
        for path in self.parts:
            yield from json.loads(nth_line(path, self.line))

    def by_row(self) -> Mapping[int, dict[str, Any]]:
        """{row: prediction} of rows that have one; held in memory as soon as it is used."""
        return _ByRow(self)


def nth_line(path: Path, number: int) -> str:
    with path.open(encoding="utf-8") as file:
        return next(islice(file, number, None))


class _ByRow(Mapping[int, dict[str, Any]]):
    def __init__(self, predictions: Iterable[dict[str, Any]]):
        self._predictions = predictions

    @cached_property
    def _known(self) -> dict[int, dict[str, Any]]:
        return {row: each for row, each in enumerate(self._predictions) if each}

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self._known[row]

    def __iter__(self) -> Iterator[int]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def file_names(tasks: Iterable[str]) -> dict[str, str]:
    """{task: prefix of its files}: its name, with characters replaced that files cannot have."""
    names: dict[str, str] = {}
    for task in tasks:
        name = re.sub(r"[^\w .-]", "_", task).strip(" .") or "task"
        others = {other.lower() for other in names.values()}
        number = next(
            k for k in range(1, len(others) + 3) if _numbered(name, k).lower() not in others
        )
        names[task] = _numbered(name, number)
    return names


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}_{number}"


def write_task(
    folder: Path,
    name: str,
    task: PredictionFiles,
    predictions: FinishedPredictions,
    source: TableSource,
    *,
    tsv: bool = False,
) -> list[str]:
    """Write the files of one task, prefixed with `name`; returns their names."""
    further = task.prediction_files(predictions.by_row(), source)
    written: dict[str, Iterable[str]] = {
        "rows.json" if LINES in further else LINES: _lines(predictions, source.table)
    }
    for ending, content in further.items():
        written[ending] = [content if isinstance(content, str) else _indented(content)]
    if tsv:
        written["tsv"] = submission(task, predictions)
    for ending, texts in written.items():
        with (folder / f"{name}.{ending}").open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(texts)
    return [f"{name}.{ending}" for ending in written]


def _lines(predictions: Iterable[Mapping[str, Any]], table: Table) -> Iterator[str]:
    """PaddlePALM's lines, with the row's own id if it has one."""
    ids = table.column("id") if "id" in table.columns else None
    for index, prediction in enumerate(predictions):
        row = {"index": index} if ids is None else {"index": index, "id": ids[index]}
        yield json.dumps({**row, **prediction}, ensure_ascii=False) + "\n"


def _indented(content: object) -> str:
    return json.dumps(content, ensure_ascii=False, indent=4) + "\n"


def submission(task: PredictionFiles, predictions: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """A header and one line per row."""
    yield "index\tprediction\n"
    for index, prediction in enumerate(predictions):
        yield f"{index}\t{task.submission_value(prediction)}\n"


def check_output(folder: Path) -> None:
    """Raises UserError if the folder, which would be replaced, has other files than predictions."""
    for path in (folder, *folder.absolute().parents):
        if path.exists() and not path.is_dir():
            what = "is a file" if path == folder else f"{path} is a file"
            raise UserError(f"{folder}: {what}; name a folder for the predictions")
    check_not_current(folder)
    if folder.is_dir() and any(folder.iterdir()) and not (folder / ABOUT).is_file():
        raise UserError(
            f"{folder}: has other files than predictions, which would be lost; choose a new folder"
        )


# ---- reading ----


def read_predictions(path: Path, main: str = "") -> Iterator[StoredPrediction]:
    """The predictions of a file, in order. `main`: the task's `prediction_key`; of `tags`, a text
    file may be CoNLL. Raises UserError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as text: {error}") from None
    if not text.strip():
        raise UserError(f"{path}: has no predictions")
    whole = _object(text, main)
    if whole is not None:
        for key, text in whole.items():
            yield StoredPrediction(place=f"{path}, {key!r}", key=key, values={"text": text})
    elif text.lstrip()[0] in "{[" and _is_json(text.split("\n", 1)[0]):
        yield from _json_lines(path, text)
    elif main == "tags" and not re.match(r"(index|id)[\t,;]prediction\s", text):
        yield from conll_column(path, -1)
    else:
        yield from _cells(path, text)


def _object(text: str, main: str) -> dict[str, Any] | None:
    """{id: answer} if that is the whole text, and not its only row."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    one = isinstance(value, dict) and not {"index", "id", main} & value.keys()
    return value if one and all(isinstance(item, str) for item in value.values()) else None


def _is_json(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict | list)
    except ValueError:
        return False
    except RecursionError:
        return True  # the error comes when its line is read


def _json_lines(path: Path, text: str) -> Iterator[StoredPrediction]:
    for number, line in enumerate(text.split("\n"), 1):  # a text may have other line breaks
        place = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except RecursionError:
            raise UserError(f"{place}: not JSON: nested too deeply") from None
        except ValueError as error:
            raise UserError(f"{place}: not JSON: {error}") from None
        if isinstance(value, list):  # PaddlePALM's tags
            value = {"tags": value}
        if not isinstance(value, dict):
            raise UserError(f'{place}: expected an object such as {{"index": 0, ...}}')
        yield StoredPrediction(place=place, key=value.get("index", value.get("id")), values=value)


_ROW = ("index", "id")
"""Columns that say which row a prediction is for."""


def _cells(path: Path, text: str) -> Iterator[StoredPrediction]:
    """Columns that a header names, separated by tabs, commas or semicolons; or a prediction on each
    line."""
    lines = text.removesuffix("\n").split("\n")
    for separator, read in (
        ("\t", tsv_rows),
        (",", csv_rows),
        (";", partial(csv_rows, delimiter=";")),
    ):
        names = [name.strip().strip('"').lower() for name in lines[0].split(separator)]
        if len(names) > 1 and (separator == "\t" or {"prediction", *_ROW} & {*names}):
            yield from _table(path, names, read)
            return
    titled = lines[0].strip().strip('"').lower() == "prediction"
    for number, line in enumerate(lines, 1):
        if number > 1 or not titled:
            yield StoredPrediction(place=f"{path}:{number}", values={CELL: line.strip()})


def _table(
    path: Path, names: Sequence[str], read: Callable[[NumberedLines], Iterator[CellRow]]
) -> Iterator[StoredPrediction]:
    """The predictions of a file whose header has these names."""
    key = next((name for name in _ROW if name in names), "")
    if "prediction" not in names or not key:
        raise UserError(
            f"{path}:1: the columns are {', '.join(names)[:80]}; expected `index` or `id`, and "
            "`prediction`, or one prediction per line"
        )
    with path.open("rb") as handle:
        rows = read(Lines(handle, 0, -1))
        next(rows)
        for row in rows:
            place = f"{path}:{row.line}"
            try:
                cells = row.values(names)
            except BadRecordError as bad:
                raise UserError(f"{place}: {bad}") from None
            values = {CELL: cells["prediction"].strip(), key: cells[key].strip()}
            yield StoredPrediction(place=place, key=values[key], values=values)


def conll_column(path: Path, column: int) -> Iterator[StoredPrediction]:
    """The tags in one column of a CoNLL file, one prediction per sentence."""
    read = TableSettings(format="conll", columns={"tokens": 0, "tags": column})
    table = open_table(str(path), read)
    for i in range(len(table)):
        yield StoredPrediction(place=table.where(i), values=table[i])
