"""The packed rows a run trains on: a pure function of (recipe, corpus, seed, row number).

    feed     one blend over one corpus: its n-th example, for any n
    track    the rows of a stage, window by window; each window packs a fixed number of examples of
             the track's feeds, in proportion, and shuffles the rows
    stream   step -> rows -> micro-batches of a process

A stage with `mix: batch` has one track, a stage with `mix: step` one track per blend. The last
window of a track takes exactly as many examples as its last rows hold, so that a stage consumes a
contiguous range of every feed and the next stage continues where it stopped.

Rows do not depend on the processes; only `batches` slices them. The cursor in a checkpoint makes
seeking to step 1,000,000 as cheap as to step 0; without it the lengths of everything before are
packed again (some hundred thousand examples per second).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from palm_ds.common import rng as keyed
from palm_ds.data.blend_dataset import ExampleRef, Feed, PackedRow, build_rows, fill, refs
from palm_ds.data.packing import pack
from palm_ds.data.stages import Plan, order_of
from palm_ds.model.batch import Batch

WINDOW_ROWS = 512
"""Approximate rows of a window: enough that its last, partly filled row wastes little."""


@dataclass
class Window:
    """Packed rows, the number of the first one within its track, and the examples it consumed."""

    first: int
    rows: list[PackedRow]
    consumed: np.ndarray  # (feeds,)


@dataclass
class Track:
    """`total` rows of some feeds in proportion."""

    feeds: Sequence[Feed]
    which: tuple[int, ...]  # the feeds used, as indices
    rates: np.ndarray  # (which,) examples per window
    consumed_first: np.ndarray  # (feeds,) examples consumed before the track
    total: int
    room: int
    key: int
    window_rows: int = WINDOW_ROWS
    firsts: list[int] = field(default_factory=lambda: [0])
    """First row of each window packed so far, and of the next one."""
    base: int = 0
    """Number of the window of `firsts[0]`; a cursor starts in the middle."""
    kept: dict[int, Window] = field(default_factory=dict)

    def row(self, number: int) -> PackedRow:
        """A row of the track, 0 <= number < total."""
        window = self.window(self._window_of(number))
        return window.rows[number - window.first]

    def _window_of(self, number: int) -> int:
        if number < self.firsts[0]:
            self.firsts, self.base = [0], 0
        while number >= self.firsts[-1]:
            self.window(self.base + len(self.firsts) - 1)
        return self.base + bisect.bisect_right(self.firsts, number) - 1

    def window(self, number: int) -> Window:
        """A window, packed on first use; the previous one is kept too."""
        first = self.firsts[number - self.base]
        if number not in self.kept:
            newest = list(self.kept.items())[-1:]
            self.kept = dict(newest) | {number: self._pack(number, first)}
        if number - self.base == len(self.firsts) - 1:
            self.firsts.append(first + len(self.kept[number].rows))
        return self.kept[number]

    def _pack(self, number: int, first: int) -> Window:
        entries, lengths, order = self._entries(number)
        left = self.total - first
        rows = pack(lengths, self.room)
        taken = len(entries)
        if len(rows) > left:
            # The track ends here: take as many examples as fit its last rows.
            taken = _most(lambda most: len(pack(lengths[:most], self.room)) <= left, taken)
            rows = pack(lengths[:taken], self.room)
            rows += [[] for _ in range(left - len(rows))]
        shuffled = keyed.generator(self.key, number).permutation(len(rows))
        return Window(
            first=first,
            rows=[fill([entries[i] for i in rows[r]], self.room) for r in shuffled],
            consumed=np.bincount(order[:taken], minlength=len(self.feeds)),
        )

    def _entries(self, number: int) -> tuple[list[ExampleRef], np.ndarray, np.ndarray]:
        """The examples of a window, the feeds evenly interleaved; their lengths and feeds."""
        start = np.floor(number * self.rates + 1e-9).astype(np.int64)
        count = np.floor((number + 1) * self.rates + 1e-9).astype(np.int64) - start
        entries: list[ExampleRef] = []
        lengths = []
        for feed, skip, many in zip(self.which, start, count, strict=True):
            n = self.consumed_first[feed] + skip + np.arange(many)
            layouts = self.feeds[feed].layouts(n)
            entries += refs(feed, n, layouts)
            lengths.append(layouts["length"])
        place = np.concatenate([(np.arange(many) + 0.5) / max(many, 1) for many in count])
        order = np.argsort(place, kind="stable")
        return (
            [entries[i] for i in order],
            np.concatenate(lengths)[order],
            np.repeat(self.which, count)[order],
        )

    def consumed_before(self, number: int) -> np.ndarray:
        """(feeds,) examples that the windows before this one consumed."""
        out = np.zeros(len(self.feeds), np.int64)
        out[list(self.which)] = np.floor(number * self.rates + 1e-9).astype(np.int64)
        return out

    def consumed_to(self, row: int) -> np.ndarray:
        """(feeds,) examples of all windows that contain a row before this one."""
        if row >= self.total:
            return self.consumed()
        window = self._window_of(row)
        is_first = row == self.firsts[window - self.base]
        return self.consumed_before(window if is_first else window + 1)

    def consumed(self) -> np.ndarray:
        """(feeds,) examples of the whole track."""
        if not self.total:
            return np.zeros(len(self.feeds), np.int64)
        last = self._window_of(self.total - 1)
        return self.consumed_before(last) + self.window(last).consumed


def _most(fits: Callable[[int], bool], upper: int) -> int:
    """The largest number from 0 to `upper` that fits."""
    low, high = 0, upper
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


@dataclass
class Stream:
    """step -> this process's micro-batches.

    `feeds_of[blend]` lists the feeds of a blend with their shares, one feed per corpus.
    """

    plan: Plan
    feeds: Sequence[Feed]
    feeds_of: Mapping[str, Sequence[tuple[int, float]]]
    rows: int
    """Rows per step, over all processes."""
    length: int
    seed: int
    pad: int
    window_rows: int = WINDOW_ROWS
    already_read: dict[str, int] = field(default_factory=dict)
    """{feed: examples} consumed before the first step, by the run that this one extends."""
    _stages: dict[int, OpenStage] = field(default_factory=dict, repr=False)

    def step_rows(self, step: int) -> list[PackedRow]:
        """The rows of a step, in global order."""
        number = self.plan.stage_at(step)
        stage = self._stage(number)
        track, first = stage.place(step - self.plan.stages[number].first, self.rows)
        return [stage.tracks[track].row(first + i) for i in range(self.rows)]

    def batches(self, step: int, rank: int, world: int, micro_rows: int) -> list[Batch]:
        """The micro-batches of one process: its contiguous share of the step's rows."""
        share = self.rows // world
        rows = self.step_rows(step)[rank * share : (rank + 1) * share]
        return [self.build(rows[i : i + micro_rows]) for i in range(0, share, micro_rows)]

    def build(self, rows: Sequence[PackedRow]) -> Batch:
        """One micro-batch of rows."""
        return build_rows(self.feeds, rows, self.length, self.pad)

    def cursor(self, step: int) -> dict[str, Any]:
        """The position of a step, as JSON; `seek` restores it without packing earlier rows."""
        if step >= self.plan.steps:
            return {}
        number = self.plan.stage_at(step)
        stage = self._stage(number)
        tracks = []
        places = stage.places(step - self._first(number), self.rows)
        for track, first in zip(stage.tracks, places, strict=True):
            window = track._window_of(first) if first < track.total else None
            at = None if window is None else [window, track.firsts[window - track.base]]
            tracks.append(at)
        return {"stage": number, "already_read": stage.consumed_first.tolist(), "tracks": tracks}

    def seek(self, cursor: Mapping[str, Any]) -> None:
        """Continue from a cursor of the same recipe and corpus."""
        if not cursor:
            return
        stage = self._open(cursor["stage"], np.array(cursor["already_read"], np.int64))
        for track, at in zip(stage.tracks, cursor["tracks"], strict=True):
            if at is not None:
                track.base, track.firsts = at[0], [at[1]]
        self._stages[cursor["stage"]] = stage

    def consumed(self, step: int | None = None) -> dict[str, int]:
        """{feed: examples} consumed by the first `step` steps (by default all). A started window
        counts as a whole, so that a run that continues from there sees no example twice."""
        step = self.plan.steps if step is None else step
        number = self.plan.stage_at(max(step - 1, 0))
        stage = self._stage(number)
        total = stage.consumed_first.copy()
        places = stage.places(step - self._first(number), self.rows)
        for track, place in zip(stage.tracks, places, strict=True):
            total += track.consumed_to(place)
        return {feed.name: int(n) for feed, n in zip(self.feeds, total, strict=True)}

    def _first(self, stage: int) -> int:
        return self.plan.stages[stage].first

    def _stage(self, number: int) -> OpenStage:
        if number not in self._stages:
            if number == 0:
                first = np.array(
                    [self.already_read.get(feed.name, 0) for feed in self.feeds], np.int64
                )
            else:
                before = self._stage(number - 1)
                first = before.consumed_first + before.consumed()
            self._stages[number] = self._open(number, first)
        return self._stages[number]

    def _open(self, number: int, consumed_first: np.ndarray) -> OpenStage:
        stage = self.plan.stages[number]
        if stage.mix == "batch":
            groups, order = [stage.steps_of], None
        else:
            groups = [(blend,) for blend in stage.steps_of]
            order = order_of(stage, number, self.seed)
        tracks = [
            self._track(group, f"{number}.{i}", consumed_first) for i, group in enumerate(groups)
        ]
        return OpenStage(tracks=tracks, consumed_first=consumed_first, order=order)

    def _track(
        self, group: Sequence[tuple[str, int]], name: str, consumed_first: np.ndarray
    ) -> Track:
        steps = sum(n for _, n in group)
        tokens: dict[int, float] = {}
        for blend, blend_steps in group:
            for feed, share in self.feeds_of[blend]:
                tokens[feed] = tokens.get(feed, 0.0) + share * blend_steps / steps
        window_tokens = self.window_rows * self.length
        rates = [
            share * window_tokens / float(self.feeds[f].mean_tokens) for f, share in tokens.items()
        ]
        return Track(
            feeds=self.feeds,
            which=tuple(tokens),
            rates=np.array(rates),
            consumed_first=consumed_first,
            total=steps * self.rows,
            room=self.length,
            key=keyed.key(self.seed, "rows", name),
            window_rows=self.window_rows,
        )


@dataclass
class OpenStage:
    """The tracks of a stage, and the track of each step."""

    tracks: list[Track]
    consumed_first: np.ndarray  # (feeds,) examples consumed before the stage
    order: np.ndarray | None  # (steps,) the track of each step; None: there is only one

    @cached_property
    def _nth(self) -> np.ndarray:
        """(steps,) number of earlier steps of the stage with the same track."""
        assert self.order is not None
        nth = np.empty(len(self.order), np.int32)
        for track in range(len(self.tracks)):
            here = self.order == track
            nth[here] = np.arange(here.sum())
        return nth

    def place(self, step: int, rows: int) -> tuple[int, int]:
        """(track, first row within it) of a step of the stage."""
        if self.order is None:
            return 0, step * rows
        return int(self.order[step]), int(self._nth[step]) * rows

    def places(self, step: int, rows: int) -> list[int]:
        """The first unused row of every track at the start of a step."""
        if self.order is None:
            return [step * rows]
        done = np.bincount(self.order[:step], minlength=len(self.tracks))
        return [int(n) * rows for n in done]

    def consumed(self) -> np.ndarray:
        return np.sum([track.consumed() for track in self.tracks], axis=0)
