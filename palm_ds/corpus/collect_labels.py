"""Collects the label names of text pairs, in an order independent of the number of workers.

They are collected from the whole input before the first shard is written, and sorted: integers
first, by value, then other names. A label's number is its index.
"""

from __future__ import annotations

import re
from pathlib import Path

from palm_ds.common.errors import UserError
from palm_ds.common.json_files import write_json
from palm_ds.corpus.executors import ParallelMap
from palm_ds.corpus.input.ernie_lines import LABELS as ERNIE_LABELS
from palm_ds.corpus.input.records import MAX_VALUES
from palm_ds.corpus.work_dir import LABELS, PreparationJob, load_job
from palm_ds.corpus.worker import WorkUnitReader

_INTEGER = re.compile("-?[0-9]{1,18}")


def unit_labels(task: tuple[str, int]) -> dict[str, str]:
    """The labels in a work unit, `task` = (folder of the job, unit), with the line on which each is
    first seen. Stops as soon as there are more than an annotation can hold."""
    job = load_job(Path(task[0]))
    labels: dict[str, str] = {}
    unit = WorkUnitReader(job, task[1], watched=False)
    for record in unit:
        if record.label is not None and record.label not in labels:
            labels[record.label] = unit.place(record)
            if len(labels) > MAX_VALUES:
                break
    return labels


def collect_labels(folder: Path, job: PreparationJob, run: ParallelMap) -> list[str]:
    """Collects the label names of a job and writes them to labels.json, for the workers."""
    labels: dict[str, str] = {}
    if job.input.structure == "ernie":
        labels = dict.fromkeys(ERNIE_LABELS, "")
    else:
        for part in run(unit_labels, ((str(folder), number) for number in range(len(job.units)))):
            labels = {**part, **labels}
            if len(labels) > MAX_VALUES:
                raise _too_many(labels, job)
    names = sorted(labels, key=_order)
    write_json(folder / LABELS, names)
    return names


def _order(name: str) -> tuple[bool, int, str]:
    number = int(name) if _INTEGER.fullmatch(name) else None
    return number is None, number or 0, name


def _too_many(labels: dict[str, str], job: PreparationJob) -> UserError:
    name, place = list(labels.items())[-1]
    return UserError(
        f"more than {MAX_VALUES} labels in field `{job.input.pair_fields[2]}`, such as "
        f"{name[:40]!r} ({place}); is it the label field (--pair_fields)?"
    )
