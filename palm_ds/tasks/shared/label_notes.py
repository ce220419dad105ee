"""Class names: those that are one class, and notes on names that are valid but rarely intended.

>>> class_numbers(["False", "True"])["true"]
1
>>> distinct({"true", "True", "10", "9", "9.0"})
['9', '10', 'True']
>>> label_notes(["Yes", "no", "yes"], rows=9)
["'Yes' and 'yes' look alike, but are different classes"]
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Collection, Iterable, Sequence

from palm_ds.data.reader.cell_values import spellings

_MISSING = {"nan", "none", "null", "n/a", "na", "<na>"}
_MANY_NUMBERS = 5
"""With this many different fractional numbers, the task is probably regression."""
_MANY_CLASSES = 10
_MAX_NAMED = 3


def class_numbers(labels: Sequence[str]) -> dict[str, int]:
    """The number of each class, in every spelling."""
    numbers = {each: i for i, name in enumerate(labels) for each in spellings(name)}
    return numbers | {name: i for i, name in enumerate(labels)}


def distinct(names: Iterable[str], known: Iterable[str] = ()) -> list[str]:
    """The known names in their order, then the others: numbers in numerical order, then names
    alphabetically."""
    found = list(known)
    taken = {each for name in found for each in spellings(name)}
    for name in sorted(names, key=_order):
        if name not in taken:
            found.append(name)
            taken.update(spellings(name))
    return found


def _order(name: str) -> tuple[int, float, str]:
    number = finite_number(name)  # "nan" is a name: as a number it has no place in an order
    return (1, 0.0, name) if number is None else (0, number, name)


def label_notes(names: Collection[str], *, rows: int) -> list[str]:
    """Notes on the class names in `rows` rows of a table."""
    merged = _merged_notes(names)
    names = sorted(distinct(names))
    numbers = {name: number for name in names if (number := finite_number(name)) is not None}
    words = [name for name in names if name not in numbers]
    notes = merged + alike_notes(names)
    if not words and len(names) >= _MANY_NUMBERS and any(x % 1 for x in numbers.values()):
        some = _listed(numbers)
        return [
            *notes,
            f"{len(names)} different numbers, such as {some}, are classes of their own; this looks "
            "like `kind: regression`",
        ]
    if numbers and words:
        notes.append(f"numbers ({_listed(numbers)}) and words ({_listed(words)}) are both classes")
    if names and all(name.endswith(".0") for name in names):
        notes.append(
            f"{_listed(names)} are whole numbers, which pandas writes so where some are missing "
            '(astype("Int64") writes 1)'
        )
    if missing := [name for name in words if name.casefold() in _MISSING]:
        notes.append(
            f"{_listed(missing)} may mean that the label is missing; `drop` under `read` leaves "
            "such rows out"
        )
    if quoted := [name for name in words if len(name) > 1 and name[0] == name[-1] == '"']:
        notes.append(
            f"quotation marks are part of {_listed(quoted)}; `format: csv` under `read` removes "
            "them"
        )
    if lists := [name for name in words if name.startswith("[") or name.endswith("]")]:
        notes.append(
            f"brackets are part of {_listed(lists)}; `kind: multi_label` reads lists, which are "
            "JSON in a cell"
        )
    if len(names) >= _MANY_CLASSES and 2 * len(names) > rows:
        notes.append(f"{len(names)} classes in {rows} rows; is this the right label column?")
    return notes


def _merged_notes(names: Collection[str]) -> list[str]:
    """The first whole number that a table spells in two ways, which `distinct` makes one class."""
    both = [
        name
        for name in sorted(names)
        if name.endswith(".0") and name[:-2] in names and name[:-2] in spellings(name)
    ]
    return [
        f"{name[:-2]!r} and {name!r} are one class, as they are one number; if they are names, "
        f"such as versions, write 'v{name[:-2]}' and 'v{name}'"
        for name in both[:1]
    ]


def alike_notes(names: Iterable[str]) -> list[str]:
    """Names that differ only in case, invisible characters, or how a number is written."""
    groups: dict[str | float, list[str]] = {}
    for name in sorted(names):
        groups.setdefault(_plain(name), []).append(name)
    return [
        f"{' and '.join(map(repr, group))} look alike, but are different classes"
        for group in groups.values()
        if len(group) > 1
    ]


def _plain(name: str) -> str | float:
    number = finite_number(name)
    if number is not None:
        return number
    seen = unicodedata.normalize("NFKC", name)
    return "".join(x for x in seen if x.isprintable() and not x.isspace()).casefold()


def finite_number(name: str) -> float | None:
    """The finite number that a name is, or None."""
    try:
        number = float(name)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(map(repr, listed[:_MAX_NAMED])) + (", ..." if len(listed) > _MAX_NAMED else "")
