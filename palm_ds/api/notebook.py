"""Progress of a training in a notebook, below the cell, and its report inline.

    NotebookProgress(total=200).record("step", {...})    a bar, the losses, the last scores
    Report("runs/mine/report.html")                      the curves, in a cell

IPython is never imported unless the program runs in it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from palm_ds.common.errors import UserError
from palm_ds.common.summary import html_table, score_table

_HEIGHT = 720  # of the report, in pixels
_WIDTH, _TALL = 360, 60  # of the curve


def in_notebook() -> bool:
    """Whether this program runs in a kernel of Jupyter, which shows HTML."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return hasattr(shell, "kernel")


class NotebookProgress:
    """A display in the output of a cell, updated with each record of the log."""

    def __init__(self, total: int) -> None:
        """`total`: steps of the whole training."""
        from IPython.display import HTML, display

        self._html = HTML
        self._total, self._step, self._note = total, 0, "starts"
        self._losses: list[tuple[int, Mapping[str, float]]] = []
        self._scores: Mapping[str, Mapping[str, float]] = {}
        self._handle: Any = display(HTML(self.html()), display_id=True)

    def record(self, kind: str, values: Mapping[str, Any]) -> None:
        """Show a line of metrics.jsonl."""
        self._step = max(self._step, values.get("step") or 0)
        if kind == "step":
            self._note = ""
            self._losses.append((values["step"], values.get("loss") or {}))
        elif kind == "evaluation":
            self._scores = {task: _numbers(score) for task, score in values["scores"].items()}
        elif message := values.get("message"):
            self._note = message
        self._handle.update(self._html(self.html()))

    def html(self) -> str:
        """The present state."""
        bar = f'<progress value="{self._step}" max="{self._total}" style="width: 20em"></progress>'
        losses = self._losses[-1][1] if self._losses else {}
        parts = [f"step {self._step:,} of {self._total:,}"]
        known = {task: value for task, value in losses.items() if value is not None}
        parts += [f"{task}: loss {value:.4g}" for task, value in known.items()]
        line = " &nbsp; ".join(map(escape, [*parts, self._note] if self._note else parts))
        scores = score_table(self._scores) if self._scores else ""
        return f"<div>{bar} {line}</div>{self._curve()}{scores}"

    def _curve(self) -> str:
        """The sum of the tasks' losses over the steps, as a line."""
        points = [(n, sum(x for x in each.values() if x is not None)) for n, each in self._losses]
        if len(points) < 2:
            return ""
        low, high = min(y for _, y in points), max(y for _, y in points)
        first, wide = points[0][0], max(points[-1][0] - points[0][0], 1)
        line = " ".join(
            f"{_WIDTH * (x - first) / wide:.1f},{_TALL * (high - y) / ((high - low) or 1):.1f}"
            for x, y in points
        )
        return (
            f'<svg width="{_WIDTH}" height="{_TALL}" role="img" aria-label="training loss">'
            f'<polyline points="{line}" fill="none" stroke="#4878a8" stroke-width="1.5"/></svg>'
        )


def _numbers(score: Mapping[str, Any]) -> dict[str, float]:
    numbers = {**(score.get("metrics") or {}), "loss": score.get("loss")}
    return {name: value for name, value in numbers.items() if isinstance(value, int | float)}


@dataclass(frozen=True)
class Report:
    """The report of a run, shown by a notebook."""

    path: Path

    def _repr_html_(self) -> str:
        page = escape(self.path.read_text("utf-8"), quote=True)
        frame = f'<iframe srcdoc="{page}" style="width: 100%; border: 0" height="{_HEIGHT}"'
        return f'{frame} sandbox="allow-scripts"></iframe>'


class TaskPredictions(dict[str, list[dict[str, Any]]]):
    """{task: a prediction for each row, in order}; `rows` are those of the only task."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The predictions of the only task, as for pandas.DataFrame. Raises UserError if there are
        several."""
        if len(self) != 1:
            raise UserError(f"rows: there are several tasks; choose one: [{', '.join(self)}]")
        return next(iter(self.values()))

    def _repr_html_(self) -> str:
        return "".join(f"<b>{escape(task)}</b>{_rows(rows)}" for task, rows in self.items())


def _rows(rows: list[dict[str, Any]], most: int = 10) -> str:
    heads = list(dict.fromkeys(name for row in rows[:most] for name in row))
    cells = [[_short(row.get(name, "")) for name in heads] for row in rows[:most]]
    more = f"<div>... {len(rows):,} rows</div>" if len(rows) > most else ""
    return html_table(cells, heads) + more


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
