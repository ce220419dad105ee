"""From scores to predictions: what heads say of examples, put together item by item."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from palm_ds.data.blend_dataset import Built
from palm_ds.data.task import Task


class Decoded(NamedTuple):
    """What a task's scores say of one example."""

    task: str
    feed: int
    item: int
    number: int
    """Of the example within its feed: the windows of an item in their order."""
    piece: dict[str, Any]


def decoded(
    built: Built, given: Mapping[str, torch.Tensor], tasks: Mapping[str, Task], sources: Any
) -> Iterator[Decoded]:
    """Of every example of a batch that carries labels of a task whose scores were given.

    `sources[feed]` are the feeds' sources."""
    scores = {name: found.float().cpu().numpy() for name, found in given.items()}
    used = dict.fromkeys(scores, 0)
    for row in built:
        for (feed, number, _), example in row:
            for name in scores.keys() & example.labels.keys():
                many = len(example.labels[name][0])
                if many:
                    mine = scores[name][used[name] : used[name] + many]
                    used[name] += many
                    piece = tasks[name].decode(mine, example, sources[feed])
                    yield Decoded(name, feed, example.item, number, piece)


def gathered(
    pieces: list[Decoded], tasks: Mapping[str, Task], sources: Any
) -> dict[str, tuple[int, dict[int, dict[str, Any]]]]:
    """{task: (feed, {item: prediction})} of all that was decoded, items in order. A task that
    several feeds carry is taken from the first of them."""
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    feed_of: dict[str, int] = {}
    for each in sorted(pieces, key=lambda each: (each.feed, each.item, each.number)):
        if feed_of.setdefault(each.task, each.feed) == each.feed:
            found.setdefault(each.task, {}).setdefault(each.item, []).append(each.piece)
    return {
        name: (feed_of[name], tasks[name].gather(of_items, sources[feed_of[name]]))
        for name, of_items in found.items()
    }
