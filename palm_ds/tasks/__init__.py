"""Fine-tuning tasks: one file each, read from tables of rows.

palm.tasks.Classification(train="train.tsv", dev="dev.tsv")  # a palm_ds.given.TaskOn
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """A task by its class's name, to be given its files."""
    if name.startswith("__"):
        raise AttributeError(name)
    from palm_ds.given import named

    return named(name)
