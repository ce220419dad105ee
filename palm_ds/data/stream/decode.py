"""From scores to predictions: decodes the scores of examples and gathers them by item."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from palm_ds.data.sources.table import TableSource
from palm_ds.data.stream.task_group_dataset import BuiltRow
from palm_ds.data.tasks.interfaces import Predicts


class Decoded(NamedTuple):
    """A task's decoded scores of one example."""

    task: str
    dataset: int
    item: int
    number: int
    """The example's number within its dataset: the windows of an item are in order."""
    piece: dict[str, Any]


def decoded(
    built: Sequence[BuiltRow],
    given: Mapping[str, torch.Tensor],
    tasks: Mapping[str, Predicts],
    sources: Sequence[TableSource],
) -> Iterator[Decoded]:
    """Decodes the scores `given` per task for every example of a batch with labels of that task.

    `sources[dataset]` is the source of a dataset."""
    scores = {name: values.float().cpu().numpy() for name, values in given.items()}
    used = dict.fromkeys(scores, 0)
    for row in built:
        for ref, example in row:
            for name in scores.keys() & example.labels.keys():
                many = len(example.labels[name][0])
                if many:
                    own = scores[name][used[name] : used[name] + many]
                    used[name] += many
                    piece = tasks[name].decode(own, example, sources[ref.dataset])
                    yield Decoded(name, ref.dataset, example.item, ref.number, piece)


def gathered(
    pieces: Sequence[Decoded],
    tasks: Mapping[str, Predicts],
    sources: Sequence[TableSource],
) -> dict[str, tuple[int, dict[int, dict[str, Any]]]]:
    """{task: (dataset, {item: prediction})}, items in order. For a task of several datasets, only
    the first dataset counts."""
    pieces_of: dict[str, dict[int, list[dict[str, Any]]]] = {}
    dataset_of: dict[str, int] = {}
    for each in sorted(pieces, key=lambda each: (each.dataset, each.item, each.number)):
        if dataset_of.setdefault(each.task, each.dataset) == each.dataset:
            pieces_of.setdefault(each.task, {}).setdefault(each.item, []).append(each.piece)
    return {
        name: (dataset_of[name], tasks[name].gather(of_items, sources[dataset_of[name]]))
        for name, of_items in pieces_of.items()
    }
