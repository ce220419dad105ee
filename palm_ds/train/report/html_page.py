"""Parts of HTML pages: the page itself, tables, the tables of a task's scores and their plot."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from palm_ds.common.atomic import write_file_atomically
from palm_ds.common.files import make_folder
from palm_ds.tasks.metrics.class_report import CALIBRATION
from palm_ds.train.report.charts import calibration_panel, figure

_LONG = 30
"""Longer tables are folded."""
ScoredTask: TypeAlias = tuple[Mapping[str, float], Mapping[str, Sequence[Sequence[Any]]]]
"""Metrics of a task and its tables: {title: rows of cells, header first}."""

_STYLE = """
:root { color-scheme: light dark; --page: light-dark(#fff, #14191f);
        --ink: light-dark(#30343b, #dde3ea); --pale: light-dark(#6a707a, #9aa8b7);
        --line: light-dark(#d5d8dd, #3b4754); --grid: light-dark(#eceef1, #28323c);
        --box: light-dark(#f5f6f8, #1d252e); --note: light-dark(#fff4e5, #3a2a17);
        --good: light-dark(#19774a, #5fce96); --bad: light-dark(#b3261e, #ff9b90);
        --train: light-dark(#2f6fb3, #6aa5e6); --violet: light-dark(#7b4fa3, #b995dd); }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 1060px;
       margin: 2.5rem auto; padding: 0 1.2rem; background: var(--page); }
h1 { font-size: 1.7rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 0; } .lead { color: var(--pale); margin: .2rem 0 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .9rem .3rem 0; text-align: left; vertical-align: top; }
th { font-weight: 600; color: var(--pale); border-bottom: 1px solid var(--line); }
td { border-bottom: 1px solid var(--grid); } .n { text-align: right; }
td.n, td:first-child { white-space: nowrap; } td { overflow-wrap: break-word; }
.note { background: var(--note); border-left: 4px solid #d9691e; padding: .5rem .9rem;
        margin: 1rem 0 0; overflow-wrap: anywhere; }
.good { color: var(--good); font-weight: 600; } .bad { color: var(--bad); font-weight: 600; }
.key { color: var(--pale); font-size: .9rem; }
.charts { display: grid; gap: 0 1rem;
          grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)); }
svg { width: 100%; height: auto; } svg text { fill: var(--ink); }
pre { background: var(--box); padding: 1rem; overflow: auto; font-size: .85rem; }
summary { cursor: pointer; font-weight: 600; margin-top: 1rem; }
.train { color: var(--train); } .held { color: #d9691e; } .baseline { color: #8a8f98; }
@media (max-width: 40rem) { body { margin: 1.2rem auto; padding: 0 .9rem; } }
"""


def page(title: str, parts: Sequence[str]) -> str:
    """A self-contained page of parts of HTML; empty ones are left out."""
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{text_of(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def write_scores(path: Path, title: str, scores: Mapping[str, ScoredTask]) -> None:
    """Write a page of scores, with the tables of every task."""
    parts = [f"<h1>{text_of(title)}</h1>"]
    for task, (metrics, tables) in scores.items():
        rows = [[text_of(name), f"{value:.4f}"] for name, value in metrics.items()]
        parts += [f"<h2>{text_of(task)}</h2>", table_of(["metric", "score"], rows, numbers_from=1)]
        parts.append(score_tables("", tables))
    make_folder(path.parent)
    write_file_atomically(path, page(title, parts))


def score_tables(task: str, tables: Mapping[str, Sequence[Sequence[Any]]]) -> str:
    """The tables of a task's scores, headed by its name and their titles."""
    return "\n".join(
        _score_table(f"{task}: {title}" if task else title, title, *rows)
        for title, rows in tables.items()
    )


def _score_table(heading: str, title: str, heads: Sequence[Any], *rows: Sequence[Any]) -> str:
    cells = [[text_of(_cell(x)) for x in row] for row in rows]
    shown = table_of([text_of(head) for head in heads], cells, numbers_from=1)
    if title == CALIBRATION:
        shown = figure([calibration_panel(rows)], height=2.8) + shown + _CALIBRATION_KEY
    if len(rows) > _LONG:
        shown = f"<details><summary>{len(rows):,} rows</summary>{shown}</details>"
    return f"<h3>{text_of(heading)}</h3>{shown}"


_CALIBRATION_KEY = (
    "<p class='key'>Accuracy of predictions by their probability; on the diagonal they are right "
    "as often as they say. The gap of all is the expected calibration error.</p>"
)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str("-" if value is None else value)


def table_of(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers_from: int) -> str:
    """A table from cells of HTML; columns from `numbers_from` on are right-aligned."""

    def line(tag: str, cells: Sequence[str]) -> str:
        marks = [" class='n'" if i >= numbers_from else "" for i in range(len(cells))]
        return "".join(f"<{tag}{m}>{c}</{tag}>" for m, c in zip(marks, cells, strict=True))

    body = "\n".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    head = f"<tr>{line('th', heads)}</tr>" if any(heads) else ""
    return f"<div class='wide'><table>{head}\n{body}</table></div>"


def text_of(value: object) -> str:
    """A value as text in HTML; `?` for what UTF-8 does not have, such as half an emoji in JSON."""
    return html.escape(str(value).encode("utf-8", "replace").decode("utf-8"))
