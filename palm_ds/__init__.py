"""palm_ds: multi-task pretraining and fine-tuning of text encoders on a DeepSpeed engine.

    import palm_ds as palm

    backbone = palm.Backbone.from_pretrained("models/ernie-2.0-base")
    task = palm.tasks.Classification.on(train="train.tsv", dev="dev.tsv")
    trainer = palm.Trainer(task, backbone=backbone, batch=32, epochs=3, lr=5e-5)
    trainer.train()
    trainer.predict(["a text", "another"])

    palm.load("runs/mine").predict(["a text"])

Every name is imported when it is first used (docs/api.md).
"""

from __future__ import annotations

import importlib

from palm_ds.common.version import __version__ as __version__

TYPE_CHECKING = False  # as in typing, whose import takes time in which Ctrl-C is a traceback
if TYPE_CHECKING:
    from typing import Any

    from palm_ds import downloader as downloader
    from palm_ds import tasks as tasks
    from palm_ds.api import (
        Backbone,
        Callback,
        ClassesTask,
        CorpusTask,
        CustomTokenizer,
        DecodingSettings,
        Encoder,
        EncoderLayer,
        Head,
        HeadOutput,
        LayerSpec,
        LoadedModel,
        MultiHeadTrainer,
        Schedule,
        TableTask,
        Task,
        TaskWithData,
        TextTask,
        Trainer,
        TransformerEncoder,
        TransformerSpec,
        load,
    )
    from palm_ds.api import events as event
    from palm_ds.model.heads import heads as heads
    from palm_ds.tasks import metrics as metrics

__all__ = [
    "Backbone",
    "Callback",
    "ClassesTask",
    "CorpusTask",
    "CustomTokenizer",
    "DecodingSettings",
    "Encoder",
    "EncoderLayer",
    "TransformerEncoder",
    "LayerSpec",
    "TransformerSpec",
    "Head",
    "HeadOutput",
    "LoadedModel",
    "MultiHeadTrainer",
    "Schedule",
    "TableTask",
    "Task",
    "TaskWithData",
    "TextTask",
    "Trainer",
    "event",
    "load",
]
_MODULES = {
    "downloader": "palm_ds.downloader",
    "heads": "palm_ds.model.heads.heads",
    "metrics": "palm_ds.tasks.metrics",
    "tasks": "palm_ds.tasks",
}
_PADDLEPALM = {
    "reader": "rows belong to a task, as in palm.tasks.Classification.on(train=...)",
    "head": "a head belongs to a task, such as palm.tasks.Classification",
    "backbone": "use palm.Backbone.from_pretrained(FOLDER or NAME)",
    "optimizer": "it is a keyword of palm.Trainer: lr, weight_decay, recipe",
    "lr_sched": "it is a keyword of palm.Trainer: schedule, warmup",
}
"""PaddlePALM's modules that have no counterpart, and what is in their place."""


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("palm_ds.api"), name)
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    more = f": {_PADDLEPALM[name]} (docs/coming_from_paddlepalm.md)" if name in _PADDLEPALM else ""
    raise AttributeError(f"module 'palm_ds' has no attribute {name!r}{more}")


def __dir__() -> list[str]:
    return ["__version__", *__all__, *_MODULES]
