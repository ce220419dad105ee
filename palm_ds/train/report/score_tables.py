"""Scores as people read them: tables for the screen, a line of metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.table import Table


def score_tables(scores: Mapping[str, Mapping[str, Any]], title: str) -> list[Table]:
    """Held-out scores for the screen: of the tasks that are scored by metrics, and of the others;
    each at most 100 columns wide where names are not long."""
    by_metrics = {task: score for task, score in scores.items() if score.get("metrics")}
    others = {task: score for task, score in scores.items() if task not in by_metrics}
    tables = [metric_table(by_metrics, title)] if by_metrics else []
    return [*tables, score_table(others, title if not tables else "")] if others else tables


def metric_table(scores: Mapping[str, Mapping[str, Any]], title: str) -> Table:
    """One line a task: its metrics, the first the one that counts, and the loss beside that of
    knowing nothing."""
    table = Table(box=None, pad_edge=False, padding=(0, 2), title=title, title_justify="left")
    table.add_column("task")
    table.add_column("scores", max_width=52)
    for name in ("loss", "chance", "labels"):
        table.add_column(name, justify="right")
    for task, score in scores.items():
        table.add_row(
            task,
            metrics_text(score),
            number(score.get("loss")),
            number(score.get("baseline_loss")),
            number(score.get("count"), ",.0f"),
        )
    return table


def metrics_text(score: Mapping[str, Any], most: int | None = None) -> str:
    """`accuracy 0.912 ± 0.010  f1 0.902`: the first `most` metrics, how sure accuracy is."""
    parts = []
    for name, value in [*(score.get("metrics") or {}).items()][:most]:
        error = score.get("standard_error") if name == "accuracy" else None
        sure = f" ± {error:.3f}" if error is not None and math.isfinite(error) else ""
        form = ".4g" if value is not None and abs(value) >= 10 else ".3f"
        parts.append(f"{name} {number(value, form)}{sure}")
    return "  ".join(parts)


def score_table(scores: Mapping[str, Mapping[str, float]], title: str) -> Table:
    """Held-out scores as a table for the screen; chance is what knowing nothing would give."""
    table = Table(box=None, pad_edge=False, padding=(0, 2), title=title, title_justify="left")
    table.add_column("task")
    for name in ("loss", "chance", "perplexity", "accuracy", "chance", "above chance", "labels"):
        table.add_column(name, justify="right")
    for task, score in scores.items():
        above = score.get("standard_errors_above")
        error = score.get("standard_error")
        plus_minus = f" ± {100 * error:.1f}" if error is not None else ""
        table.add_row(
            task,
            number(score.get("loss")),
            number(score.get("baseline_loss")),
            number(score.get("perplexity"), ",.1f"),
            share(score.get("accuracy")) + plus_minus,
            share(score.get("baseline_accuracy")),
            "" if above is None or not math.isfinite(above) else f"{above:+,.1f} s.e.",
            number(score.get("count"), ",.0f"),
        )
    return table


def number(value: float | None, form: str = ".4f") -> str:
    return "-" if value is None or not math.isfinite(value) else format(value, form)


def share(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{100 * value:.1f} %"
