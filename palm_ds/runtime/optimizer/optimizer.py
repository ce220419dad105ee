"""The optimizer of a run, over parameter groups: AdamW, LAMB, StableAdamW, Muon or a custom class.

The learning rate comes from the schedule at every step; a parameter group keeps its multiplier only
(param_groups.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import nn

from palm_ds.common.config import parse
from palm_ds.common.errors import UserError, suggest
from palm_ds.common.settings import PositiveShare, Rate, Settings
from palm_ds.runtime.optimizer.check_custom_optimizer import checked_optimizer_class
from palm_ds.runtime.optimizer.muon import Muon, MuonOptions
from palm_ds.runtime.optimizer.param_groups import (
    USUAL_NAMES,
    EncoderNames,
    Selection,
    is_hidden_matrix,
    param_groups,
)
from palm_ds.runtime.optimizer.scaled_adam import Lamb, StableAdamW
from palm_ds.runtime.optimizer.state import (
    ADAM,
    MOMENTUM,
    NeedsLayouts,
    OptimizerStateSpec,
    whole_param,
)
from palm_ds.runtime.optimizer.wrappers import EMA, ClipAndSkipNonFinite

_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "lamb": Lamb,
    "stable_adamw": StableAdamW,
    "muon": Muon,
}
_KINDS = tuple(_CLASSES)
SAME_STATE = ("adamw", "lamb", "stable_adamw")
"""Kinds whose state a run of another one of them can continue with."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Settings):
    """The optimizer and its hyperparameters."""

    kind: str = "adamw"
    """`adamw`; `lamb`, for very large batches; `stable_adamw`, which scales large updates down;
    `muon`, for the matrices of the layers, with AdamW for the rest (ZeRO 0, 1 and 2); or
    `module.Class`, a custom torch.optim.Optimizer (docs/engine.md)."""
    lr: PositiveFloat = 1e-4
    """Peak learning rate; the schedule scales it."""
    betas: tuple[Rate, Rate] = (0.9, 0.999)
    """Built-in kinds: decay rates of the running means of gradients and of their squares."""
    eps: PositiveFloat = 1e-6
    """Built-in kinds: added to the square root of the mean squared gradient."""
    options: dict[str, Any] = field(default_factory=dict)
    """`module.Class`: keyword arguments of its constructor, besides `lr` and `weight_decay`.
    `muon`: `momentum` (0.95), `nesterov` (true), `ns_steps` (5), and `adjust_lr`, how the learning
    rate depends on a matrix's shape: `match_rms_adamw`, which takes AdamW's rates, or `original`
    (docs/engine.md)."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay of the encoder's matrices and embeddings; biases, LayerNorm and heads
    have none."""
    clip: NonNegativeFloat = 1.0
    """Maximum global gradient norm; 0 disables clipping."""
    layer_decay: PositiveShare = 1.0
    """Ratio of each layer's learning rate to that of the layer above it; 1: the same rate for
    all."""
    freeze: tuple[str, ...] = ()
    """Parameters that are never updated, as patterns of their names: `["backbone.layers.0.*"]`."""
    ema: Rate = 0.0
    """Decay of an exponential moving average of the weights, such as 0.999, which is evaluated and
    exported in their place; 0: no average."""
    fgm: NonNegativeFloat = 0.0
    """Adversarial training (FGM): also train on each text with its token embeddings perturbed by a
    vector of this norm, such as 0.1; 0: off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_kind()

    @property
    def takes_betas(self) -> bool:
        """Whether `betas` and `eps` are its own; a custom class has its `options`."""
        return self.kind in _KINDS

    def _check_kind(self) -> None:
        if self.kind == "muon":
            muon_options(self.options)
            return
        if self.kind in _KINDS:
            if self.options:
                raise UserError(
                    "optimizer.options: only for a custom optimizer (module.Class); "
                    f"{self.kind} has `betas` and `eps`"
                )
            return
        if "." not in self.kind:
            near = suggest(self.kind, _KINDS)
            raise UserError(f'optimizer.kind: no "{self.kind}"{near} (or module.Class)')
        for name in ("betas", "eps"):
            if getattr(self, name) != getattr(OptimizerConfig, name):
                raise UserError(
                    f"optimizer.{name}: not used by {self.kind}; set it in optimizer.options"
                )


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    *,
    zero_stage: int,
    checked: bool,
    update_counts: Mapping[str, int] | None = None,
    lr_scales: Mapping[str, float] | None = None,
    freezable: Iterable[Selection] = (),
    names: EncoderNames = USUAL_NAMES,
) -> torch.optim.Optimizer:
    """The optimizer of a model. `checked`: it clips gradients itself and skips steps with
    non-finite ones. That is for ZeRO 0 in fp32, where DeepSpeed does neither well; otherwise
    DeepSpeed does both. `update_counts`, `lr_scales` and `freezable` are as in `param_groups`;
    `names`: those of the model's encoder."""
    cls, spec = optimizer_class(config, zero_stage=zero_stage)
    groups = param_groups(
        model,
        config.weight_decay,
        update_counts,
        lr_scales=lr_scales,
        freezable=freezable,
        split_hidden=config.kind == "muon",
    )
    settings = dict(lr=config.lr, ema=config.ema, **_settings(config, names))
    if checked:
        settings["clip"] = config.clip
    bases = (*([ClipAndSkipNonFinite] if checked else []), EMA, cls)
    specs = {"state_spec": spec, "state_specs": _other_specs(model, config)}
    optimizer = type(cls.__name__, bases, specs)(groups, **settings)
    if isinstance(optimizer, NeedsLayouts):
        named = model.named_parameters()
        optimizer.set_layouts({p: whole_param(name, p.shape) for name, p in named}, None)
    return optimizer


def _settings(config: OptimizerConfig, names: EncoderNames) -> dict[str, Any]:
    """The keyword arguments of the optimizer's own class."""
    if config.kind not in _KINDS:
        return dict(config.options)
    settings: dict[str, Any] = dict(betas=config.betas, eps=config.eps)
    if config.kind == "adamw":
        settings["fused"] = True
    if config.kind == "muon":
        settings |= {"options": muon_options(config.options), "stacked": names.stacked}
    return settings


def _other_specs(model: nn.Module, config: OptimizerConfig) -> dict[str, OptimizerStateSpec]:
    """Muon keeps only a momentum of the hidden matrices. Raises UserError if there are none."""
    if config.kind != "muon":
        return {}
    hidden = [name for name, p in model.named_parameters() if is_hidden_matrix(name, p)]
    if not hidden:
        raise UserError(
            "optimizer.kind: muon is for matrices named backbone.layers.N.*, and the model has "
            "none; use adamw"
        )
    return dict.fromkeys(hidden, MOMENTUM)


def muon_options(options: Mapping[str, Any]) -> MuonOptions:
    return parse(MuonOptions, dict(options), "optimizer.options")


def optimizer_class(
    config: OptimizerConfig, *, zero_stage: int
) -> tuple[type[torch.optim.Optimizer], OptimizerStateSpec]:
    """The class that computes the updates and its per-tensor state. Raises UserError if it cannot
    run under this ZeRO stage."""
    if config.kind == "muon" and zero_stage == 3:
        raise UserError(
            "optimizer.kind: muon orthogonalizes whole matrices, but ZeRO 3 cuts every matrix; use "
            "zero_optimization.stage 0, 1 or 2, or adamw"
        )
    if config.kind in _CLASSES:
        return _CLASSES[config.kind], ADAM
    decays = config.weight_decay > 0
    return checked_optimizer_class(
        config.kind, config.options, decays=decays, zero_stage=zero_stage
    )
