"""From scores to predictions: decodes the scores of examples and gathers them by item."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from palm_ds.data.blend_dataset import BuiltRow
from palm_ds.data.corpus_source import Source
from palm_ds.data.table_source import TableSource
from palm_ds.data.task import Task


class Decoded(NamedTuple):
    """A task's decoded scores of one example."""

    task: str
    feed: int
    item: int
    number: int
    """The example's number within its feed: the windows of an item are in order."""
    piece: dict[str, Any]


def decoded(
    built: Sequence[BuiltRow],
    given: Mapping[str, torch.Tensor],
    tasks: Mapping[str, Task],
    sources: Sequence[Source | TableSource],
) -> Iterator[Decoded]:
    """Decodes the scores `given` per task for every example of a batch with labels of that task.

    `sources[feed]` is the source of a feed."""
    scores = {name: found.float().cpu().numpy() for name, found in given.items()}
    used = dict.fromkeys(scores, 0)
    for row in built:
        for ref, example in row:
            for name in scores.keys() & example.labels.keys():
                many = len(example.labels[name][0])
                if many:
                    own = scores[name][used[name] : used[name] + many]
                    used[name] += many
                    piece = tasks[name].decode(own, example, sources[ref.feed])
                    yield Decoded(name, ref.feed, example.item, ref.number, piece)


def gathered(
    pieces: Sequence[Decoded],
    tasks: Mapping[str, Task],
    sources: Sequence[Source | TableSource],
) -> dict[str, tuple[int, dict[int, dict[str, Any]]]]:
    """{task: (feed, {item: prediction})}, items in order. For a task of several feeds, only the
    first feed counts."""
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    feed_of: dict[str, int] = {}
    for each in sorted(pieces, key=lambda each: (each.feed, each.item, each.number)):
        if feed_of.setdefault(each.task, each.feed) == each.feed:
            found.setdefault(each.task, {}).setdefault(each.item, []).append(each.piece)
    return {
        name: (feed_of[name], tasks[name].gather(of_items, sources[feed_of[name]]))
        for name, of_items in found.items()
    }
