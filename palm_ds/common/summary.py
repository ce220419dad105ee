"""Objects that show what they are in a few lines: text in a console, a table in a notebook."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from html import escape


class Summary:
    """A class whose objects show their `facts` instead of all they hold."""

    @abstractmethod
    def facts(self) -> Mapping[str, object]:
        """{what: its value}, short, and without opening anything."""

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value}" for name, value in self.facts().items())
        return f"{type(self).__name__}({shown})"

    def _repr_html_(self) -> str:
        rows = [(name, str(value)) for name, value in self.facts().items()]
        return f"<b>{escape(type(self).__name__)}</b>{html_table(rows)}"


def pipe_table(rows: Sequence[Sequence[str]], left: Collection[int]) -> str:
    """A Markdown table, whose first row is its heads; columns are aligned to the right, but for
    those in `left`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * w if i in left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]

    def line(row: Sequence[str]) -> str:
        cells = enumerate(zip(row, widths, strict=True))
        return f"| {' | '.join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in cells)} |"

    return "\n".join(map(line, [rows[0], rule, *rows[1:]]))


def html_table(rows: Sequence[Sequence[object]], heads: Sequence[str] = ()) -> str:
    """A table of HTML; the cells are text."""
    lines = [_line("th", heads)] if heads else []
    return f"<table>{''.join([*lines, *(_line('td', row) for row in rows)])}</table>"


def score_table(scores: Mapping[str, Mapping[str, float]]) -> str:
    """{task: {metric: value}} as a table of HTML: a line for each task."""
    rows = [
        (task, ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
        for task, metrics in scores.items()
    ]
    return html_table(rows, ("task", "scores"))


def _line(tag: str, cells: Sequence[object]) -> str:
    style = ' style="text-align: left"'
    return f"<tr>{''.join(f'<{tag}{style}>{escape(str(cell))}</{tag}>' for cell in cells)}</tr>"
