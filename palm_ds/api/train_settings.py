"""What a person may say about a training: a few numbers, where it is written, what computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from palm_ds.common.config import parse
from palm_ds.common.errors import UserError
from palm_ds.runtime.ds_config import DSConfig, make_ds_config, read_ds_config
from palm_ds.runtime.processes import accelerator

_USUAL_LENGTH = 128


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Keywords of Trainer and MultiHeadTrainer."""

    batch: int = 32
    """Examples of a step."""
    epochs: float = 3
    """So often every example; with several tasks, of the reference."""
    lr: float = 5e-5
    """Peak learning rate."""
    length: int = 0
    """Tokens of a row; examples are packed into rows, longer ones are cut. 0: 128, or as many as
    the encoder has positions for."""
    schedule: Literal["linear", "noam", "wsd", "constant"] = "linear"
    """How the rate falls."""
    warmup: float = 0.1
    """Steps in which it rises; below 1: a share of all."""
    weight_decay: float = 0.01
    """Of the encoder's matrices."""
    seed: int = 1
    """Decides the heads' first weights, order and dropout."""
    held_out: float = 0.0
    """Share of the rows kept for evaluation, of tasks without `dev`."""
    evaluate_every: int = 0
    """Steps between two evaluations; 0: at the end of every epoch."""
    best: str = ""
    """Whose weights stay: `task.metric` or `mean` where it was best; empty: the last."""
    patience: int = 0
    """With `best`: stop after so many evaluations without a better one."""
    save_every: int = 0
    """Steps between two checkpoints to go on from; 0: at the end only."""
    log_every: int = 10
    """Steps between two lines."""
    folder: str | Path = ""
    """The run folder; a folder of a run that was interrupted goes on. Empty: a temporary one."""
    deepspeed_config: Any = None
    """How the machine computes it: a file, a mapping, or none: ZeRO 1, bf16 where it can."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """Any other keys of a recipe (docs/recipe.md), as {"optimizer": {"ema": 0.999}}."""

    def __post_init__(self) -> None:
        if self.batch < 1 or self.epochs <= 0:
            name = "batch" if self.batch < 1 else "epochs"
            raise UserError(f"{name}: expected a number above 0, got {getattr(self, name)}")

    def values(self, longest: int) -> dict[str, Any]:
        """What of it stands in a recipe, beside backbone, sources, tasks and stages; `longest`: row
        that the encoder reads."""
        return {
            "seed": self.seed,
            "length": self.length or min(_USUAL_LENGTH, longest),
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
        given = self.deepspeed_config
        if given is None:
            able = accelerator()
            if able.device_name() == "cpu":
                return make_ds_config({"zero_optimization": {"stage": 0}})
            precision = {"bf16": {"enabled": True}} if able.is_bf16_supported() else {}
            return make_ds_config({"zero_optimization": {"stage": 1}, **precision})
        if isinstance(given, Mapping):
            return make_ds_config(given)
        return read_ds_config(given)


def read_settings(values: Mapping[str, Any], where: str) -> TrainSettings:
    """Raises UserError for a keyword that there is not."""
    return parse(TrainSettings, values, where)


def merged(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """The first, with what the second has in its place; key by key where both hold keys."""
    found = dict(values)
    for key, value in over.items():
        old = found.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        found[key] = merged(old, value) if both else value  # type: ignore[arg-type]
    return found
