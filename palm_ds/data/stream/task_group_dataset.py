"""Numbered examples of a task group over one source, and packed rows of them.

A dataset is one task group over one source: its n-th example is a pure function of (seed, n), for
any n."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeAlias, cast

import numpy as np

from palm_ds.common.errors import UserError
from palm_ds.common.rng import derive_key, keyed_generator, keyed_uniform
from palm_ds.data.sources.corpus import CorpusSource
from palm_ds.data.sources.table import TableSource
from palm_ds.data.stream.item_order import EndlessOrder, ItemOrder, item_order
from palm_ds.data.stream.packing import pack
from palm_ds.data.stream.stages import tasks_of
from palm_ds.data.tasks.example import Example, collate, lengthened
from palm_ds.data.tasks.soft_labels import SoftTasks, add_soft_labels
from palm_ds.data.tasks.task import SourceT, TableTask, Task
from palm_ds.model.inputs.batch import Batch

_SAMPLE = 4096


@dataclass(frozen=True)
class TaskGroupDataset(Generic[SourceT]):
    """The examples of one task group over one source: the n-th is a pure function of (seed, n)."""

    name: str
    tasks: tuple[Task[SourceT], ...]
    task_id: int
    source: SourceT
    """What it reads; of a large corpus, a sample of it."""
    seed: int
    max_length: int
    fixed: bool = False
    """Held-out data: the items in order, the same in every epoch."""
    segments: int = 0
    """Number of segments of the encoder, 0 for no limit; further segments get the last one."""
    soft: SoftTasks = field(default_factory=dict)
    """The tasks that a teacher labels, with its scores of the rows if they are known."""

    @cached_property
    def key(self) -> int:
        return derive_key(self.seed, self.name)

    @cached_property
    def order(self) -> ItemOrder[SourceT]:
        """The items of the first task, in the order in which they are read."""
        if isinstance(self.source, TableSource) and self.source.endless and not self.fixed:
            tasks = [task for task in self.tasks if isinstance(task, TableTask)]
            order = EndlessOrder(tasks, self.source.endless, self.max_length)
            return cast("ItemOrder[SourceT]", order)
        return item_order(self.tasks[0], self.source, self.max_length, self.key, self.fixed)

    @property
    def sample(self) -> TaskGroupDataset[SourceT]:
        """The same over what is known of a reader before it is read; itself if it has an end."""
        if isinstance(self.source, TableSource) and self.source.endless:
            return replace(self, source=cast(SourceT, replace(self.source, endless=None)))
        return self

    @property
    def windowed(self) -> bool:
        """Whether its corpus is so large that it is read in windows."""
        return isinstance(self.source, CorpusSource) and self.source.split is not None

    @property
    def num_items(self) -> int:
        """Items of an epoch."""
        return len(self.order)

    def describe(self) -> str:
        """A line for the start of a run; may be empty."""
        tasks = self.tasks if self.tasks[0].reads == "table" else self.tasks[:1]
        lines = [task.describe(self.source) for task in tasks]
        if isinstance(self.source, TableSource) and (rows := self.source.endless):
            lines.append(
                f"{rows.where}: {rows.reader}, without an end; passes of {rows.pass_examples:,} "
                f"rows, the first {rows.window:,} of which are counted here"
            )
        return "\n".join(filter(None, lines))

    def layouts(self, n: np.ndarray) -> np.ndarray:
        """(len(n),) the layouts of these examples (palm_ds/data/tasks/example.py)."""
        if not len(n):
            return self.layouts(np.zeros(1, np.int64))[:0]
        task = self.tasks[0]
        uniform = (
            keyed_uniform(self.key, n, task.num_uniforms)
            if task.num_uniforms
            else np.empty((len(n), 0))
        )
        parts = [
            (
                part.places,
                task.layout(part.items, uniform[part.places], part.source, self.max_length),
            )
            for part in self.order.look_up(n)
        ]
        table = np.empty(len(n), parts[0][1].dtype)
        for places, part in parts:
            table[places] = part
        longest = int(table["length"].max(initial=0))
        if longest > self.max_length:
            raise UserError(
                f"tasks.{task.name}: layout() returned an example of {longest} tokens; rows have "
                f"{self.max_length}"
            )
        return table

    def at_rate(self, rate: float | None) -> Sequence[Task[SourceT]]:
        """The tasks with this mask rate; None: with their own."""
        if rate is None:
            return self.tasks
        if rate not in self._at_rate:
            self._at_rate.clear()
            self._at_rate[rate] = tuple(
                replace(task, **{"rate": rate}) if task.rate_varies else task for task in self.tasks
            )
        return self._at_rate[rate]

    @cached_property
    def _at_rate(self) -> dict[float, Sequence[Task[SourceT]]]:
        return {}

    def example(self, n: int, layout: np.void, rate: float | None = None) -> Example:
        """The n-th example, built by the first task of the task group and labeled by all, with a
        mask rate of a step's own if it has one."""
        first, source = self.tasks[0], self.order.source_of(n)
        example = first.example(layout, source, self._generator(first, "example", n))
        if len(example) != layout["length"] and not (
            first.shortens and len(example) < layout["length"]
        ):
            raise UserError(
                f"tasks.{first.name}: example() returned {len(example)} tokens, but layout() "
                f"promised {layout['length']}; the two must agree"
            )
        for task in sorted(self.at_rate(rate), key=lambda task: task.labels_last):
            task.label(example, source, self._generator(task, "label", n))
            if task.name in self.soft:
                add_soft_labels(example, task, source, self.soft[task.name])
        if self.segments:
            np.minimum(example.token_type_ids, self.segments - 1, out=example.token_type_ids)
        return example

    def _generator(self, task: Task[SourceT], use: str, n: int) -> np.random.Generator:
        return keyed_generator(derive_key(self.key, task.name, use), n)

    @cached_property
    def mean_tokens(self) -> Fraction:
        """Mean number of row tokens per example: its own tokens, those it grows by to fill the row,
        and padding. Measured on the first few thousand; it converts tokens to examples."""
        lengths = self.layouts(np.arange(self.order.up_to(_SAMPLE)))["length"]
        return Fraction(len(pack(lengths, self.max_length)) * self.max_length, len(lengths))


class ExampleRef(NamedTuple):
    """An example that is not built yet."""

    dataset: int
    """The index of its dataset."""
    number: int
    """Its number within the dataset."""
    layout: np.void

    @property
    def length(self) -> int:
        """Its tokens."""
        return int(self.layout["length"])


PackedRow: TypeAlias = list[ExampleRef]
"""The examples of a row, in order."""


def refs(dataset: int, numbers: np.ndarray, layouts: np.ndarray) -> list[ExampleRef]:
    """Examples of one dataset, given their numbers and layouts."""
    pairs = zip(numbers.tolist(), layouts, strict=True)
    return [ExampleRef(dataset, number, layout) for number, layout in pairs]


def extend_into_padding(row: PackedRow, max_length: int) -> PackedRow:
    """Gives the free space of a row to the examples in it that can grow."""
    free = max_length - sum(ref.length for ref in row)
    for k, ref in enumerate(row):
        more = min(free, int(ref.layout["spare"]))
        if more > 0:
            row[k] = ref._replace(layout=lengthened(ref.layout, more))
            free -= more
    return row


class BuiltExample(NamedTuple):
    """An example with the reference it was built from."""

    ref: ExampleRef
    example: Example


BuiltRow: TypeAlias = list[BuiltExample]


def build_examples(
    datasets: Sequence[TaskGroupDataset], rows: Sequence[PackedRow], rate: float | None = None
) -> list[BuiltRow]:
    """The examples of rows; `rate`: as in `TaskGroupDataset.example`."""

    def built(ref: ExampleRef) -> BuiltExample:
        return BuiltExample(ref, datasets[ref.dataset].example(ref.number, ref.layout, rate))

    return [[built(ref) for ref in row] for row in rows]


def collate_built(
    datasets: Sequence[TaskGroupDataset], built: Sequence[BuiltRow], length: int, pad: int
) -> Batch:
    """Built examples as one batch."""
    rows = [[(each.example, datasets[each.ref.dataset].task_id) for each in row] for row in built]
    return collate(rows, length=length, pad=pad)


def build_rows(
    datasets: Sequence[TaskGroupDataset],
    rows: Sequence[PackedRow],
    length: int,
    pad: int,
    rate: float | None = None,
) -> Batch:
    """The examples of rows, built and collated."""
    return collate_built(datasets, build_examples(datasets, rows, rate), length, pad)


def micro_batches(
    rows: Sequence[PackedRow],
    first: int,
    share: int,
    micro_rows: int,
    build: Callable[[Sequence[PackedRow], int], Batch],
) -> list[Batch]:
    """The `share` rows of a step from `first` on, in micro-batches that `build` makes of rows and
    the number of their first."""
    own = rows[first : first + share]
    return [build(own[i : i + micro_rows], first + i) for i in range(0, share, micro_rows)]


def held_out_rows(dataset: TaskGroupDataset, dataset_index: int, most: int) -> list[PackedRow]:
    """The first `most` held-out examples of a dataset, packed: the same at every evaluation."""
    n = np.arange(dataset.order.up_to(most))
    layouts = dataset.layouts(n)
    every = refs(dataset_index, n, layouts)
    return [[every[i] for i in row] for row in pack(layouts["length"], dataset.max_length)]


def make_datasets(
    task_groups: Sequence[str],
    tasks: Mapping[str, Task],
    task_ids: Mapping[str, int],
    sources: Mapping[str, Sequence[tuple[str, CorpusSource | TableSource, float]]],
    *,
    seed: int,
    length: int,
    fixed: bool = False,
    segments: int = 0,
    soft: SoftTasks = MappingProxyType({}),
) -> tuple[list[TaskGroupDataset], dict[str, list[tuple[int, float]]]]:
    """The datasets of every task group, and {group: (dataset, share) pairs}.

    `sources[name]` are the (corpus or table, documents or rows, weight) of a recipe's source."""
    datasets: list[TaskGroupDataset] = []
    mixtures: dict[str, list[tuple[int, float]]] = {}
    for task_group in task_groups:
        parts = tuple(tasks[name] for name in tasks_of(task_group))
        corpora = sources[parts[0].source]
        total = sum(weight for _, _, weight in corpora)
        for corpus_name, source, weight in corpora:
            name = task_group if len(corpora) == 1 else f"{task_group} @ {corpus_name}"
            mixtures.setdefault(task_group, []).append((len(datasets), weight / total))
            datasets.append(
                TaskGroupDataset(
                    name=name,
                    tasks=parts,
                    task_id=task_ids[parts[0].name],
                    source=source,
                    seed=seed,
                    max_length=length,
                    fixed=fixed,
                    segments=segments,
                    soft={part.name: soft[part.name] for part in parts if part.name in soft},
                )
            )
    return datasets, mixtures
