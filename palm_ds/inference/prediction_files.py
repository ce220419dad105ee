"""How predictions are written, a task at a time.

    TASK.predictions.json   a line each row: {"index": 0, "label": ..., "logits": ..., "probs": ...}
    TASK.tsv                index, prediction: what GLUE's and CLUE's sites take (on request)
    TASK.conll              token, tag that the file has (where it has some), predicted tag
    TASK.NAME               whatever else a task makes (`files`): SQuAD's predictions.json,
                            nbest_predictions.json and null_odds.json, of reading comprehension

Where a task makes a predictions.json of its own, its lines are in TASK.rows.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from palm_ds.common.errors import UserError
from palm_ds.data.reader import Table
from palm_ds.data.table_source import TableSource
from palm_ds.data.task import Task

ABOUT, SCORES = "about.json", "scores.json"
LINES = "predictions.json"
# What a prediction says, in a word. Candidates of a ranking are ordered by their score.
_VALUES = ("text", "score", "label", "labels", "value", "tags", "probs")


def file_names(tasks: Iterable[str]) -> dict[str, str]:
    """{task: what its files begin with}: its name, as far as a file may be called so."""
    found: dict[str, str] = {}
    for task in tasks:
        name = re.sub(r"[^\w .-]", "_", task).strip(" .") or "task"
        others = {other.lower() for other in found.values()}
        number = next(
            k for k in range(1, len(others) + 3) if _numbered(name, k).lower() not in others
        )
        found[task] = _numbered(name, number)
    return found


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}_{number}"


def write_task(
    folder: Path,
    name: str,
    task: Task,
    predictions: Sequence[Mapping[str, Any]],
    source: TableSource,
    *,
    tsv: bool = False,
) -> list[str]:
    """The files of one task, which begin with `name`; what they are called. `predictions` has one
    a row of `source`, an empty one where nothing is said of a row."""
    table = source.table
    known = {item: dict(found) for item, found in enumerate(predictions) if found}
    further: dict[str, Any] = getattr(task, "files", lambda *_: {})(known, source)
    written: dict[str, Iterable[str]] = {
        "rows.json" if LINES in further else LINES: _lines(predictions, table)
    }
    for ending, content in further.items():
        written[ending] = [content if isinstance(content, str) else _indented(content)]
    if any("tags" in found for found in predictions):
        written["conll"] = conll(predictions, table)
    if tsv:
        written["tsv"] = submission(predictions)
    for ending, texts in written.items():
        with (folder / f"{name}.{ending}").open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(texts)
    return [f"{name}.{ending}" for ending in written]


def _lines(predictions: Sequence[Mapping[str, Any]], table: Table) -> Iterator[str]:
    """PaddlePALM's lines; with the row's own id, where it has one."""
    ids = table.column("id") if "id" in table.columns else None
    for index, found in enumerate(predictions):
        row = {"index": index} if ids is None else {"index": index, "id": ids[index]}
        yield json.dumps({**row, **found}, ensure_ascii=False) + "\n"


def _indented(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, indent=4) + "\n"


def submission(predictions: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line each row, with one of names on top."""
    yield "index\tprediction\n"
    for index, found in enumerate(predictions):
        yield f"{index}\t{in_a_word(found)}\n"


def in_a_word(prediction: Mapping[str, Any]) -> str:
    """What a prediction says: its class, classes, number, tags or text; empty for an empty one."""
    key = next((key for key in _VALUES if key in prediction), "")
    value = prediction.get(key, "")
    separator = " " if key == "tags" else ","
    text = separator.join(map(str, value)) if isinstance(value, list) else str(value)
    return " ".join(text.split())


def conll(predictions: Sequence[Mapping[str, Any]], table: Table) -> Iterator[str]:
    """A token a line, columns parted by tabs, an empty line behind each row."""
    for index, found in enumerate(predictions):
        row = table[index]
        tokens = found.get("tokens", row.get("tokens")) or []
        columns = [
            tokens,
            *([row["tags"]] if _same(row.get("tags"), tokens) else []),
            found["tags"],
        ]
        for cells in zip(*columns, strict=True):
            yield "\t".join(" ".join(str(cell).split()) or "_" for cell in cells) + "\n"
        yield "\n"


def _same(tags: Any, tokens: Sequence[str]) -> bool:
    return isinstance(tags, list) and len(tags) == len(tokens)


def check_output(folder: Path) -> None:
    """Raises UserError where a folder holds anything but predictions: it would be replaced."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; name a folder for the predictions")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / ABOUT).is_file():
        raise UserError(
            f"{folder}: holds other things than predictions; they would be lost: name a new folder"
        )
