"""Reports what happened to every tensor in a conversion: mapped, created or skipped.

Terminals get a table, pipes get tab-separated lines, programs get `record()`. Tables group the
layers: `encoder.layer.*.output.dense.weight` appears once, with the number of layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from palm_ds.common.messages import printable
from palm_ds.weights.formats.contents import BUFFER, COPY, OPTIMIZER, USUAL, CheckpointContents
from palm_ds.weights.formats.huggingface.plan import ExportPlan

_LOSES_NOTHING = (OPTIMIZER, BUFFER, COPY, USUAL)
_TITLES = ("", "source", "result", "transform or reason")
_WIDE = 120
"""Columns of a terminal from which on the names have columns of their own."""
_LAYER = re.compile(r"(?<=[._])\d+(?=[._])")
_MAX_NAMED = 3

TableRow: TypeAlias = tuple[str, str, str, str]
"""Status, name in the source, new name, transform or reason."""


@dataclass(frozen=True, kw_only=True)
class MappedTensor:
    """A converted tensor: its names in the source, in palm_ds and in the written checkpoint."""

    source_names: tuple[str, ...]
    name: str
    written: tuple[str, ...] = ()
    transform: str = ""


@dataclass(frozen=True, kw_only=True)
class ConversionReport:
    """Report on what happened to every tensor."""

    mapped: tuple[MappedTensor, ...]
    created: Mapping[str, str] = field(default_factory=dict)
    """{name in the written checkpoint: its contents}"""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """{name in the source: reason}"""
    files: tuple[str, ...] = ()
    """Files copied unchanged."""

    @property
    def lost(self) -> dict[str, str]:
        """Skipped tensors that are neither optimizer state nor present under another name."""
        return {n: why for n, why in self.skipped.items() if not why.startswith(_LOSES_NOTHING)}

    def record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "mapped": [asdict(each) for each in self.mapped],
            "created": dict(self.created),
            "skipped": dict(self.skipped),
            "files": list(self.files),
        }

    def rows(self) -> list[TableRow]:
        """The rows of the table."""
        rows = [
            ("mapped", " + ".join(x.source_names), " + ".join(x.written or (x.name,)), x.transform)
            for x in self.mapped
        ]
        rows = _together(rows)
        rows += [("mapped", name, name, "of sentence-transformers") for name in self.files]
        rows += [("created", "", name, what) for name, what in self.created.items()]
        return rows + _by_reason(self.skipped)


def of_contents(contents: CheckpointContents) -> ConversionReport:
    """The report of a conversion to palm_ds's own format: every tensor is mapped."""
    mapped = tuple(
        MappedTensor(source_names=entry.source_names, name=name, transform=entry.transform)
        for name, entry in contents.entries.items()
        if entry.source_names
    )
    created = {
        x: entry.transform for x, entry in contents.entries.items() if not entry.source_names
    }
    files = tuple(contents.extras.files)
    return ConversionReport(mapped=mapped, created=created, skipped=contents.skipped, files=files)


def of_plan(contents: CheckpointContents, plan: ExportPlan) -> ConversionReport:
    """The report of an export: source names, palm_ds names and written names, joined."""
    written: dict[str, tuple[list[str], str]] = {}
    for name, (ours, how) in plan.mapped.items():
        for each in ours:
            written.setdefault(each, ([], how))[0].append(name)
    mapped = tuple(
        MappedTensor(
            source_names=entry.source_names,
            name=name,
            written=tuple(written[name][0]),
            transform="; ".join(filter(None, [entry.transform, written[name][1]])),
        )
        for name, entry in contents.entries.items()
        if name in written and entry.source_names
    )
    made = {
        target: entry.transform
        for name, entry in contents.entries.items()
        if not entry.source_names
        for target in written.get(name, ([], ""))[0]
    }
    taken = {name for each in mapped if not each.transform for name in each.source_names}
    mine = {
        source_name: why
        for name, why in plan.skipped.items()
        for source_name in _source_names(contents, name)
        if source_name not in taken
    }
    return ConversionReport(
        mapped=mapped,
        created={**made, **plan.created},
        skipped={**contents.skipped, **mine},
        files=tuple(plan.extras.files),
    )


def _source_names(contents: CheckpointContents, ours: str) -> tuple[str, ...]:
    entry = contents.entries.get(ours)
    return entry.source_names if entry else (ours,)


# ---- display ----


def _together(rows: Iterable[TableRow]) -> list[TableRow]:
    """Merges rows that differ only in the layer number."""
    counts: dict[TableRow, int] = {}
    first: dict[TableRow, TableRow] = {}
    for row in rows:
        kind, source_names, ours, how = row
        key = (kind, _any_layer(source_names), _any_layer(ours), _any_layer(how))
        counts[key] = counts.get(key, 0) + 1
        first.setdefault(key, row)
    return [
        (kind, source_name, ours, "; ".join(filter(None, [how, f"{n} layers"])))
        if (n := counts[kind, source_name, ours, how]) > 1
        else first[kind, source_name, ours, how]
        for kind, source_name, ours, how in counts
    ]


def _any_layer(names: str) -> str:
    """The names with the first number of each, the layer's, replaced by a star."""
    return " + ".join(_LAYER.sub("*", name, count=1) for name in names.split(" + "))


def _by_reason(skipped: Mapping[str, str]) -> list[tuple[str, str, str, str]]:
    reasons: dict[str, list[str]] = {}
    for name, why in skipped.items():
        reasons.setdefault(why, []).append(name)
    rows = []
    for why, names in reasons.items():
        lossless = why.startswith(_LOSES_NOTHING)
        shown = names[:_MAX_NAMED] if lossless else names
        more = f", ... ({len(names)})" if len(shown) < len(names) else ""
        rows.append(("skipped", ", ".join(shown) + more, "", why))
    return rows


def show(rows: Sequence[tuple[str, str, str, str]], console: Console) -> None:
    """Print a table on a terminal, on a narrow one with all names in one column; tab-separated
    lines elsewhere."""
    cells = [tuple(map(printable, row)) for row in rows]
    if not console.is_terminal:
        for row in cells:
            print("\t".join(row), file=console.file)
        return
    wide = console.width >= _WIDE
    table = Table(box=None, header_style="bold", show_header=wide)
    for title in _TITLES if wide else ("", ""):
        table.add_column(title, overflow="fold")  # a name that is cut says little
    for row in cells:
        kind, *rest = map(escape, row if wide else (row[0], _in_one(*row[1:])))
        table.add_row(kind, *rest, style={"created": "yellow", "skipped": "red"}.get(kind, ""))
    console.print(table)


def _in_one(source: str, result: str, reason: str) -> str:
    """`source -> result (reason)`, without what is empty or the same."""
    names = " -> ".join(filter(None, dict.fromkeys((source, result))))
    return f"{names} ({reason})" if reason else names
