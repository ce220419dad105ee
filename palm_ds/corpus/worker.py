"""What a worker does with one unit: read it, analyse it, write its shard."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from palm_ds.common.errors import UserError
from palm_ds.corpus.analyzer import Analyser
from palm_ds.corpus.annotations import Document, Mark, apply_mark, find_mark
from palm_ds.corpus.executors import count
from palm_ds.corpus.input.discover import Input, Span
from palm_ds.corpus.input.read_records import SpanReader
from palm_ds.corpus.input.records import BadRecordError, Found, Record, Rejected
from palm_ds.corpus.work_dir import (
    Job,
    load_job,
    part_file,
    read_collocations,
    read_labels,
    save_part,
)
from palm_ds.corpus.writer import ShardWriter, shard_name, smallest_unsigned
from palm_ds.text.tokenizer import load_tokenizer

_COUNT_EVERY = 1 << 18  # bytes of text between two words to the progress bar


@lru_cache(maxsize=1)
def prepared(folder: Path, made: int) -> tuple[Job, Analyser, dict[str, Mark]]:
    """The job, its analyser and its marks, kept from unit to unit. `made`: when job.json was."""
    job = load_job(folder)
    analyser = Analyser(
        load_tokenizer(folder / "tokenizer"),
        job.text,
        collocations=read_collocations(folder),
        labels=read_labels(folder),
    )
    return job, analyser, dict(find_mark(name) for name in job.marks)


def make_shard(task: tuple[str, int]) -> int:
    """Makes the shard of (job's folder, unit); gives the bytes of its text."""
    folder, number = Path(task[0]), task[1]
    job, analyser, marks = prepared(folder, (folder / "job.json").stat().st_mtime_ns)
    unit = UnitReader(job, number)
    ids_type = smallest_unsigned(analyser.tokenizer.size)
    file = folder / shard_name(number, len(job.units))
    writer = ShardWriter(file, marks=tuple(marks), ids_type=ids_type)
    with writer, part_file(folder, number, ".rejected").open("w", encoding="utf-8") as rejected:
        unit.keep = lambda entry: rejected.write(json.dumps(entry, ensure_ascii=False) + "\n")
        for record, document in _documents(unit, analyser):
            values = {name: apply_mark(name, mark, document) for name, mark in marks.items()}
            size = len((record.text or document.text).encode("utf-8"))
            writer.append(record.id, document.ids, values, text_bytes=size)
    save_part(folder, number, writer.summary(), {"rejected": unit.rejections, "lines": unit.lines})
    return writer.text_bytes


def documents_of(job: Job, number: int, analyser: Analyser) -> Iterator[Document]:
    """The documents of a unit that have tokens, as `make_shard` wrote them."""
    return (document for _, document in _documents(UnitReader(job, number), analyser))


def _documents(unit: UnitReader, analyser: Analyser) -> Iterator[tuple[Record, Document]]:
    """The unit's records that are documents; the others are rejected."""
    for record in unit:
        try:
            document = analyser.record(record)
        except BadRecordError as bad:
            unit.reject(record, bad.args[0])
        else:
            yield record, document


class UnitReader:
    """The records of a unit. What is rejected on the way is counted, and given to `keep`."""

    def __init__(self, job: Job, number: int, *, watched: bool = True) -> None:
        self.job, self.unit, self.watched = job, job.units[number], watched
        self.lines: list[int] = []  # of each span
        self.rejections, self.first = 0, ""  # how many, and the first of them in words
        self.keep: Callable[[dict[str, Any]], object] | None = None
        self._span = 0

    def __iter__(self) -> Iterator[Record]:
        for number, span in enumerate(self.unit):
            self._span = number
            item = self.job.inputs[span.input]
            reader = SpanReader(item, span, self.job.input)
            for found in _counted(reader, span) if self.watched else reader:
                if isinstance(found, Record):
                    yield found
                else:
                    self._reject(found)
            self.lines.append(reader.lines)

    def reject(self, record: Record, reason: str) -> None:
        """The record came to nothing after all."""
        self._reject(Rejected(reason, record.excerpt, record.line, 0))

    def place(self, found: Found) -> str:
        """Where in the input something that has just been read stands, in words."""
        span = self.unit[self._span]
        return _place(self.job.inputs[span.input], span, found)

    def _reject(self, found: Rejected) -> None:
        span = self.unit[self._span]
        item = self.job.inputs[span.input]
        reason, excerpt = _writable(found.reason), _writable(found.excerpt)
        if not self.rejections:
            self.first = f"{_place(item, span, found)}: {reason}"
            if self.job.strict:
                raise UserError(f"{self.first} (--strict)")
        self.rejections += 1
        if self.keep:
            entry = {"file": item.name, "line": found.line, "reason": reason}
            self.keep({**entry, "excerpt": excerpt, "span": self._span})


def _writable(text: str) -> str:
    """The text with halves of surrogate pairs, which no file takes, spelt out."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def _place(item: Input, span: Span, found: Found) -> str:
    """The file and the line, counted from the file's beginning, or the row."""
    name = item.path or item.name
    if not is_lines(item.kind):
        return f"{name}: row {found.line}"
    return f"{name}: line {found.line + _lines_before(item.path, span.start)}"


def is_lines(kind: str) -> bool:
    """Whether places in this kind of input are lines; else they are rows."""
    return kind in ("jsonl", "text", "tsv", "csv", "ernie")


def _lines_before(path: str, end: int) -> int:
    """Line ends in the first bytes of a file."""
    lines = 0
    with open(path, "rb") as handle:
        while end > 0 and (data := handle.read(min(end, 1 << 20))):
            lines += data.count(b"\n")
            end -= len(data)
    return lines


def _counted(reader: SpanReader, span: Span) -> Iterator[Found]:
    """Passes records on and tells the progress bar of them."""
    text = cost = told = 0
    for found in reader:
        text += _text_bytes(found)
        cost += found.cost
        if text >= _COUNT_EVERY:
            done = min(cost, span.bytes - told)
            count(text, done)
            told, text, cost = told + done, 0, 0
        yield found
    count(text, span.bytes - told)


def _text_bytes(found: Found) -> int:
    if isinstance(found, Rejected):
        return 0
    return found.cost if found.tokens else len(found.text.encode("utf-8"))
