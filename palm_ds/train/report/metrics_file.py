"""metrics.jsonl and TensorBoard events, which a full disk ends without ending the run.

metrics.jsonl has what a run measured: one JSON object per line, of three kinds:

    {"kind": "step", "step": 120, "stage": 1, "lr": ..., "loss": {task: ...},
     "accuracy": {task: ...}, "grad_norm": ..., "tokens_per_second": ..., "flops_per_second": ...,
     "mfu": ..., "memory_allocated": ..., "memory_reserved": ..., "data_wait": ..., "compiled": ...,
     "loss_scale": ..., "skipped": ..., "elapsed": ...}
    {"kind": "evaluation", "step": 120, "stage": 1, "started": [task, ...],
     "scores": {task: {"loss": ..., "accuracy": ..., ...}}}
                      (on a further evaluation set: "task (set)" instead of "task")
    {"kind": "event", "event": "save", "step": 120, "stall_seconds": ..., "write_seconds": ...}

`step` is the number of completed steps. Stages count from 1, as in the log; an evaluation before
the first step has stage 0. `started` lists the tasks trained so far. `elapsed` is in seconds of
running, summed over all restarts of the run; `data_wait` is the fraction of time spent waiting for
rows; tokens exclude padding. `mfu` is the fraction of what the makers of the GPUs say they can do
(left out for unknown ones), memory the largest use of a GPU since the last such line, in bytes
(left out on CPUs), `compiled` how many graphs torch.compile has compiled so far. Non-finite numbers
are null. Lines are flushed as they are written, so the file of a killed run ends in at most one
broken line. A resumed run first removes the lines of the steps that it will repeat.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from palm_ds.common.atomic import write_file_atomically


class AppendFile:
    """Lines are written immediately. What the disk does not take is kept, in order, and written
    with the next line that fits; `say` gets a line when that begins and when it ends. The file is
    opened for each line: it may have been moved or deleted."""

    def __init__(self, path: Path, say: Callable[[str], None]):
        self.path, self._say = path, say
        self._left = b""
        self._failing = False
        path.open("ab").close()  # refused now rather than in a week

    def append(self, line: str) -> None:
        self._left += line.encode("utf-8") + b"\n"
        self._write()

    def _write(self) -> None:
        try:
            with self.path.open("ab", buffering=0) as file:
                while self._left:
                    self._left = self._left[file.write(self._left) or 0 :]
        except OSError as error:
            if not self._failing:
                self._say(f"{self.path}: cannot be written ({error.strerror}); lines are kept")
            self._failing = True
            return
        if self._failing:
            self._say(f"{self.path}: can be written again; no line is lost")
        self._failing = False

    def close(self) -> None:
        """Write what is left, if that is possible now. May be called twice."""
        if self._left:
            self._write()
        if self._left:
            self._say(f"{self.path}: {self._left.count(10)} lines could not be written")
            self._left = b""


FILE = "metrics.jsonl"
_STEP = b'{"kind": "step",'
"""The beginning of a step's line."""
_MAX_STEP, _MAX_NUMBER = 1 << 53, sys.float_info.max
PAIRS, PROBE = "minimal pairs", "probe"
"""Evaluation sets that no source gives."""


def set_title(task: str, evaluation_set: str) -> str:
    """The name of a task's scores on a further evaluation set."""
    return f"{task} ({evaluation_set})"


def task_of(title: str) -> str:
    """The task of a name of scores."""
    return title.partition(" (")[0]


@dataclass(frozen=True)
class Metrics:
    """The lines of a metrics.jsonl by kind; `broken` lists those that could not be read."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether the run is complete."""
        return any(event["event"] == "end" for event in self.events)

    def final_scores(self) -> dict[str, Any] | None:
        """Those of the final weights: of the best evaluation with `evaluate.best`. None if the run
        is not complete or evaluated nothing."""
        if not self.ended:
            return None
        best = [event["step"] for event in self.events if event["event"] == "best"]
        scores = [e["scores"] for e in self.evaluations if not best or e["step"] == best[-1]]
        return scores[-1] if scores else None


def read_metrics(path: str | Path, *, steps: bool = True) -> Metrics:
    """Read all complete lines of the file; truncated or damaged ones are listed in `broken`.
    Without `steps` the lines of steps are left out, a hundred times as many as the others."""
    metrics = Metrics()
    kinds = {"step": metrics.steps, "evaluation": metrics.evaluations, "event": metrics.events}
    with Path(path).open("rb") as lines:
        for line_number, line in enumerate(lines, 1):
            if not steps and line.startswith(_STEP):
                continue
            record = _record(line)
            if record is None:
                metrics.broken.append(f"line {line_number} of {FILE} is broken and was skipped")
            else:
                kinds[record["kind"]].append(record)
    return metrics


_OF_EVENTS: Mapping[object, tuple[str, type]] = {
    "unlabelled": ("message", str),
    "chosen": ("of_step", int),
}
"""What readers need of an event, and its type."""


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
        if b"\\u" in line:  # half a character is none
            json.dumps(record, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    known = abs(record["step"]) < _MAX_STEP and _is_number(record.get("elapsed"))
    return record if known and _is_of_kind(record) else None


def _is_of_kind(record: Mapping[str, object]) -> bool:
    """Whether a line has what its kind has, as a line that somebody edited may not."""
    if record.get("kind") == "step":
        return all(_are_numbers(record.get(key)) for key in ("loss", "accuracy"))
    if record.get("kind") == "evaluation":
        scores = record.get("scores") or {}
        started = isinstance(record.get("started"), list | None)
        return started and isinstance(scores, dict) and all(map(_is_score, scores.values()))
    event = record.get("event", "")
    if record.get("kind") != "event" or not isinstance(event, str):
        return False
    key, kind = _OF_EVENTS.get(event, ("step", int))
    return isinstance(record.get(key), kind)


def _is_score(score: object) -> bool:
    if not isinstance(score, dict) or not _are_tables(score.get("tables")):
        return False
    rest = {key: value for key, value in score.items() if key not in ("metrics", "tables")}
    return _are_numbers(rest) and _are_numbers(score.get("metrics"))


def _are_tables(tables: object) -> bool:
    """Whether these are tables by title, each of rows of cells, or nothing."""
    return tables is None or (
        isinstance(tables, dict)
        and all(
            isinstance(rows, list) and rows and all(isinstance(row, list) for row in rows)
            for rows in tables.values()
        )
    )


def _are_numbers(values: object) -> bool:
    """Whether these are numbers by name, or nothing."""
    return values is None or (
        isinstance(values, dict)
        and all(isinstance(x, float) or _is_number(x) for x in values.values())
    )


def _is_number(value: object) -> bool:
    """Whether this is a finite number, or nothing."""
    return value is None or (isinstance(value, int | float) and abs(value) <= _MAX_NUMBER)


def truncate_after(path: Path, step: int, *, evaluated: bool = True) -> float:
    """Remove the lines of later steps, and broken ones; all of them, if the run begins again (0).
    Without `evaluated`, an evaluation after `step` steps is removed, too: it is made again. Returns
    the running time in seconds up to then."""
    if not path.exists():
        return 0.0
    elapsed = 0.0

    def kept(lines: Iterable[bytes]) -> Iterator[bytes]:
        nonlocal elapsed
        for line in lines:
            record = _record(line)
            if record is None:
                continue
            again = record["kind"] == "evaluation" and not evaluated
            if record["step"] < step + (not again):
                yield line.rstrip(b"\n") + b"\n"
                elapsed = record.get("elapsed") or elapsed

    with path.open("rb") as lines:
        write_file_atomically(path, kept(lines if step else ()))
    return elapsed


def open_board(folder: Path, start: int, say: Callable[[str], None]) -> Any:
    """A TensorBoard writer that hides the events of repeated steps, or None."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        say("TensorBoard is not installed: metrics.jsonl is the only record of the run")
        return None
    # of a run that begins again, the evaluation before the first step, too
    board = SummaryWriter(str(folder), purge_step=start + 1 if start else 0, flush_secs=10)
    _tolerate(board, say)
    return board


class _TolerantRecords:
    """Writes records until one cannot be written; TensorBoard's thread would die of it, with a
    traceback, and the training thread with it."""

    def __init__(self, records: Any, say: Callable[[str], None]):
        self._records, self._say, self._broken = records, say, False

    def write(self, data: bytes) -> None:
        self._try(lambda: self._records.write(data))

    def flush(self) -> None:
        self._try(self._records.flush)

    def close(self) -> None:
        self._try(self._records.close)

    def _try(self, action: Callable[[], None]) -> None:
        if self._broken:
            return
        try:
            action()
        except OSError as error:
            self._broken = True
            self._say(f"TensorBoard's events end here: {error.strerror}; metrics.jsonl has them")


def _tolerate(board: Any, say: Callable[[str], None]) -> None:
    """Wrap the records of a writer, as far as this version of TensorBoard has them there."""
    writer: Any = getattr(board.file_writer.event_writer, "_async_writer", None)
    if worker := getattr(writer, "_worker", None):
        records = _TolerantRecords(worker._record_writer, say)
        writer._writer = worker._record_writer = records
