"""Fine-tuning tasks: one file each, read from tables of rows.

palm.tasks.Classification.on(train="train.tsv", dev="dev.tsv")  # for palm.Trainer

The classes are imported when they are first asked for: `classification.py` holds `Classification`.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """The class of a task."""
    from palm_ds.common.errors import suggest
    from palm_ds.data.tasks.task import find

    kinds = {} if name.startswith("_") else _kinds()
    if name not in kinds:
        raise AttributeError(f"module {__name__!r} has no task {name!r}{suggest(name, kinds)}")
    return find(kinds[name])


def __dir__() -> list[str]:
    return sorted(_kinds())


def _kinds() -> dict[str, str]:
    """{class name: kind} of every task here."""
    from palm_ds.data.tasks.task import known_kinds

    mine = [kind for kind, module in known_kinds().items() if module.startswith(f"{__name__}.")]
    return {"".join(part.title() for part in kind.split("_")): kind for kind in mine}
