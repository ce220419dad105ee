"""Fine-tuning tasks: one file each, read from tables of rows.

palm.tasks.Classification(train="train.tsv", dev="dev.tsv")  # a palm_ds.data.task_with_data.TaskOn
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """A task by its class's name, to be given its files."""
    if name.startswith("__"):
        raise AttributeError(name)
    from palm_ds.data.task_with_data import named

    return named(name)
