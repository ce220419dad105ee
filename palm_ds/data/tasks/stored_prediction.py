"""A prediction read from a file, not yet interpreted by its task."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from palm_ds.common.errors import UserError

CELL = "cell"


@dataclass(frozen=True, kw_only=True)
class StoredPrediction:
    """One prediction of a file."""

    place: str
    """The file and line, for messages."""
    key: object = None
    """Its row: a row number or an id; None: predictions are in the order of the rows."""
    values: Mapping[str, Any]
    """Values by name; the value of a file with a single column is `cell`."""

    @property
    def is_cell(self) -> bool:
        """Whether it is the text of one cell rather than an object with named values."""
        return CELL in self.values

    def value(self, *names: str) -> Any:
        """The first of the named values that exists, else the cell. Raises UserError."""
        for name in (*names, CELL):
            if name in self.values:
                return self.values[name]
        has = ", ".join(map(str, self.values))
        raise UserError(f"{self.place}: no {' or '.join(names)}; it has {has}")

    def number(self, name: str, value: Any) -> float:
        """A finite number. Raises UserError with `name`."""
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise UserError(f"{self.place}: {name}: {value!r} is not a number")
        return number
