"""The size of a stage's steps: rows of one length, whose number may grow at first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property


@dataclass(frozen=True)
class StepSize:
    """Packed rows of a step, over all processes. Batch warm-up as in ModernBERT: the sizes of
    `growth` come first, in equal numbers of steps."""

    length: int
    """Tokens of a row."""
    rows: int
    """Rows of a step, once it has grown."""
    growth: tuple[int, ...] = ()
    """Rows of the first steps, in increasing order."""
    steps_each: int = 0
    """Steps of each size of `growth`."""

    @property
    def tokens(self) -> int:
        """Tokens of a step, once it has grown."""
        return self.rows * self.length

    def rows_at(self, step: int) -> int:
        """Rows of a step of the stage (0-based)."""
        return self.growth[step // self.steps_each] if step < self._growing else self.rows

    def rows_before(self, steps: int) -> int:
        """Rows of the first `steps` steps of the stage together."""
        if steps >= self._growing:
            return self._grown + (steps - self._growing) * self.rows
        sizes, rest = divmod(steps, self.steps_each)
        return sum(self.growth[:sizes]) * self.steps_each + rest * self.growth[sizes]

    def steps_of(self, tokens: Fraction | float) -> int:
        """The number of the stage's first steps that have this many tokens, rounded up."""
        left = math.ceil(tokens / self.length)
        steps = 0
        for rows in self.growth:
            if left <= rows * self.steps_each:
                return steps + math.ceil(left / rows)
            left -= rows * self.steps_each
            steps += self.steps_each
        return steps + math.ceil(left / self.rows)

    @cached_property
    def _growing(self) -> int:
        """Steps before the full size."""
        return len(self.growth) * self.steps_each

    @cached_property
    def _grown(self) -> int:
        """Rows of these steps."""
        return sum(self.growth) * self.steps_each
