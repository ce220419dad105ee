"""The scores of a suite's runs in one table: median, lowest and highest over the seeds; mean and
standard deviation over folds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from palm_ds.common.files import make_folder
from palm_ds.common.json_files import write_json
from palm_ds.common.messages import nan_to_null
from palm_ds.common.summary import pipe_table
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
    make_folder(out)
    (out / "suite.md").write_text("\n\n".join(page) + "\n", encoding="utf-8")
    whole = {"sets": record, "average": average(record), "failed": dict(failed)}
    write_json(out / "suite.json", nan_to_null(whole))
    return text


_NOTE = (
    "Median over the seeds, the lowest and the highest; n: completed seeds with a value. Scores "
    "are those of the final weights: of the best evaluation if the recipe sets `evaluate.best`. "
    "The average is of the first metric of every task, if all of them are in per cent. With folds: "
    "the mean and the standard deviation over the folds (of all seeds), each scored on its "
    "held-out rows."
)


def _names(members: Sequence[SuiteRun]) -> list[str]:
    return list(dict.fromkeys(member.name for member in members))


def _record(of_set: Sequence[SuiteRun], failed: Mapping[str, str]) -> dict[str, Any]:
    """Counts of a data set's runs, and {task: {metric: values and statistics}}."""
    done = {member.key: scores for member in of_set if (scores := member.scores()) is not None}
    folds = max(member.fold for member in of_set)
    tasks: dict[str, dict[str, Any]] = {}
    for key, scores in done.items():
        for task, values in scores.items():
            for metric, value in values.items():
                entry = tasks.setdefault(task, {}).setdefault(metric, {"values": {}})
                entry["values"][key] = value
    for metrics in tasks.values():
        for entry in metrics.values():
            entry |= _statistics(list(entry["values"].values()), of_folds=folds > 0)
    return {
        "runs": len(of_set),
        **({"folds": folds} if folds else {}),
        "failed": [_short(m) for m in of_set if m.title in failed],
        "missing": [_short(m) for m in of_set if m.key not in done],
        "tasks": tasks,
    }


def _statistics(values: Sequence[float], *, of_folds: bool) -> dict[str, float]:
    """Of the values that are defined; NaN without any."""
    known = [value for value in values if not math.isnan(value)]
    several = known or [math.nan]
    found = {"median": statistics.median(several), "lowest": min(several), "highest": max(several)}
    found["n"] = len(known)
    if of_folds:
        found["mean"] = statistics.fmean(several)
        found["deviation"] = statistics.stdev(known) if len(known) > 1 else math.nan
    return found


def _short(member: SuiteRun) -> int | str:
    return member.key if member.fold else member.seed


def average(record: Mapping[str, Any]) -> float | None:
    """The mean over the medians (of folds: the means) of the first metrics, further evaluation sets
    not counted. None until every data set has one, or if they have different units or no value."""
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
    mean = statistics.fmean(each.get("mean", each["median"]) for _, each in firsts)
    return None if math.isnan(mean) else mean


def markdown_table(record: Mapping[str, Any]) -> str:
    """A Markdown table with one line per metric of each data set, each metric in its own unit."""
    folded = any("folds" in entry for entry in record.values())
    heads = ["data set", "metric", *(["mean ± s.d."] if folded else []), "median"]
    rows = [[*heads, "lowest - highest", "n"]]
    for name, entry in record.items():
        rows += _rows(name, entry, folded)
    if len(record) > 1:
        mean = average(record)
        cells = ["-" if mean is None else f"{100 * mean:.2f}", "", ""]
        rows.append(["average", "", *cells, *([""] if folded else [])])
    return pipe_table(rows, left=(0, 1))


def _rows(name: str, of_set: Mapping[str, Any], folded: bool) -> Iterator[list[str]]:
    """The lines of one data set, its name in the first. `folded`: with a column of means."""
    count = f"of {of_set['runs']}"
    mark = f", {len(of_set['failed'])} failed" if of_set["failed"] else ""
    if not of_set["tasks"]:
        nothing = ["failed" if of_set["failed"] else "-", *(["-"] if folded else []), "-"]
        yield [name, "-", *nothing, f"0 {count}{mark}"]
    first = name
    for task, metrics in of_set["tasks"].items():
        whose = "" if task == name or len(of_set["tasks"]) == 1 else f"{task} "
        for metric, of in metrics.items():
            low, median, high = (_shown(metric, of[k]) for k in ("lowest", "median", "highest"))
            done = f"{of['n']} {count}{mark}"
            mean = [_mean(metric, of)] if folded else []
            yield [first, whose + title(metric), *mean, median, f"{low} - {high}", done]
            first = mark = ""


def _mean(metric: str, of: Mapping[str, Any]) -> str:
    """`91.20 ± 0.85` of a set with folds."""
    if "mean" not in of:
        return "-"
    return f"{_shown(metric, of['mean'])} ± {_shown(metric, of['deviation'])}"


def _shown(metric: str, value: float) -> str:
    return "-" if math.isnan(value) else shown(metric, value)
