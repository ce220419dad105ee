"""Forgetting: the held-out scores of each task (lines) after each stage (columns).

A task that was learned in an early stage and is worse after a later one was forgotten in between,
which continual multi-task learning is meant to prevent (ERNIE 2.0, section 3.1).

                          stage 1    stage 2    stage 3    last - best
    knowledge_masking      13.1 %     14.3 %     15.5 %*          best
    sentence_distance    (33.2 %)    47.9 %*     46.1 %    -1.8 ± 0.9

`*` marks the best stage; values in brackets are from before the task was first trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from palm_ds.common.messages import nan_to_null
from palm_ds.data.stream.stages import Curriculum, tasks_of
from palm_ds.train.report.metrics_file import Metrics, task_of

Measure = Literal["accuracy", "loss"]
_MEASURES: Sequence[Measure] = ("accuracy", "loss")
_CHANGE = "last - best"
_GAP = 2  # columns between two cells
_WIDTH = 100


@dataclass(frozen=True, kw_only=True)
class StageEnd:
    """The held-out scores at the end of a stage, and the tasks trained up to then (None means
    unknown)."""

    name: str
    step: int
    scores: Mapping[str, Mapping[str, Any]]
    trained: frozenset[str] | None = None


@dataclass(frozen=True, kw_only=True)
class Line:
    """A task over the stages. `best` is the index of its best stage since it was first trained,
    None if it never was; `change` is the last stage's value minus the best one's."""

    task: str
    values: tuple[float | None, ...]
    trained: tuple[bool, ...]
    best: int | None = None
    change: float | None = None
    error: float | None = None
    """One standard error of the change, if known."""

    @property
    def clearly_forgotten(self) -> bool:
        """Whether accuracy has dropped by more than two standard errors."""
        return bool(self.change and self.error and self.change < -2 * self.error)


def stage_ends(metrics: Metrics, curriculum: Curriculum | None) -> list[StageEnd]:
    """The evaluations at the ends of completed stages, and the one before the first step if there
    is one (a run that extends another).

    The plan says where stages end. Without it, the last evaluation of each stage that is followed
    by another is taken as its end."""
    at = {r["step"]: r.get("scores") or {} for r in metrics.evaluations}  # the last of a step
    before = [StageEnd(name="before", step=0, scores=at[0])] if 0 in at else []
    ends = _ends_by_stage(metrics) if curriculum is None else _ends_by_curriculum(at, curriculum)
    # Which tasks were trained before the first step is only known to the extended run.
    return [*before, *(replace(end, trained=None) for end in ends)] if before else ends


def _ends_by_curriculum(
    at: Mapping[int, Mapping[str, Any]], curriculum: Curriculum
) -> list[StageEnd]:
    ends, trained = [], frozenset()
    for number, stage in enumerate(curriculum.stages, 1):
        trained |= {task for task_group, _ in stage.steps_of for task in tasks_of(task_group)}
        end = stage.first + stage.steps
        if end in at:
            ends.append(StageEnd(name=f"stage {number}", step=end, scores=at[end], trained=trained))
    return ends


def _ends_by_stage(metrics: Metrics) -> list[StageEnd]:
    last = {r["stage"]: r for r in metrics.evaluations if _has_stage(r)}
    unfinished = max((r["stage"] for r in metrics.steps if _has_stage(r)), default=0)
    if any(event.get("event") == "end" for event in metrics.events):
        unfinished += 1
    return [
        StageEnd(name=f"stage {stage}", step=r["step"], scores=r.get("scores") or {})
        for stage, r in sorted(last.items())
        if stage < unfinished and r["step"]
    ]


def _has_stage(record: Mapping[str, Any]) -> bool:
    return isinstance(record.get("stage"), int) and record["stage"] >= 1


def lines(ends: Sequence[StageEnd], measure: Measure, order: Iterable[str] = ()) -> list[Line]:
    """One line per scored task: those of `order` first, then by first appearance."""
    seen = dict.fromkeys(task for end in ends for task in end.scores)
    names = [task for task in dict.fromkeys(order) if task in seen]
    return [_line(ends, measure, task) for task in [*names, *(t for t in seen if t not in names)]]


def _line(ends: Sequence[StageEnd], measure: Measure, task: str) -> Line:
    values = tuple(_number(end.scores.get(task, {}).get(measure)) for end in ends)
    trained = tuple(end.trained is None or task_of(task) in end.trained for end in ends)
    known = {i: v for i, v in enumerate(values) if v is not None and trained[i]}
    if not known:
        return Line(task=task, values=values, trained=trained)
    better = max if measure == "accuracy" else min
    # The last of equal values: a task that is as good as ever is not forgotten.
    best = better(reversed(known), key=lambda i: known[i])
    last = max(known)
    errors = [_number(ends[i].scores[task].get("standard_error")) for i in (best, last)]
    error = None
    if measure == "accuracy" and best != last and None not in errors:
        error = math.hypot(*(e for e in errors if e is not None))
    change = known[last] - known[best]
    return Line(task=task, values=values, trained=trained, best=best, change=change, error=error)


def _number(value: object) -> float | None:
    number = nan_to_null(value)
    return float(number) if isinstance(number, (int, float)) else None


# Cells -----------------------------------------------------------------------------------------


def value_cell(line: Line, stage: int, measure: Measure) -> str:
    """`14.3 %` or `5.8626`, with brackets or `*`; `-` if there is no score."""
    value = line.values[stage]
    if value is None:
        return "-"
    text = f"{100 * value:.1f} %" if measure == "accuracy" else f"{value:.4f}"
    return (text if line.trained[stage] else f"({text})") + "*" * (stage == line.best)


def change_cell(line: Line, measure: Measure) -> str:
    """`best` if the last stage is the best one; changes of accuracy are in percentage points."""
    if line.change is None or line.best is None:
        return "-"
    if not line.change:
        return "best"
    if measure == "loss":
        return f"{line.change:+.4f}"
    error = "" if line.error is None else f" ± {100 * line.error:.1f}"
    return f"{100 * line.change:+.1f}{error}"


def tables(
    ends: Sequence[StageEnd], order: Iterable[str] = (), width: int = _WIDTH
) -> Iterator[Table]:
    """Tables of accuracy and loss for a screen of `width` columns, each in several if there are
    more stages than fit; none if fewer than two stages have ended."""
    order = list(order)
    for measure in _MEASURES if len(ends) > 1 else ():
        found = lines(ends, measure, order)
        title = f"held-out {measure} after each stage"
        for stages in _parts(found, ends, measure, width):
            yield _table(title, ends, measure, found, stages)
            title = ""


def _parts(
    found: Sequence[Line], ends: Sequence[StageEnd], measure: Measure, width: int
) -> Iterator[range]:
    """The stages of each table: as many as fit beside the tasks' names, and the change behind the
    last of them."""
    cells = (value_cell(line, stage, measure) for line in found for stage in range(len(ends)))
    stage_width = _GAP + max(map(len, [*cells, *(end.name for end in ends)]))
    changes = [len(change_cell(line, measure)) for line in found]
    last = _GAP + max(len(_CHANGE), *changes)
    room = width - max(len(line.task) for line in found)
    first = 0
    while first < len(ends):
        left = len(ends) - first
        many = left if left * stage_width + last <= room else min(room // stage_width, left - 1)
        yield range(first, first + max(many, 1))
        first += max(many, 1)


def _table(
    title: str, ends: Sequence[StageEnd], measure: Measure, found: Sequence[Line], stages: range
) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), title=title, title_justify="left")
    table.add_column("task", overflow="fold")
    for stage in stages:
        table.add_column(ends[stage].name, justify="right")
    changes = stages[-1] == len(ends) - 1
    if changes:
        table.add_column(_CHANGE, justify="right")
    for line in found:
        cells = [Text(value_cell(line, i, measure), _style(line, i)) for i in stages]
        if changes:
            style = "bold red" if line.clearly_forgotten else ""
            cells.append(Text(change_cell(line, measure), style))
        table.add_row(line.task, *cells)
    return table


def _style(line: Line, stage: int) -> str:
    if not line.trained[stage]:
        return "dim"
    return "bold green" if stage == line.best else ""
