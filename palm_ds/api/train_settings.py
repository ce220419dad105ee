"""Settings of Trainer and MultiHeadTrainer, and the recipe keys that they stand for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from palm_ds.common.config import parse, shorten
from palm_ds.common.errors import UserError
from palm_ds.common.settings import Settings
from palm_ds.runtime.deepspeed.ds_config import DSConfig, make_ds_config, read_ds_config
from palm_ds.runtime.processes.processes import accelerator

_DEFAULT_LENGTH = 128
_ROWS = "rows of the task: .on(train=..., dev=...)"
_TOKENIZER = "Backbone.from_pretrained(NAME, tokenizer=...)"
_OPTIMIZER = 'recipe={"optimizer": {...}}'
_PRECISION = 'deepspeed_config={"bf16": {"enabled": True}}, or fp16'
TRANSFORMERS = {
    "args": "keywords of this call",
    "model": "backbone",
    "tokenizer": _TOKENIZER,
    "processing_class": _TOKENIZER,
    "data_collator": "not needed: rows are packed",
    "train_dataset": _ROWS,
    "eval_dataset": _ROWS,
    "compute_metrics": "metrics=FUNCTION of (predictions, labels)",
    "output_dir": "folder",
    "learning_rate": "lr",
    "batch_size": "batch",
    "per_device_train_batch_size": "batch, of a step over all processes",
    "per_device_eval_batch_size": "not needed",
    "gradient_accumulation_steps": "not needed: batch is that of a step, and is split as needed",
    "num_train_epochs": "epochs",
    "num_epochs": "epochs",
    "max_steps": 'recipe={"stages": [{TASK: STEPS}]}',
    "max_length": "length",
    "max_seq_length": "length",
    "warmup_steps": "warmup",
    "warmup_ratio": "warmup",
    "lr_scheduler_type": "schedule",
    "eval_strategy": "evaluate_every",
    "evaluation_strategy": "evaluate_every",
    "eval_steps": "evaluate_every",
    "save_strategy": "save_every",
    "save_steps": "save_every",
    "save_total_limit": 'recipe={"save": {"keep": NUMBER}}',
    "logging_steps": "log_every",
    "load_best_model_at_end": 'best="mean", or TASK.METRIC',
    "metric_for_best_model": 'best="TASK.METRIC"',
    "early_stopping_patience": "patience",
    "report_to": 'recipe={"track": {"wandb": {"project": NAME}}}, or mlflow, trackio',
    "resume_from_checkpoint": "folder: the same folder resumes",
    "optim": _OPTIMIZER,
    "optimizers": _OPTIMIZER,
    "max_grad_norm": 'recipe={"optimizer": {"clip": NUMBER}}',
    "label_smoothing_factor": "smoothing of the task: Classification(smoothing=...).on(...)",
    "bf16": _PRECISION,
    "fp16": _PRECISION,
    "deepspeed": "deepspeed_config",
}
"""Words of transformers' Trainer and TrainingArguments, and what they are called here."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Settings):
    """Keywords of Trainer and MultiHeadTrainer."""

    batch: PositiveInt = 32
    """Examples per step, over all processes."""
    epochs: PositiveFloat = 3
    """Passes over the training rows; with several tasks, over those of the reference task."""
    lr: float = 5e-5
    """Peak learning rate."""
    length: int = 0
    """Tokens per row. Examples are packed into rows; longer ones are truncated. 0: 128, or the
    encoder's maximum if that is less."""
    schedule: Literal["linear", "cosine", "noam", "wsd", "constant"] = "linear"
    """How the learning rate decays."""
    warmup: float = 0.1
    """Warm-up steps; below 1: a fraction of all steps."""
    weight_decay: float = 0.01
    """Weight decay of the encoder's matrices and embeddings."""
    seed: int = 1
    """Determines the heads' initial weights, data order and dropout."""
    held_out: float = 0.0
    """Share of the rows held out for evaluation, for tasks without `dev`."""
    evaluate_every: int = 0
    """Steps between evaluations; 0: at the end of every epoch."""
    best: str = ""
    """Metric that selects the final weights: `task.metric`, or `mean` over tasks. Empty: the
    weights of the last step."""
    patience: int = 0
    """With `best`: stop after this many evaluations without improvement; 0: never."""
    save_every: int = 0
    """Steps between checkpoints; 0: only at the end."""
    log_every: int = 10
    """Steps between log lines."""
    folder: str | Path = ""
    """The run folder. An interrupted run in it is resumed. Empty: a temporary folder."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them: less memory, a third more
    computation, the same weights. It is `palm_ds.activation_checkpointing` of a DeepSpeed file."""
    deepspeed_config: str | Path | Mapping[str, Any] | None = None
    """DeepSpeed settings: a file or a mapping. None: ZeRO 1 with bf16 if supported; on CPU no ZeRO,
    fp32."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """Any other recipe keys (docs/recipe.md), such as {"optimizer": {"ema": 0.999}}."""

    def values(self, max_length: int) -> dict[str, Any]:
        """The recipe keys other than backbone, sources, tasks and stages. `max_length`: the longest
        row that the encoder reads."""
        return {
            "seed": self.seed,
            "length": self.length or min(_DEFAULT_LENGTH, max_length),
            "batch": f"{self.batch} examples",
            "optimizer": {"lr": self.lr, "weight_decay": self.weight_decay},
            "schedule": {"kind": self.schedule, "warmup": self.warmup},
            "held_out": self.held_out,
            "evaluate": {
                "every": self.evaluate_every,
                "best": self.best,
                "patience": self.patience,
            },
            "save": {"every": self.save_every},
            "log": {"every": self.log_every},
        }

    def ds_config(self) -> DSConfig:
        """The DeepSpeed settings to train with."""
        config = _ds_config(self.deepspeed_config)
        if not self.gradient_checkpointing:
            return config
        return replace(config, activation_checkpointing=True)


def _ds_config(given: str | Path | Mapping[str, Any] | None) -> DSConfig:
    if given is None:
        device = accelerator()
        if device.device_name() == "cpu":
            return make_ds_config({"zero_optimization": {"stage": 0}})
        precision = {"bf16": {"enabled": True}} if device.is_bf16_supported() else {}
        return make_ds_config({"zero_optimization": {"stage": 1}, **precision})
    return make_ds_config(given) if isinstance(given, Mapping) else read_ds_config(given)


def read_settings(values: Mapping[str, Any], where: str) -> TrainSettings:
    """Raises UserError for an unknown keyword or a wrong value."""
    folder = values.get("folder", "")
    if not isinstance(folder, str | PathLike):  # parse() would read 3 as the name "3"
        raise UserError(f"{where}.folder: expected a path, got {shorten(folder)}")
    return parse(TrainSettings, values, where)


def check_keywords(names: Iterable[str], where: str) -> None:
    """Raises UserError for a keyword of transformers' Trainer, with what it is called here."""
    for name in names:
        if name in TRANSFORMERS:
            raise UserError(f"{where}.{name}: unknown key; here it is {TRANSFORMERS[name]}")


def merged(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`values` updated with `over`, recursively where both have a mapping."""
    together = dict(values)
    for key, value in over.items():
        old = together.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = merged(old, value)
        together[key] = value
    return together
