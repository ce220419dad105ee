"""The scores of a suite's runs in one table: median, lowest and highest over the seeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from palm_ds.common.json_files import write_json
from palm_ds.tasks.metrics.units import is_fraction, shown, title
from palm_ds.train.report.metrics_file import task_of
from palm_ds.train.sweeps.suite import SuiteRun


def compare(
    members: Sequence[SuiteRun],
    failed: Mapping[str, str],
    out: Path,
) -> str:
    """The table; also written to OUT/suite.md and suite.json."""
    record = {
        name: _record([m for m in members if m.name == name], failed) for name in _names(members)
    }
    text = markdown_table(record)
    notes = "\n".join(f"- {title}: {why}" for title, why in failed.items())
    page = ["# Scores", text, _NOTE, *(["## Failed", notes] if failed else [])]
    out.mkdir(parents=True, exist_ok=True)
    (out / "suite.md").write_text("\n\n".join(page) + "\n", encoding="utf-8")
    whole = {"sets": record, "average": average(record), "failed": dict(failed)}
    write_json(out / "suite.json", whole)
    return text


_NOTE = (
    "Median over the seeds, the lowest and the highest; n: completed seeds. Scores are those of "
    "the final weights: of the best evaluation if the recipe sets `evaluate.best`. The average "
    "is of the first metric of every task, if all of them are in per cent."
)


def _names(members: Sequence[SuiteRun]) -> list[str]:
    return list(dict.fromkeys(member.name for member in members))


def _record(of_set: Sequence[SuiteRun], failed: Mapping[str, str]) -> dict[str, Any]:
    """Counts of a data set's runs, and {task: {metric: values and statistics}}."""
    done = {member.seed: scores for member in of_set if (scores := member.scores()) is not None}
    tasks: dict[str, dict[str, Any]] = {}
    for seed, scores in done.items():
        for task, values in scores.items():
            for metric, value in values.items():
                entry = tasks.setdefault(task, {}).setdefault(metric, {"values": {}})
                entry["values"][str(seed)] = value
    for metrics in tasks.values():
        for entry in metrics.values():
            values = list(entry["values"].values())
            entry["median"] = statistics.median(values)
            entry |= {"lowest": min(values), "highest": max(values), "n": len(values)}
    missing = [m.seed for m in of_set if m.seed not in done]
    return {
        "runs": len(of_set),
        "failed": [m.seed for m in of_set if m.title in failed],
        "missing": missing,
        "tasks": tasks,
    }


def average(record: Mapping[str, Any]) -> float | None:
    """The mean over the medians of the first metrics, further evaluation sets not counted. None
    until every data set has one, or if they have different units."""
    firsts = []
    for each in record.values():
        if not each["tasks"]:
            return None
        firsts += [
            next(iter(metrics.items()))
            for task, metrics in each["tasks"].items()
            if task == task_of(task)
        ]
    if not firsts or not all(is_fraction(name) for name, _ in firsts):
        return None
    return statistics.fmean(each["median"] for _, each in firsts)


def markdown_table(record: Mapping[str, Any]) -> str:
    """A Markdown table with one line per metric of each data set, each metric in its own unit."""
    rows = [["data set", "metric", "median", "lowest - highest", "n"]]
    for name, entry in record.items():
        rows += _rows(name, entry)
    if len(record) > 1:
        mean = average(record)
        rows.append(["average", "", "-" if mean is None else f"{100 * mean:.2f}", "", ""])
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    rule = ["-" * widths[0], "-" * widths[1], *("-" * (width - 1) + ":" for width in widths[2:])]
    return "\n".join(_line(row, widths) for row in [rows[0], rule, *rows[1:]])


def _rows(name: str, of_set: Mapping[str, Any]) -> Iterator[list[str]]:
    """The lines of one data set, its name in the first."""
    count = f"of {of_set['runs']}"
    mark = f", {len(of_set['failed'])} failed" if of_set["failed"] else ""
    if not of_set["tasks"]:
        yield [name, "-", "failed" if of_set["failed"] else "-", "-", f"0 {count}{mark}"]
    first = name
    for task, metrics in of_set["tasks"].items():
        whose = "" if task == name or len(of_set["tasks"]) == 1 else f"{task} "
        for metric, of in metrics.items():
            low, median, high = (shown(metric, of[k]) for k in ("lowest", "median", "highest"))
            done = f"{of['n']} {count}{mark}"
            yield [first, whose + title(metric), median, f"{low} - {high}", done]
            first = mark = ""


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = zip(row, widths, strict=True)
    texts = [c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(cells)]
    return f"| {' | '.join(texts)} |"
