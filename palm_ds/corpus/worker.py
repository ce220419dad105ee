"""Processes one work unit: reads its records, analyzes them, writes a shard."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.common.rows.lines import BadRecordError
from palm_ds.common.rows.stored import open_stored
from palm_ds.corpus import work_dir
from palm_ds.corpus.analyzer import DocumentAnalyzer
from palm_ds.corpus.annotations import Document, TokenAnnotation, apply_annotation, find_annotation
from palm_ds.corpus.executors import report_progress
from palm_ds.corpus.input.discover import Input, InputSpan
from palm_ds.corpus.input.read_records import RecordReader
from palm_ds.corpus.input.records import Record, RecordOrRejection, Rejection
from palm_ds.corpus.writer import ShardWriter, shard_name, smallest_unsigned
from palm_ds.text.tokenizer import load_tokenizer
from palm_ds.text.unspaced import count_unspaced

_REPORT_EVERY = 1 << 18  # bytes of text between progress reports


@lru_cache(maxsize=1)
def load_worker(
    folder: Path, made: int
) -> tuple[work_dir.PreparationJob, DocumentAnalyzer, dict[str, TokenAnnotation]]:
    """The job, its analyzer and its annotations, cached between work units. `made`: the time of
    job.json, so that a new job is not taken for the cached one."""
    job = work_dir.load_job(folder)
    analyzer = DocumentAnalyzer(
        load_tokenizer(folder / "tokenizer"),
        job.text,
        collocations=work_dir.read_collocations(folder),
        labels=work_dir.read_labels(folder),
    )
    return job, analyzer, dict(find_annotation(name) for name in job.annotations)


def write_shard(task: tuple[str, int]) -> int:
    """Writes the shard of `task` = (folder of the job, work unit); returns its bytes of text."""
    folder, number = Path(task[0]), task[1]
    job, analyzer, annotations = load_worker(folder, (folder / "job.json").stat().st_mtime_ns)
    unit = WorkUnitReader(job, number, dropped=work_dir.load_dropped(folder, number))
    ids_type = smallest_unsigned(analyzer.tokenizer.size)
    file = folder / shard_name(number, len(job.units))
    writer = ShardWriter(file, annotations=tuple(annotations), ids_type=ids_type)
    with (
        writer,
        work_dir.part_file(folder, number, ".rejected").open("w", encoding="utf-8") as rejected,
    ):
        characters = unspaced = unknown = 0
        unit.keep = lambda entry: rejected.write(json.dumps(entry, ensure_ascii=False) + "\n")
        for record, document in _documents(unit, analyzer):
            values = {
                name: apply_annotation(name, annotation, document)
                for name, annotation in annotations.items()
            }
            size = len((record.text or document.text).encode("utf-8"))
            writer.append(record.id, document.ids, values, text_bytes=size)
            characters += len(document.text)
            unspaced += count_unspaced(document.text)
            unknown += int(np.count_nonzero(document.ids == analyzer.tokenizer.vocabulary.unk))
    about = {"rejected": unit.rejections, "lines": unit.lines}
    about |= {"characters": characters, "unspaced_characters": unspaced, "unknown_tokens": unknown}
    work_dir.save_part(folder, number, writer.summary(), about)
    return writer.text_bytes


def read_documents(
    job: work_dir.PreparationJob, number: int, analyzer: DocumentAnalyzer
) -> Iterator[Document]:
    """The documents of a work unit, as `write_shard` wrote them."""
    return (document for _, document in _documents(WorkUnitReader(job, number), analyzer))


def _documents(
    unit: WorkUnitReader, analyzer: DocumentAnalyzer
) -> Iterator[tuple[Record, Document]]:
    """The records of the unit with their documents; records without tokens are rejected."""
    for record in unit:
        try:
            document = analyzer.record(record)
        except BadRecordError as bad:
            unit.reject(record, bad.args[0])
        else:
            yield record, document


class WorkUnitReader:
    """Iterates over the records of a work unit, without those whose numbers are in `dropped`.
    Rejections are counted and passed to `keep`."""

    def __init__(
        self,
        job: work_dir.PreparationJob,
        number: int,
        *,
        watched: bool = True,
        dropped: Collection[int] = (),
    ) -> None:
        self.job, self.unit, self.watched = job, job.units[number], watched
        self.dropped, self._record = dropped, 0
        self.lines: list[int] = []  # lines of each span
        self.rejections, self.first = 0, ""  # their number, and a description of the first
        self.keep: Callable[[dict[str, Any]], object] | None = None
        self.span = 0  # the number of the current span

    def __iter__(self) -> Iterator[Record]:
        for number, span in enumerate(self.unit):
            self.span = number
            item = self.job.inputs[span.input]
            reader = RecordReader(item, span, self.job.input)
            for entry in _counted(reader, span) if self.watched else reader:
                if not isinstance(entry, Record):
                    self._reject(entry)
                    continue
                self._record += 1
                if self._record - 1 not in self.dropped:
                    yield entry
            self.lines.append(reader.lines)

    def reject(self, record: Record, reason: str) -> None:
        """Rejects a record that was read."""
        self._reject(Rejection(reason, record.excerpt, record.line, 0))

    def place(self, outcome: RecordOrRejection) -> str:
        """Describes where the last record or rejection is in the input."""
        span = self.unit[self.span]
        return _place(self.job.inputs[span.input], span, outcome)

    def _reject(self, rejection: Rejection) -> None:
        span = self.unit[self.span]
        item = self.job.inputs[span.input]
        reason, excerpt = _writable(rejection.reason), _writable(rejection.excerpt)
        if not self.rejections:
            self.first = f"{_place(item, span, rejection)}: {reason}"
            if self.job.strict:
                raise UserError(f"{self.first} (--strict)")
        self.rejections += 1
        if self.keep:
            entry = {"file": item.name, "line": rejection.line, "reason": reason}
            self.keep({**entry, "excerpt": excerpt, "span": self.span})


def _writable(text: str) -> str:
    """The text with lone surrogates, which UTF-8 cannot encode, escaped."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def _place(item: Input, span: InputSpan, outcome: RecordOrRejection) -> str:
    """The file, and the line counted from the file's beginning, or the row."""
    name = item.path or item.name
    if not is_lines(item.kind):
        return f"{name}: row {outcome.line}"
    return f"{name}: line {outcome.line + _lines_before(item.path, span.start)}"


def is_lines(kind: str) -> bool:
    """Whether positions in this kind of input are lines rather than rows."""
    return kind in ("jsonl", "text", "tsv", "csv", "ernie")


def _lines_before(path: str, end: int) -> int:
    """The number of line ends in the first `end` bytes of a file."""
    lines = 0
    with open_stored(path) as handle:
        while end > 0 and (data := handle.read(min(end, 1 << 20))):
            lines += data.count(b"\n")
            end -= len(data)
    return lines


def _counted(reader: RecordReader, span: InputSpan) -> Iterator[RecordOrRejection]:
    """Yields from the reader and reports progress."""
    text = cost = reported = 0
    for entry in reader:
        text += _text_bytes(entry)
        cost += entry.cost
        if text >= _REPORT_EVERY:
            done = min(cost, span.bytes - reported)
            report_progress(text, done)
            reported, text, cost = reported + done, 0, 0
        yield entry
    report_progress(text, span.bytes - reported)


def _text_bytes(outcome: RecordOrRejection) -> int:
    if isinstance(outcome, Rejection):
        return 0
    return outcome.cost if outcome.tokens else len(outcome.text.encode("utf-8"))
