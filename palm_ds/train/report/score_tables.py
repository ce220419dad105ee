"""Scores for the screen: tables, and metrics in one line."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

_METRICS_WIDTH = 52
_WIDTH = 100
"""Columns of a terminal into which all scores fit unless names are long."""


def score_tables(
    scores: Mapping[str, Mapping[str, Any]], title: str, width: int = _WIDTH
) -> list[Table]:
    """Tables of held-out scores: one of the tasks with metrics and one of the others. A terminal
    of fewer columns than 100, its `width`, gets a table with fewer scores."""
    by_metrics = {task: score for task, score in scores.items() if score.get("metrics")}
    others = {task: score for task, score in scores.items() if task not in by_metrics}
    tables = [metric_table(by_metrics, title, width)] if by_metrics else []
    left_out = () if width >= _WIDTH else ("perplexity", "labels")
    title = title if not tables else ""
    return [*tables, score_table(others, title, left_out)] if others else tables


def metric_table(scores: Mapping[str, Mapping[str, Any]], title: str, width: int = _WIDTH) -> Table:
    """One line per task: its metrics, the primary one first, its loss and the baseline's loss. In
    a terminal of few columns, its `width`, the metrics take more lines."""
    table = Table(box=None, pad_edge=False, padding=(0, 2), title=title, title_justify="left")
    table.add_column("task")
    table.add_column("scores", max_width=_METRICS_WIDTH)
    for name in ("loss", "baseline", "labels"):
        table.add_column(name, justify="right")
    rows = [(task, *_loss_cells(score)) for task, score in scores.items()]
    others = zip(("task", "loss", "baseline", "labels"), *rows, strict=True)
    room = width - sum(max(map(cell_len, column)) + 4 for column in others)
    for (task, *numbers), score in zip(rows, scores.values(), strict=True):
        table.add_row(task, _in_lines(_metrics(score), min(room, _METRICS_WIDTH)), *numbers)
    return table


def _loss_cells(score: Mapping[str, Any]) -> Sequence[str]:
    losses = number(score.get("loss")), number(score.get("baseline_loss"))
    return (*losses, number(score.get("count"), ",.0f"))


def metrics_text(score: Mapping[str, Any], most: int | None = None) -> str:
    """`accuracy 0.912 ± 0.010  f1 0.902`: the first `most` metrics, accuracy with its standard
    error where it is that of the labels; that of documents read in windows is another."""
    return "  ".join(_metrics(score, most))


def _metrics(score: Mapping[str, Any], most: int | None = None) -> list[str]:
    parts = []
    for name, value in [*(score.get("metrics") or {}).items()][:most]:
        of_labels = name == "accuracy" and _same(value, score.get("accuracy"))
        error = score.get("standard_error") if of_labels else None
        sure = f" ± {error:.3f}" if error is not None and math.isfinite(error) else ""
        form = ".4g" if value is not None and abs(value) >= 10 else ".3f"
        parts.append(f"{name} {number(value, form)}{sure}")
    return parts


def _same(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and math.isclose(one, other, abs_tol=1e-4)


def _in_lines(parts: Sequence[str], width: int) -> str:
    """The parts in lines that end between two of them."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return "\n".join(lines)


def score_table(
    scores: Mapping[str, Mapping[str, float]], title: str, left_out: Collection[str] = ()
) -> Table:
    """Held-out scores of tasks without metrics, with a baseline that ignores the text; without the
    columns that are `left_out`."""
    table = Table(box=None, pad_edge=False, padding=(0, 1), title=title, title_justify="left")
    table.add_column("task", overflow="fold")
    heads = ("loss", "baseline", "perplexity", "accuracy", "baseline", "difference", "labels")
    kept = [place for place, head in enumerate(heads) if head not in left_out]
    for head in (heads[place] for place in kept):
        together = head in ("perplexity", "difference")
        table.add_column(head, justify="right", overflow="fold", no_wrap=together)
    for task, score in scores.items():
        cells = _score_cells(score)
        table.add_row(task, *(cells[place] for place in kept))
    return table


def _score_cells(score: Mapping[str, float]) -> Sequence[str]:
    above = score.get("standard_errors_above")
    error = score.get("standard_error")
    plus_minus = "" if error is None or math.isnan(error) else f" ± {100 * error:.1f}"
    return (
        number(score.get("loss")),
        number(score.get("baseline_loss")),
        number(score.get("perplexity"), ",.1f"),
        share(score.get("accuracy")) + plus_minus,
        share(score.get("baseline_accuracy")),
        "" if above is None or not math.isfinite(above) else f"{above:+,.1f} s.e.",
        number(score.get("count"), ",.0f"),
    )


def detail_tables(
    task: str, tables: Mapping[str, Sequence[Sequence[Any]]], most: int = 20
) -> list[Table | str]:
    """The tables of a task's scores for the screen, of long ones the first `most` lines, with the
    number of those left out."""
    shown: list[Table | str] = []
    for title, (heads, *rows) in tables.items():
        table = Table(box=None, pad_edge=False, padding=(0, 2), title_justify="left")
        table.title = Text(f"{task}: {title}" if task else title)
        for i, head in enumerate(heads):
            words = all(isinstance(row[i], str) for row in rows)
            table.add_column(Text(str(head)), justify="left" if words else "right", overflow="fold")
        for row in rows[:most]:
            table.add_row(*(Text(_cell(value)) for value in row))
        shown += ["", table]
        if left := len(rows) - most:
            shown += [f"... and {left:,} more"] if left > 0 else []
    return shown


def _cell(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def number(value: float | None, form: str = ".4f") -> str:
    return "-" if value is None or not math.isfinite(value) else format(value, form)


def share(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{100 * value:.1f} %"
