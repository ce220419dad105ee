"""Names of classes. `true`, `True` and `TRUE` are one, named as the labels of the task name it, and
so are `1` and `1.0`.

>>> class_numbers(["False", "True"])["true"]
1
>>> distinct({"true", "True", "10", "9", "9.0"})
['9', '10', 'True']
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from palm_ds.data.reader.cell_values import spellings
from palm_ds.tasks.shared.label_notes import finite_number


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
