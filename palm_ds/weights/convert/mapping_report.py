"""What became of every tensor of a checkpoint: mapped, created, left behind; nothing unnamed.

A terminal gets a table, a pipe gets tab-separated lines, a program gets `record()`. For people the
layers stand together: `encoder.layer.*.output.dense.weight` once, with their number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from palm_ds.weights.formats.contents import BUFFER, COPY, OPTIMIZER, Contents
from palm_ds.weights.formats.huggingface.plan import Plan

_LOSES_NOTHING = (OPTIMIZER, BUFFER, COPY)
_LAYER = re.compile(r"(?<=[._])\d+(?=[._])")
_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Mapped:
    """A tensor that was taken over: what it is called there, with us, and in what was written."""

    theirs: tuple[str, ...]
    ours: str
    written: tuple[str, ...] = ()
    how: str = ""


@dataclass(frozen=True, kw_only=True)
class Account:
    """What became of everything."""

    mapped: tuple[Mapped, ...]
    created: Mapping[str, str] = field(default_factory=dict)
    """{name in what was written: what is in it}"""
    left: Mapping[str, str] = field(default_factory=dict)
    """{name in the source: why}"""

    @property
    def lost(self) -> dict[str, str]:
        """What stays behind and is neither optimizer state nor there under another name."""
        return {n: why for n, why in self.left.items() if not why.startswith(_LOSES_NOTHING)}

    def record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "mapped": [asdict(each) for each in self.mapped],
            "created": dict(self.created),
            "left": dict(self.left),
        }

    def rows(self) -> list[tuple[str, str, str, str]]:
        """For a person: what became of it, the source's name, what it is now, and how or why."""
        rows = [
            ("mapped", " + ".join(x.theirs), " + ".join(x.written or (x.ours,)), x.how)
            for x in self.mapped
        ]
        rows = _together(rows)
        rows += [("created", "", name, what) for name, what in self.created.items()]
        return rows + _by_reason(self.left)


def of_contents(contents: Contents) -> Account:
    """Everything under our names."""
    mapped = tuple(
        Mapped(theirs=entry.theirs, ours=name, how=entry.how)
        for name, entry in contents.entries.items()
    )
    return Account(mapped=mapped, left=contents.left)


def of_plan(contents: Contents, plan: Plan) -> Account:
    """From the source's names over ours to those that are written."""
    written: dict[str, tuple[list[str], str]] = {}
    for name, (ours, how) in plan.mapped.items():
        for each in ours:
            written.setdefault(each, ([], how))[0].append(name)
    mapped = tuple(
        Mapped(
            theirs=entry.theirs,
            ours=name,
            written=tuple(written[name][0]),
            how="; ".join(filter(None, [entry.how, written[name][1]])),
        )
        for name, entry in contents.entries.items()
        if name in written
    )
    mine = {theirs: why for name, why in plan.left.items() for theirs in _theirs(contents, name)}
    return Account(mapped=mapped, created=plan.created, left={**contents.left, **mine})


def _theirs(contents: Contents, ours: str) -> tuple[str, ...]:
    entry = contents.entries.get(ours)
    return entry.theirs if entry else (ours,)


# ---- for people ----


def _together(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, str, str, str]]:
    """Rows that differ in the layer's number alone, as one."""
    counts: dict[tuple[str, ...], int] = {}
    first: dict[tuple[str, ...], tuple[str, ...]] = {}
    for row in rows:
        key = tuple(" + ".join(map(_any_layer, cell.split(" + "))) for cell in row)
        counts[key] = counts.get(key, 0) + 1
        first.setdefault(key, row)
    return [
        (kind, theirs, ours, "; ".join(filter(None, [how, f"{n} layers"])))
        if (n := counts[kind, theirs, ours, how]) > 1
        else first[kind, theirs, ours, how]  # type: ignore[misc]
        for kind, theirs, ours, how in counts
    ]


def _any_layer(name: str) -> str:
    """With a star for the first number, which is the layer's."""
    return _LAYER.sub("*", name, count=1)


def _by_reason(left: Mapping[str, str]) -> list[tuple[str, str, str, str]]:
    reasons: dict[str, list[str]] = {}
    for name, why in left.items():
        reasons.setdefault(why, []).append(name)
    rows = []
    for why, names in reasons.items():
        lossless = why.startswith(_LOSES_NOTHING)
        shown = names[:_SHOWN] if lossless else names
        more = f", ... ({len(names)})" if len(shown) < len(names) else ""
        rows.append(("left behind", ", ".join(shown) + more, "", why))
    return rows


def show(rows: Sequence[tuple[str, str, str, str]], console: Console) -> None:
    """A table in a terminal, tab-separated lines elsewhere."""
    titles = ("", "in the source", "now", "how, or why")
    if not console.is_terminal:
        for row in rows:
            print("\t".join(row), file=console.file)
        return
    table = Table(*titles, box=None, header_style="bold")
    for row in rows:
        table.add_row(*row, style={"created": "yellow", "left behind": "red"}.get(row[0], ""))
    console.print(table)
