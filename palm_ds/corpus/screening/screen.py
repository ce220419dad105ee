"""Screens the documents of a preparation: which are dropped, and why.

First every work unit is read, filtered, and fingerprinted, in parallel; then the copies are found.
Filtered documents do not count as originals. Documents of `--not_in` come before all others, so
that their copies are dropped, whatever else there is.

    OUT.partial/parts/00003.screen/     fingerprints of a work unit (some 700 bytes per document)
                parts/00003.dropped.npy numbers of the unit's records that are dropped
                dropped.jsonl           file, line and reason of each, and what it is a copy of
                dropped.json            written last: {reason: number of documents}
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from palm_ds.common.atomic import write_folder_atomically
from palm_ds.common.errors import UserError
from palm_ds.common.json_files import write_json
from palm_ds.common.lru_cache import RecentlyUsed
from palm_ds.corpus.executors import ParallelMap
from palm_ds.corpus.input.records import Record
from palm_ds.corpus.mapped_shard import map_array
from palm_ds.corpus.rejected import describe_place
from palm_ds.corpus.screening import duplicates
from palm_ds.corpus.screening.quality import QualityFilter, find_filter
from palm_ds.corpus.work_dir import DROPPED, PreparationJob, load_job, part_file, save_dropped
from palm_ds.corpus.worker import WorkUnitReader, is_lines

log = logging.getLogger(__name__)

COUNTS = "dropped.json"
_BATCH = 256  # documents whose signatures are computed together
_MAX_MAPPED_UNITS = 256  # work units whose places are mapped
_ARRAYS = ("keys", "order", "exact", "signatures")


def screen(folder: Path, job: PreparationJob, run: ParallelMap) -> dict[str, int]:
    """Finds the documents to drop; returns how many there are, by reason."""
    if (folder / COUNTS).is_file():
        return json.loads((folder / COUNTS).read_text("utf-8"))
    log.info("screening the documents")
    tasks = [(str(folder), number) for number in range(_units(job))]
    for _ in run(screen_unit, tasks):
        pass
    screened = _Screened(folder, job)
    counts = screened.write()
    write_json(folder / COUNTS, counts)
    for reason, count in counts.items():
        log.info("%d documents dropped: %s", count, reason)
    return counts


def _units(job: PreparationJob) -> int:
    return len(job.excluded_units) + len(job.units)


def _side(job: PreparationJob, number: int) -> tuple[PreparationJob, int]:
    """The job and number of a work unit in it; those of `--not_in` come first."""
    number -= len(job.excluded_units)
    if number >= 0:
        return job, number
    excluded = replace(job, inputs=job.excluded, units=job.excluded_units)
    return excluded, number + len(job.excluded_units)


def _folder(folder: Path, number: int) -> Path:
    return part_file(folder, number, ".screen")


def screen_unit(task: tuple[str, int]) -> None:
    """Writes the fingerprints of a work unit, unless they are there."""
    folder, number = Path(task[0]), task[1]
    if not _folder(folder, number).is_dir():
        job = load_job(folder)
        write_folder_atomically(_folder(folder, number), lambda part: _screen(job, number, part))


def _screen(job: PreparationJob, number: int, out: Path) -> None:
    side, mine = _side(job, number)
    filters = [] if side is not job else [find_filter(name) for name in job.screen.filters]
    reader = WorkUnitReader(side, mine, watched=False)
    prints, near = duplicates.Fingerprints(), job.screen.near
    exact, places, signatures, filtered = [], [], [], {}
    pending: list[np.ndarray] = []
    for record in reader:
        places.append((reader.span, record.line))
        reason = _first_reason(filters, record, reader)
        if reason:
            filtered[len(exact)] = reason
        terms = prints.terms(record.text)
        exact.append(duplicates.exact_hash(terms))
        if near:
            pending.append(duplicates.shingles(terms))
            if len(pending) == _BATCH:
                signatures.append(duplicates.signatures(pending))
                pending = []
    signatures.append(duplicates.signatures(pending) if near else np.zeros((0, 0), np.uint32))
    _save(out, np.array(exact, np.uint64), np.concatenate(signatures), places, filtered)
    write_json(out / "state.json", {"lines": reader.lines, "filtered": filtered})


def _first_reason(filters: Sequence[QualityFilter], record: Record, reader: WorkUnitReader) -> str:
    """Reason to drop a document, or "". Raises UserError if a function of the user fails."""
    for filter_ in filters:
        try:
            reason = filter_(record.text)
        except Exception as error:
            name = f"{filter_.__module__}:{getattr(filter_, '__qualname__', filter_)}"
            raise UserError(
                f"--filter {name}: failed on the document at {reader.place(record)}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if reason:
            return reason
    return ""


def _save(
    out: Path,
    exact: np.ndarray,
    signatures: np.ndarray,
    places: list[tuple[int, int]],
    filtered: dict[int, str],
) -> None:
    """Writes the arrays of a unit; the filtered documents have no keys."""
    kept = np.setdiff1d(np.arange(len(exact)), list(filtered)).astype(np.uint32)
    keys = exact[None, kept]
    if signatures.size:
        keys = np.concatenate([keys, duplicates.bands(signatures[kept])])
    order = np.argsort(keys, axis=1, kind="stable")
    np.save(out / "keys.npy", np.take_along_axis(keys, order, axis=1))
    np.save(out / "order.npy", kept[order])
    np.save(out / "exact.npy", exact)
    np.save(out / "signatures.npy", signatures)
    np.save(out / "places.npy", np.array(places, np.int64).reshape(-1, 2))


@dataclass(frozen=True)
class _Screened:
    """The fingerprints of all work units."""

    folder: Path
    job: PreparationJob

    @cached_property
    def units(self) -> list[duplicates.UnitFingerprints]:
        units, start = [], 0
        for number in range(_units(self.job)):
            arrays = {name: self._array(number, name) for name in _ARRAYS}
            units.append(duplicates.UnitFingerprints(start=start, **arrays))
            start += len(arrays["exact"])
        return units

    @cached_property
    def _places(self) -> RecentlyUsed[int, np.ndarray]:
        return RecentlyUsed(_MAX_MAPPED_UNITS)

    @cached_property
    def starts(self) -> np.ndarray:
        return np.array([unit.start for unit in self.units])

    @cached_property
    def lines_before(self) -> list[list[int]]:
        """For each span of each unit, the lines of its file in earlier spans."""
        counts, before = [], {}
        for number in range(_units(self.job)):
            side, mine = _side(self.job, number)
            spans = side.units[mine]
            keys = [(side is self.job, span.input) for span in spans]
            counts.append([])
            for key, lines in zip(keys, self._state(number)["lines"], strict=True):
                counts[-1].append(before.get(key, 0))
                before[key] = before.get(key, 0) + lines
        return counts

    def write(self) -> dict[str, int]:
        """Writes dropped.jsonl, and the numbers of each unit's dropped records."""
        counts: Counter[str] = Counter()
        clusters = None
        if self.job.screen.dedup:
            file = self.folder / "parts" / "clusters.npy"
            clusters = duplicates.find_clusters(self.units, self.job.screen.similarity, file)
        with (self.folder / DROPPED).open("w", encoding="utf-8") as out:
            for number in range(len(self.job.excluded_units), _units(self.job)):
                dropped = dict(self._filtered(number))
                if clusters is not None:
                    dropped |= self._copies(number, clusters.parent)
                for record in sorted(dropped):
                    counts[dropped[record]["reason"]] += 1
                    entry = {**self._place(number, record), **dropped[record]}
                    out.write(json.dumps(entry, ensure_ascii=False) + "\n")
                save_dropped(self.folder, _side(self.job, number)[1], sorted(dropped))
        return dict(sorted(counts.items()))

    def _filtered(self, number: int) -> Iterator[tuple[int, dict[str, Any]]]:
        for record, reason in self._state(number)["filtered"].items():
            yield int(record), {"reason": reason}

    def _copies(self, number: int, first: np.ndarray) -> dict[int, dict[str, Any]]:
        """Records of a unit that are dropped as copies: {record: entry}."""
        unit = self.units[number]
        own = np.arange(unit.start, unit.start + len(unit.exact))
        originals = first[own[0] : own[-1] + 1] if len(own) else own
        while not np.array_equal(originals, above := first[originals]):
            originals = above
        copies = np.flatnonzero(originals != own)
        by_copy = {}
        for record, original in zip(copies.tolist(), originals[copies].tolist(), strict=True):
            by_copy[record] = self._copy(unit, record, original)
        return by_copy

    def _copy(
        self, unit: duplicates.UnitFingerprints, record: int, original: int
    ) -> dict[str, Any]:
        number = int(np.searchsorted(self.starts, original, side="right")) - 1
        other = original - self.units[number].start
        entry = {"of": describe_place(self._place(number, other))}
        if unit.exact[record] == self.units[number].exact[other]:
            return {"reason": "copy", **entry}
        share = duplicates.similarities(
            self.units, np.array([unit.start + record]), np.array([original])
        )
        return {"reason": "near copy", **entry, "similarity": round(float(share[0]), 2)}

    def _place(self, number: int, record: int) -> dict[str, Any]:
        """The file and line (or row) of a record."""
        side, mine = _side(self.job, number)
        places = self._places.get(number, lambda: self._array(number, "places"))
        span, line = places[record].tolist()
        item = side.inputs[side.units[mine][span].input]
        if not is_lines(item.kind):
            return {"file": item.name, "row": line}
        return {"file": item.name, "line": line + self.lines_before[number][span]}

    def _array(self, number: int, name: str) -> np.ndarray:
        return map_array(_folder(self.folder, number) / f"{name}.npy")

    def _state(self, number: int) -> dict[str, Any]:
        return json.loads((_folder(self.folder, number) / "state.json").read_text("utf-8"))
