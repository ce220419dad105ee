"""The results of benchmarks/gpu.py as Markdown tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_HIDDEN = ("profile", "sync_places", "losses", "kernels", "different", "log", "choice")
"""Keys that only the JSON has."""


def markdown(whole: Mapping[str, Any]) -> str:
    packages = ", ".join(f"{name} {number}" for name, number in whole["packages"].items())
    parts = [
        f"Measured {whole['time']} UTC on: {whole['card']}; Python {whole['python']}, {packages}; "
        f"`{whole['command']}`"
    ]
    for name, section in whole["sections"].items():
        parts.append(f"### {name} ({section['status']}, {section['seconds']:.0f} s)")
        parts += [text for text in (table(section["rows"]), *_goals(section["rows"])) if text]
    return "\n\n".join(parts)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for each row; its columns are the keys that any row has."""
    keys = dict.fromkeys(key for row in rows for key in row if key not in _HIDDEN)
    if not keys:
        return ""
    lines = ["| " + " | ".join(key.replace("_", " ") for key in keys) + " |"]
    lines.append("|" + "---|" * len(keys))
    lines += ["| " + " | ".join(_cell(row.get(key)) for key in keys) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value).replace("|", "\\|")


def _goals(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each goal, and where it is not met what the time goes to."""
    lines = []
    for row in rows:
        if "met" not in row:
            continue
        what = f"{row['shape']}, {row['loop']}: {100 * row['share_of_peak']:.1f} % of peak"
        verdict = "met" if row["met"] else "NOT MET"
        lines.append(f"Goal {100 * row['goal']:.0f} % {verdict}: {what}")
        if not row["met"] and "profile" in row:
            idle = 100 * row["profile"]["idle_share"]
            lines.append(f"Idle {idle:.0f} % of the step; kernels:")
            lines.append(table(row["profile"]["kernels"][:10]))
    return lines
