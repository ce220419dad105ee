"""The trials of a sweep in one table, and the best one's recipe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from palm_ds.common.atomic import write_file_atomically
from palm_ds.common.json_files import write_json
from palm_ds.common.messages import nan_to_null
from palm_ds.common.summary import pipe_table
from palm_ds.train.sweeps.search import Search, shown

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

BEST = "best.yaml"
_STATES = {"COMPLETE": "done", "PRUNED": "pruned", "FAIL": "diverged", "RUNNING": "unfinished"}


def report(search: Search) -> str:
    """The table, best trial first; also written to OUT/sweep.md and sweep.json, with the recipe of
    the best trial in OUT/best.yaml."""
    records = [_record(search, each) for each in _sorted(search)]
    text = _table(search, records)
    sweep, out = search.space.sweep, search.out
    goal = "less" if sweep.minimizes else "more"
    note = (
        f"`{sweep.metric}` ({goal} is better) of the final weights of each trial; of a pruned or "
        "unfinished one, in its last evaluation."
    )
    write_file_atomically(out / "sweep.md", f"# Trials\n\n{text}\n\n{note}\n")
    best = records[0]["number"] if records and records[0]["state"] == "done" else None
    summary = {"metric": sweep.metric, "best": best, "trials": records}
    write_json(out / "sweep.json", nan_to_null(summary))
    if best is not None:
        _write_best(search, records[0], out / BEST)
    return text


def _sorted(search: Search) -> list[FrozenTrial]:
    """Completed trials by value, then the others by number."""
    sign = 1 if search.space.sweep.minimizes else -1

    def key(trial: FrozenTrial) -> tuple[bool, float, int]:
        done = trial.state.name == "COMPLETE" and trial.value is not None
        return (not done, sign * (trial.value or 0.0) if done else 0.0, trial.number)

    return sorted(search.trials(), key=key)


def _record(search: Search, frozen: FrozenTrial) -> dict[str, Any]:
    trial, seen = search.trial(frozen), frozen.intermediate_values
    last = seen[max(seen)] if seen else None
    state = _STATES[frozen.state.name]
    why = search.failed.get(frozen.number, "")
    return {
        "number": frozen.number,
        "state": "failed" if why else state,
        "value": frozen.value if state == "done" else last,
        "evaluations": len(seen),
        "chosen": dict(trial.chosen),
        "folder": trial.folder.name,
        **({"why": why} if why else {}),
    }


def _table(search: Search, records: list[dict[str, Any]]) -> str:
    keys = list(search.space.parameters)
    rows = [["trial", search.space.sweep.metric, *keys, "evaluations", "state"]]
    for record in records:
        value = "-" if record["value"] is None else f"{record['value']:.4f}"
        chosen = [shown(record["chosen"].get(key, "-")) for key in keys]
        number = str(record["number"])
        rows.append([number, value, *chosen, str(record["evaluations"]), record["state"]])
    return pipe_table(rows, left=(len(rows[0]) - 1,))


def _write_best(search: Search, record: dict[str, Any], file: Path) -> None:
    """The recipe of the best trial, which runs as it is."""
    values = search.space.recipe_values(record["chosen"])
    head = f"# trial {record['number']}: {search.space.sweep.metric} {record['value']:.4f}\n"
    write_file_atomically(file, head + yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
