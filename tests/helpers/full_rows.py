"""How full rows are packed with a single task group."""

from __future__ import annotations

import numpy as np

from palm_ds.data.stream.packing import pack
from palm_ds.data.stream.task_group_dataset import TaskGroupDataset, extend_into_padding, refs


def real_share(dataset: TaskGroupDataset) -> float:
    """The share of real tokens among the positions of about 512 rows."""
    count = int(512 * dataset.max_length / float(dataset.mean_tokens))
    layouts = dataset.layouts(np.arange(count))
    packed = pack(layouts["length"], dataset.max_length)
    every = refs(0, np.arange(count), layouts)
    rows = [extend_into_padding([every[i] for i in row], dataset.max_length) for row in packed]
    real = sum(int(layout["length"]) for row in rows for *_, layout in row)
    return real / (len(rows) * dataset.max_length)
