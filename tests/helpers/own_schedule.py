"""Schedules of a user's own."""

from __future__ import annotations

import palm_ds as palm


class Stairs(palm.Schedule):
    """Falls by a factor at each of some shares of the run."""

    def __init__(self, drops: list[float], factor: float = 0.5):
        self.drops, self.factor = drops, factor

    def scale(self, step: int, steps: int) -> float:
        return self.factor ** sum(step > drop * steps for drop in self.drops)


class Triangle(palm.Schedule):
    """PaddlePALM's, with its jump: the decay counts from the first step."""

    def scale(self, step: int, steps: int) -> float:
        return 1 - (step - 1) / steps


class Counting(palm.Schedule):
    """Depends on how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def scale(self, step: int, steps: int) -> float:
        self.asked += 1
        return 1 / self.asked


class Negative(palm.Schedule):
    """Falls below 0 in long runs."""

    def scale(self, step: int, steps: int) -> float:
        return 1 - step / 100


class Broken(palm.Schedule):
    """Raises an exception."""

    def scale(self, step: int, steps: int) -> float:
        return 1 / (steps - step)


NOT_A_SCHEDULE = 1
