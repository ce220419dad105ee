"""Names processes that make all others wait."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

_TIMES = 1.3
"""A process is slow if it takes this many times the median ..."""
_SHARE = 0.1
"""... and that is this share of the time that passed, or more."""
_IN_A_ROW = 5
"""Records in a row in which a process is slow before it is named."""


@dataclass(frozen=True, kw_only=True)
class RankTime:
    """Times of one process by itself since the last record."""

    host: str
    forward: float
    """Seconds of its forward passes."""
    waited: float
    """Seconds in which it waited for data."""

    @property
    def seconds(self) -> float:
        return self.forward + self.waited


@dataclass
class SlowRanks:
    """Count of how often in a row each process was slow."""

    _slow: dict[int, int] = field(default_factory=dict)

    def add(self, times: Sequence[RankTime], passed: float) -> list[str]:
        """Judge a record of all ranks in `passed` seconds. Returns a line for each process to
        name."""
        median = statistics.median_low(time.seconds for time in times)
        lines = []
        for rank, time in enumerate(times):
            late = time.seconds - median
            slow = time.seconds > _TIMES * median and late > _SHARE * passed
            self._slow[rank] = self._slow.get(rank, 0) + 1 if slow else 0
            if self._slow[rank] == _IN_A_ROW:
                lines.append(_line(rank, time, median, late / passed))
        return lines


def _line(rank: int, time: RankTime, median: float, share: float) -> str:
    cause = "waiting for data" if time.waited > time.forward else "its forward passes"
    ratio = f"{time.seconds / median:.1f} times the median" if median else "the others: none"
    return (
        f"rank {rank} on {time.host} is slow: {cause}: {ratio} of all processes, which wait for it "
        f"{100 * share:.0f} % of the time"
    )
