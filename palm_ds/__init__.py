"""palm_ds: multi-task pretraining and fine-tuning of text encoders on a DeepSpeed engine.

    import palm_ds as palm

    backbone = palm.Backbone.from_pretrained("models/ernie-2.0-base")
    task = palm.tasks.Classification.on(train="train.tsv", dev="dev.tsv")
    trainer = palm.Trainer(task, backbone=backbone, batch=32, epochs=3, lr=5e-5)
    trainer.train()
    trainer.predict("new.tsv")

What stands here is loaded when it is first asked for (docs/api.md).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from palm_ds.api import (
        Backbone,
        ClassesTask,
        CorpusTask,
        Encoder,
        EncoderLayer,
        Head,
        HeadOutput,
        MultiHeadTrainer,
        TableTask,
        Task,
        TaskWithData,
        TextTask,
        Trainer,
    )
    from palm_ds.api import (
        events as event,
    )

__version__ = "0.1.0"
__all__ = [
    "Backbone",
    "ClassesTask",
    "CorpusTask",
    "Encoder",
    "EncoderLayer",
    "Head",
    "HeadOutput",
    "MultiHeadTrainer",
    "TableTask",
    "Task",
    "TaskWithData",
    "TextTask",
    "Trainer",
    "event",
]
_MODULES = {
    "downloader": "palm_ds.weights.download.downloader",
    "heads": "palm_ds.model.heads",
    "metrics": "palm_ds.tasks.metrics",
    "tasks": "palm_ds.tasks",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("palm_ds.api"), name)
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    raise AttributeError(f"module 'palm_ds' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__, *_MODULES]
