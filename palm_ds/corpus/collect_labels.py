"""The names of pairs' labels, in an order that no number of workers changes.

They are gathered from the whole input before the first shard is made: integers in their order,
then other names in theirs. A name's number is its place.
"""

from __future__ import annotations

import re
from pathlib import Path

from palm_ds.common.errors import UserError
from palm_ds.common.json_files import write_json
from palm_ds.corpus.executors import Run
from palm_ds.corpus.input.ernie_lines import LABELS as ERNIE_LABELS
from palm_ds.corpus.input.records import MOST_VALUES
from palm_ds.corpus.work_dir import LABELS, Job, load_job
from palm_ds.corpus.worker import UnitReader

_INTEGER = re.compile("-?[0-9]{1,18}")


def labels_of(task: tuple[str, int]) -> dict[str, str]:
    """(job's folder, unit) to the names of its labels, each with the line it is first met on; one
    more than a column holds is enough to know."""
    job = load_job(Path(task[0]))
    found: dict[str, str] = {}
    unit = UnitReader(job, task[1], watched=False)
    for record in unit:
        if record.label is not None and record.label not in found:
            found[record.label] = unit.place(record)
            if len(found) > MOST_VALUES:
                break
    return found


def gather_labels(folder: Path, job: Job, run: Run) -> list[str]:
    """The names of the job's labels; written to labels.json, where workers find them."""
    found: dict[str, str] = {}
    if job.input.structure == "ernie":
        found = dict.fromkeys(ERNIE_LABELS, "")
    else:
        for part in run(labels_of, ((str(folder), number) for number in range(len(job.units)))):
            found = {**part, **found}
            if len(found) > MOST_VALUES:
                raise _too_many(found, job)
    names = sorted(found, key=_order)
    write_json(folder / LABELS, names)
    return names


def _order(name: str) -> tuple[bool, int, str]:
    number = int(name) if _INTEGER.fullmatch(name) else None
    return number is None, number or 0, name


def _too_many(found: dict[str, str], job: Job) -> UserError:
    name, place = list(found.items())[-1]
    return UserError(
        f"more than {MOST_VALUES} labels in field `{job.input.pair_fields[2]}`, such as "
        f"{name[:40]!r} ({place}); is it the field of the label (--pair_fields)?"
    )
