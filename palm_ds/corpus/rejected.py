"""The records that a preparation rejected or dropped: rejected.jsonl, and tables of the reasons."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from palm_ds.common.messages import counted, short_number
from palm_ds.corpus.manifest import Manifest
from palm_ds.corpus.work_dir import DROPPED, PreparationJob, part_file
from palm_ds.corpus.worker import is_lines

log = logging.getLogger(__name__)

REJECTED = "rejected.jsonl"


def gather_rejected(partial: Path, job: PreparationJob) -> int:
    """Writes rejected.jsonl, with line numbers counted from the start of the file; returns their
    number."""
    total = 0
    before = [0] * len(job.inputs)  # lines of each input in earlier spans
    temporary = partial / (REJECTED + ".tmp")
    with temporary.open("w", encoding="utf-8") as out:
        for number, unit in enumerate(job.units):
            state = json.loads(part_file(partial, number, ".json").read_text("utf-8"))
            skipped = []  # the same of each span of the unit
            for span, lines in zip(unit, state["lines"], strict=True):
                skipped.append(before[span.input])
                before[span.input] += lines
            for entry in _rejected_of(partial, number):
                span = entry.pop("span")
                item = job.inputs[unit[span].input]
                line = entry.pop("line")
                place = {"line": skipped[span] + line} if is_lines(item.kind) else {"row": line}
                entry = {"file": entry["file"], **place, **entry}
                out.write(json.dumps(entry, ensure_ascii=False) + "\n")
                total += 1
    temporary.replace(partial / REJECTED)
    return total


def _rejected_of(partial: Path, number: int) -> Iterator[dict[str, Any]]:
    with part_file(partial, number, ".rejected").open(encoding="utf-8", newline="\n") as lines:
        for line in lines:
            yield json.loads(line)


def read_rejected(folder: Path) -> Iterator[dict[str, Any]]:
    """Reads the entries of a corpus's rejected.jsonl."""
    with (folder / REJECTED).open(encoding="utf-8", newline="\n") as lines:
        for line in lines:
            yield json.loads(line)


def describe_place(entry: Mapping[str, Any]) -> str:
    """The file and line (or row) of an entry."""
    where = f"line {entry['line']}" if "line" in entry else f"row {entry['row']}"
    return f"{entry['file']}, {where}"


def dropped_table(folder: Path, counts: Mapping[str, int]) -> Table:
    """A table of the reasons for which documents were dropped."""
    title = f"{counted(sum(counts.values()), 'document')} dropped, see {folder / DROPPED}"
    table = Table("reason", "documents", title=title)
    for reason, n in sorted(counts.items(), key=lambda row: (-row[1], row[0])):
        table.add_row(reason, str(n))
    return table


def rejected_table(folder: Path, total: int) -> Table:
    """A table of the reasons for rejection: how often, and where first."""
    counts: dict[str, int] = {}
    first: dict[str, str] = {}
    for entry in read_rejected(folder):
        reason = entry["reason"].split(" at ")[0].split(";")[0]
        counts[reason] = counts.get(reason, 0) + 1
        first.setdefault(reason, describe_place(entry))
    table = Table("reason", "times", "first", title=f"{total} rejected, see {folder / REJECTED}")
    for reason, n in sorted(counts.items(), key=lambda row: (-row[1], row[0])):
        table.add_row(reason, str(n), first[reason])
    return table


def report(console: Console, out: Path, manifest: Manifest) -> None:
    """Logs the counts and prints a table of rejected records."""
    counts = f"{counted(manifest.documents, 'document')}, {counted(manifest.sentences, 'sentence')}"
    size = f"{counted(manifest.tokens, 'token')} of {short_number(manifest.text_bytes)}B of text"
    shards = counted(len(manifest.shards), "shard")
    log.info("%s: %s, %s in %s", out, counts, size, shards)
    wanted, size = manifest.options["tokenizer"].get("vocab_size"), manifest.tokenizer["size"]
    if wanted and size < wanted:
        log.info(
            "the vocabulary has %d tokens, not %d: the text it learned from has no more",
            size,
            wanted,
        )
    if manifest.undivided:
        log.info(
            "note: every file is one document, as it has no empty line; if each line is a text, "
            "remove %s and prepare it with --text_documents line",
            out,
        )
    if manifest.dropped:
        console.print(dropped_table(out, manifest.dropped))
    if manifest.rejected:
        console.print(rejected_table(out, manifest.rejected))
