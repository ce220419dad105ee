"""The packed rows a run trains on: a pure function of (recipe, corpus, seed, row number).

    feed     one blend over one corpus: its n-th example, forever
    track    the rows of a stage: window after window, each a fixed number of examples of the
             track's feeds in their proportion, packed together and shuffled
    stream   step -> rows -> micro-batches of a process

A stage with `mix: batch` has one track, one with `mix: step` has a track a blend. The last window
of a track takes exactly as many examples as its last rows hold, so that a stage consumes a
contiguous stretch of every feed and the next stage goes on where it stopped.

Nothing here knows of processes until `batches`, which hands out slices. A `Cursor` is what a
checkpoint keeps so that seeking to step 1,000,000 costs what step 0 costs; without one the lengths
of everything before are packed again (some hundred thousand examples a second).
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
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
"""Rows of a window, about: enough that packing loses little to the window's last row."""


@dataclass
class Window:
    """Packed rows, the number of the first one within its track, and what it consumed."""

    first: int
    rows: list[PackedRow]
    consumed: np.ndarray  # (feeds,)


@dataclass
class Track:
    """The rows of some feeds in proportion, `total` of them in all."""

    feeds: Sequence[Feed]
    which: tuple[int, ...]  # the feeds used, as indices
    rates: np.ndarray  # (which,) examples a window
    begun: np.ndarray  # (feeds,) examples consumed when the track begins
    total: int
    room: int
    key: int
    window_rows: int = WINDOW_ROWS
    firsts: list[int] = field(default_factory=lambda: [0])
    """Number of the first row of each window known so far (and of the one after)."""
    base: int = 0
    """The number of the window that `firsts[0]` belongs to (a cursor starts in the middle)."""
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
        """A window, packed when first asked for; the one before it is kept as well."""
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
            # The track ends here: the longest stretch of examples that fits its last rows.
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
            n = self.begun[feed] + skip + np.arange(many)
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
        """(feeds,) examples that windows before this one took from the track's begin."""
        out = np.zeros(len(self.feeds), np.int64)
        out[list(self.which)] = np.floor(number * self.rates + 1e-9).astype(np.int64)
        return out

    def consumed_to(self, row: int) -> np.ndarray:
        """(feeds,) examples of the windows that the rows before this one stand in."""
        if row >= self.total:
            return self.consumed()
        window = self._window_of(row)
        begins_it = row == self.firsts[window - self.base]
        return self.consumed_before(window if begins_it else window + 1)

    def consumed(self) -> np.ndarray:
        """(feeds,) examples of the whole track, to its last row."""
        if not self.total:
            return np.zeros(len(self.feeds), np.int64)
        last = self._window_of(self.total - 1)
        return self.consumed_before(last) + self.window(last).consumed


def _most(fits: Any, upper: int) -> int:
    low, high = 0, upper
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


@dataclass
class Stream:
    """step -> this process's micro-batches.

    `feeds_of[blend]` are the feeds of a blend with their shares (several corpora: several feeds).
    """

    plan: Plan
    feeds: Sequence[Feed]
    feeds_of: Mapping[str, Sequence[tuple[int, float]]]
    rows: int
    """Rows of a step, over all processes."""
    length: int
    seed: int
    pad: int
    window_rows: int = WINDOW_ROWS
    begun: dict[str, int] = field(default_factory=dict)
    """{feed: examples} that were read before the first step, by the run that this one extends."""
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
        """Where a step stands, as JSON: `seek` starts there without packing what came before."""
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
        return {"stage": number, "begun": stage.begun.tolist(), "tracks": tracks}

    def seek(self, cursor: Mapping[str, Any]) -> None:
        """Take up a cursor of the same recipe and corpus."""
        if not cursor:
            return
        stage = self._open(cursor["stage"], np.array(cursor["begun"], np.int64))
        for track, at in zip(stage.tracks, cursor["tracks"], strict=True):
            if at is not None:
                track.base, track.firsts = at[0], [at[1]]
        self._stages[cursor["stage"]] = stage

    def consumed(self, step: int | None = None) -> dict[str, int]:
        """{feed: examples} that the first `step` steps draw from (all steps, by default). Within a
        stage whole windows count, so that a run that goes on from there sees none of them again."""
        step = self.plan.steps if step is None else step
        number = self.plan.stage_at(max(step - 1, 0))
        stage = self._stage(number)
        total = stage.begun.copy()
        places = stage.places(step - self._first(number), self.rows)
        for track, place in zip(stage.tracks, places, strict=True):
            total += track.consumed_to(place)
        return {feed.name: int(n) for feed, n in zip(self.feeds, total, strict=True)}

    def _first(self, stage: int) -> int:
        return self.plan.stages[stage].first

    def _stage(self, number: int) -> OpenStage:
        if number not in self._stages:
            if number == 0:
                begun = np.array([self.begun.get(feed.name, 0) for feed in self.feeds], np.int64)
            else:
                before = self._stage(number - 1)
                begun = before.begun + before.consumed()
            self._stages[number] = self._open(number, begun)
        return self._stages[number]

    def _open(self, number: int, begun: np.ndarray) -> OpenStage:
        stage = self.plan.stages[number]
        if stage.mix == "batch":
            groups, order = [stage.steps_of], None
        else:
            groups = [(blend,) for blend in stage.steps_of]
            order = order_of(stage, number, self.seed)
        tracks = [self._track(group, f"{number}.{i}", begun) for i, group in enumerate(groups)]
        return OpenStage(tracks=tracks, begun=begun, order=order)

    def _track(self, group: Sequence[tuple[str, int]], name: str, begun: np.ndarray) -> Track:
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
            begun=begun,
            total=steps * self.rows,
            room=self.length,
            key=keyed.key(self.seed, "rows", name),
            window_rows=self.window_rows,
        )


@dataclass
class OpenStage:
    """A stage as it is read: its tracks, and which of them each step belongs to."""

    tracks: list[Track]
    begun: np.ndarray  # (feeds,) examples consumed before the stage
    order: np.ndarray | None  # (steps,) the track of a step; None: there is one

    @cached_property
    def _nth(self) -> np.ndarray:
        """(steps,) how many earlier steps of the stage are of the same track."""
        assert self.order is not None
        nth = np.empty(len(self.order), np.int32)
        for track in range(len(self.tracks)):
            mine = self.order == track
            nth[mine] = np.arange(mine.sum())
        return nth

    def place(self, step: int, rows: int) -> tuple[int, int]:
        """(track, first row in it) of a step of the stage."""
        if self.order is None:
            return 0, step * rows
        return int(self.order[step]), int(self._nth[step]) * rows

    def places(self, step: int, rows: int) -> list[int]:
        """The first row not yet used, of every track, when a step begins."""
        if self.order is None:
            return [step * rows]
        done = np.bincount(self.order[:step], minlength=len(self.tracks))
        return [int(n) * rows for n in done]

    def consumed(self) -> np.ndarray:
        return np.sum([track.consumed() for track in self.tracks], axis=0)
