"""The texts that generating tasks write for the first held-out rows, during training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from palm_ds.data.stream.task_group_dataset import TaskGroupDataset
from palm_ds.data.tasks.task import Task
from palm_ds.data.tasks.text_generation import SourceRoom, TextGenerator, write_texts
from palm_ds.model.multi_task_model import Model

if TYPE_CHECKING:
    from palm_ds.engine import Engine


def written_rows(
    engine: Engine, datasets: Sequence[TaskGroupDataset], tasks: Mapping[str, Task]
) -> dict[str, tuple[int, dict[int, dict[str, Any]]]]:
    """{task: (dataset, {row: prediction})} of the first dataset of each task that writes texts.
    Collective: all processes get the same."""
    found: dict[str, tuple[int, dict[int, dict[str, Any]]]] = {}
    for number, dataset in enumerate(datasets):
        for each in dataset.tasks:
            task = tasks[each.name]
            if not isinstance(task, TextGenerator) or each.name in found:
                continue
            if rows := min(task.evaluate_rows, len(dataset.source)):
                found[each.name] = number, _written(engine, dataset, task, rows)
    return found


def _written(
    engine: Engine, dataset: TaskGroupDataset, task: TextGenerator, rows: int
) -> dict[int, dict[str, Any]]:
    """{row: prediction} of the first `rows` rows; each process writes its share, the last ones
    some rows twice."""
    items = np.arange(engine.rank, -(-rows // engine.world) * engine.world, engine.world) % rows
    room = SourceRoom(length=dataset.max_length, segments=dataset.segments, task_id=dataset.task_id)

    def write(model: Model) -> list[dict[str, Any]]:
        return write_texts(
            model,
            task,
            items.tolist(),
            dataset.source,
            room,
            settings=task.evaluation_decoding,
            batch_tokens=engine.micro_rows * dataset.max_length,
            lockstep=engine.ds_config.stage == 3 and engine.world > 1,
        )

    parts = engine.processes.gather((items.tolist(), engine.apply(write)))
    return dict(
        sorted(
            ((item, each) for own, made in parts for item, each in zip(own, made, strict=True)),
            key=lambda pair: pair[0],
        )
    )
