"""Steps of so many examples: what fine-tuning trains on. A pure function of (recipe, data, seed,
step), as palm_ds/data/packed_stream.py is of rows.

    step ──> so many examples of each blend of the step ──pack──> as few rows as they need
         ──> dealt out over processes and micro-batches, evenly, in order

A blend's n-th step takes its examples n * batch to (n + 1) * batch. With `mix: step` a step is of
one blend; with `mix: batch` the examples of the whole stage, each blend as many as with steps of
its own, are spread evenly over one another and then cut into steps: equally many examples a step,
none empty, each blend within one of its share at every moment. Nothing here knows of processes
until `batches`.

How many rows a step needs differs from step to step. `most_rows` looks through them, so that every
step has the same number of micro-batches; some hold fewer rows than others, or an empty one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from palm_ds.data.blend_dataset import Feed, PackedRow, build_rows, fill, refs
from palm_ds.data.packing import pack
from palm_ds.data.stages import Plan, order_of
from palm_ds.model.batch import Batch

_LOOKED_AT = 2000  # steps of a stage that are packed to know how many rows a step may need
_ROUND = 8  # rows are cut to a length that is a multiple of this


@dataclass
class ExampleStream:
    """step -> this process's micro-batches. The same interface as Stream.

    `examples[blend]` are those of a step of the blend; `rows` is how many rows a step has room for:
    a whole number of micro-batches for every process (machine.room_for)."""

    plan: Plan
    feeds: Sequence[Feed]
    feeds_of: Mapping[str, Sequence[tuple[int, float]]]
    examples: Mapping[str, int]
    length: int
    seed: int
    pad: int
    rows: int = 0
    begun: dict[str, int] = field(default_factory=dict)
    """{feed: examples} that were read before the first step, by the run that this one extends."""

    # -- which examples --

    def taken(self, step: int) -> dict[str, tuple[int, int]]:
        """{blend: the examples [first, last) of it} of a step, counted over the run."""
        number = self.plan.stage_at(step)
        stage = self.plan.stages[number]
        before = {b: self._before(b, number) for b, _ in stage.steps_of}
        first = self._within(number, step - stage.first)
        last = self._within(number, step - stage.first + 1)
        return {
            blend: (before[blend] + first[blend], before[blend] + last[blend])
            for blend, _ in stage.steps_of
            if last[blend] > first[blend]
        }

    def _before(self, blend: str, stage: int) -> int:
        """Examples of a blend in the stages before one."""
        steps = sum(dict(each.steps_of).get(blend, 0) for each in self.plan.stages[:stage])
        return steps * self.examples[blend]

    def _within(self, number: int, steps: int) -> dict[str, int]:
        """Examples of each blend in the first so many steps of a stage."""
        stage, order = self.plan.stages[number], self._orders[number]
        one = stage.mix == "step"
        done = order[:steps] if one else order[: len(order) * steps // stage.steps]
        counts = np.bincount(done, minlength=len(stage.steps_of))
        return {
            blend: int(count) * (self.examples[blend] if one else 1)
            for (blend, _), count in zip(stage.steps_of, counts, strict=True)
        }

    @cached_property
    def _orders(self) -> list[np.ndarray]:
        """Of each stage which blend each step (`mix: step`), or each example, belongs to."""
        return [
            order_of(stage, number, self.seed)
            if stage.mix == "step"
            else spread([steps * self.examples[blend] for blend, steps in stage.steps_of])
            for number, stage in enumerate(self.plan.stages)
        ]

    def _of_feeds(self, blend: str, examples: int) -> dict[int, int]:
        """{feed: examples} of the first so many of a blend, in the proportion of its sources."""
        shares = [Fraction(share) for _, share in self.feeds_of[blend]]
        upto = list(accumulate(shares, initial=Fraction(0)))
        cut = [int(examples * part / upto[-1]) for part in upto]
        return {feed: cut[i + 1] - cut[i] for i, (feed, _) in enumerate(self.feeds_of[blend])}

    # -- rows --

    def step_rows(self, step: int) -> list[PackedRow]:
        """The rows of a step, in global order: its examples packed, none more than it takes."""
        entries = []
        for blend, (first, last) in self.taken(step).items():
            start, stop = self._of_feeds(blend, first), self._of_feeds(blend, last)
            for number in start:
                feed = self.feeds[number]
                begun = self.begun.get(feed.name, 0)
                n = begun + np.arange(start[number], stop[number])
                entries += refs(number, n, feed.layouts(n))
        packed = pack(np.array([ref.length for ref in entries], np.int64), self.length)
        return [fill([entries[i] for i in row], self.length) for row in packed]

    def most_rows(self) -> int:
        """The rows of the largest step; of long stages, of the steps that were looked at."""
        return max(
            len(self.step_rows(step))
            for stage in self.plan.stages
            for step in range(stage.first, stage.first + min(stage.steps, _LOOKED_AT))
        )

    def batches(self, step: int, rank: int, world: int, micro_rows: int) -> list[Batch]:
        """The micro-batches of one process. All processes get the same number of them, of equally
        many rows but for one; never mind a row more than usual in a step larger than any looked
        at."""
        slots = self.rows // micro_rows
        rows = self.step_rows(step)
        cuts = [len(rows) * i // slots for i in range(slots + 1)]
        mine = range(rank * slots // world, (rank + 1) * slots // world)
        return [self.build(rows[cuts[i] : cuts[i + 1]] or [[]]) for i in mine]

    def build(self, rows: Sequence[PackedRow]) -> Batch:
        """One micro-batch of rows, no longer than its fullest row needs."""
        used = max((sum(ref.length for ref in row) for row in rows), default=0)
        length = min(-(-max(used, 1) // _ROUND) * _ROUND, self.length)
        return build_rows(self.feeds, rows, length, self.pad)

    # -- going on --

    def cursor(self, step: int) -> dict[str, Any]:
        """Nothing has to be kept: a step says it all."""
        return {}

    def seek(self, cursor: Mapping[str, Any]) -> None:
        """Every step can be read at once."""

    def consumed(self, step: int | None = None) -> dict[str, int]:
        """{feed: examples} of the first `step` steps (all steps, by default)."""
        step = self.plan.steps if step is None else step
        total = {feed.name: self.begun.get(feed.name, 0) for feed in self.feeds}
        for blend in self.plan.blends:
            for feed, count in self._of_feeds(blend, self._upto(blend, step)).items():
                total[self.feeds[feed].name] += count
        return total

    def _upto(self, blend: str, step: int) -> int:
        """Examples of a blend in the first so many steps of the run."""
        done = 0
        for number, stage in enumerate(self.plan.stages):
            if blend in dict(stage.steps_of) and step > stage.first:
                done += self._within(number, min(step - stage.first, stage.steps))[blend]
        return done


def spread(counts: Sequence[int]) -> np.ndarray:
    """(sum of counts,) uint8: so many of each number 0, 1, ..., each spread evenly over the whole:
    the k-th of n stands at (k + 1/2) / n (Webster's method); of equal places the first number's.

    >>> spread([4, 2])
    array([0, 1, 0, 0, 1, 0], dtype=uint8)
    """
    places = np.concatenate([(2 * np.arange(n) + 1) / (2 * n) for n in counts if n])
    numbers = np.repeat(np.arange(len(counts), dtype=np.uint8), counts)
    return numbers[np.argsort(places, kind="stable")]
