"""The optimizer: which parameters move, at what rate, which decay; AdamW, LAMB or a class of one's
own over them.

Learning rates come step by step from the schedule, so a group keeps only its factor of them.
Parameters are chosen by patterns over their names, in which * stands for anything, dots too:
"backbone.layers.0.*", "backbone.word.weight", "heads.*".
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn

from palm_ds.common.errors import UserError, suggest
from palm_ds.runtime.check_custom_optimizer import OptimizerStateSpec, checked_optimizer_class

_KINDS = ("adamw", "lamb")
_MOMENTS = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
ADAM = OptimizerStateSpec(moments=_MOMENTS, step=torch.zeros(()))
LAMB = OptimizerStateSpec(moments=_MOMENTS, step=0)
_TINY, _SETTLED_EVERY = 1e-33, 64
_LAYER = re.compile(r"backbone\.layers\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How weights follow their gradients."""

    kind: str = "adamw"
    """`adamw`; `lamb` for very large batches (ZeRO 0 only); or `module.Class`, a
    torch.optim.Optimizer (docs/engine.md)."""
    lr: float = 1e-4
    """Peak learning rate; the schedule scales it."""
    betas: tuple[float, float] = (0.9, 0.999)
    """adamw and lamb: decay of the running mean of gradients and of their squares."""
    eps: float = 1e-6
    """adamw and lamb: added to the root of the mean square."""
    options: dict[str, Any] = field(default_factory=dict)
    """`module.Class`: further keywords of its constructor, beside `lr` and `weight_decay`."""
    weight_decay: float = 0.01
    """Decoupled decay of the backbone's matrices; biases, LayerNorm and heads have none."""
    clip: float = 1.0
    """Largest global gradient norm; 0: no clipping."""
    layer_decay: float = 1.0
    """Each layer learns at this fraction of the rate of the one above it; 1: all at one rate."""
    freeze: tuple[str, ...] = ()
    """Parameters that are never updated: patterns over their names, as "backbone.layers.0.*"."""
    ema: float = 0.0
    """Decay of running averages of the weights, to evaluate and export instead of them; 0: none."""
    fgm: float = 0.0
    """Length of an adversarial change to each text's word vectors, trained on as well; 0: none."""

    def __post_init__(self) -> None:
        self._check_kind()
        if self.lr <= 0:
            raise UserError(f"optimizer.lr: must be above 0, got {self.lr}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"optimizer.betas: each must be in [0, 1), got {list(self.betas)}")
        if not 0 < self.layer_decay <= 1:
            raise UserError(f"optimizer.layer_decay: must be in (0, 1], got {self.layer_decay}")
        if not 0 <= self.ema < 1:
            raise UserError(f"optimizer.ema: must be in [0, 1), got {self.ema}")
        for name in ("eps", "weight_decay", "clip", "fgm"):
            if getattr(self, name) < 0:
                raise UserError(
                    f"optimizer.{name}: must not be negative, got {getattr(self, name)}"
                )

    def _check_kind(self) -> None:
        if self.kind in _KINDS:
            if self.options:
                raise UserError(
                    f"optimizer.options: are a module.Class's; {self.kind} has `betas`, `eps`"
                )
            return
        if "." not in self.kind:
            near = suggest(self.kind, _KINDS)
            raise UserError(f'optimizer.kind: no "{self.kind}"{near} (or module.Class)')
        for name in ("betas", "eps"):
            if getattr(self, name) != getattr(OptimizerConfig, name):
                raise UserError(f"optimizer.{name}: {self.kind} has it under `options`, if at all")


def match_patterns(patterns: Iterable[str], names: Sequence[str], where: str) -> set[str]:
    """The names that any of the patterns fits. Raises UserError, which begins with `where`, for a
    pattern that fits none."""
    found: set[str] = set()
    for pattern in patterns:
        fitting = {name for name in names if fnmatchcase(name, pattern)}
        if not fitting:
            raise UserError(f"{where}: no parameter is called {pattern!r}{_near(pattern, names)}")
        found |= fitting
    return found


def _near(pattern: str, names: Sequence[str]) -> str:
    """Names and whole modules like the pattern; where there are none, the modules at the top."""
    parts = [name.split(".") for name in names]
    modules = {".".join(part[:n]) + ".*" for part in parts for n in range(1, len(part))}
    near = difflib.get_close_matches(pattern, sorted({*names, *modules}), n=1)
    return suggest(pattern, near or {m for m in modules if m.count(".") <= 2})


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Take the parameters that the patterns fit out of training: they need no gradient. Raises
    UserError where a pattern fits none, or nothing is left to train."""
    parameters = dict(model.named_parameters())
    frozen = match_patterns(patterns, list(parameters), "optimizer.freeze")
    if frozen == set(parameters):
        raise UserError(
            f"optimizer.freeze: {list(patterns)} freezes every parameter; leave some to train"
        )
    for name in frozen:
        parameters[name].requires_grad_(False)


def param_lr_scales(
    names: Sequence[str], layer_decay: float, scales: Mapping[str, float] | None = None
) -> dict[str, float]:
    """{parameter: what the schedule's rate is multiplied with}, for all `names`.

    Layers are numbered as in ERNIE's code (and unlike ELECTRA's, which counts the pooler as one
    more): heads and pooler 1, the layer at the top layer_decay, the one below it its square, ...;
    embeddings, with their LayerNorm, layer_decay ** (layers + 1).

    `scales` {pattern: scale} override that; of several patterns that fit, the last one counts.
    """
    layers = max((int(m[1]) + 1 for m in map(_LAYER.match, names) if m), default=0)
    if layer_decay < 1 and not layers:
        raise UserError("optimizer.layer_decay: the model has no layers called backbone.layers.0")
    found = {name: layer_decay ** _depth(name, layers) for name in names}
    for pattern, factor in (scales or {}).items():
        found |= dict.fromkeys(match_patterns([pattern], names, "learning rates"), factor)
    return found


def _depth(name: str, layers: int) -> int:
    """How far below the pooler a parameter is: 0 for itself and the heads."""
    if match := _LAYER.match(name):
        return layers - int(match[1])
    embeds = name.startswith("backbone.") and not name.startswith("backbone.pooler.")
    return layers + 1 if embeds else 0


def param_groups(
    model: nn.Module,
    weight_decay: float,
    update_counts: Mapping[str, int] | None = None,
    *,
    lr_scales: Mapping[str, float] | None = None,
    freezable: Iterable[str] = (),
) -> list[dict[str, Any]]:
    """Two groups: what decays (matrices and embeddings of the backbone) and what does not
    (biases, LayerNorm, heads). Frozen parameters are in none.

    A parameter shared by backbone and head appears once and counts as the backbone's. Heads do not
    decay so that one whose task has not begun stays as it is, bit for bit.

    `update_counts`: updates that each parameter has had (0 where not given). Parameters with
    different counts get groups of their own, since ZeRO keeps one count of steps for a group.
    `lr_scales`: multipliers of the learning rate, by name (1 where not given); each gets its own
    groups too. `freezable`: patterns of parameters that some steps freeze; those that match a
    group's parameters are in its "patterns".
    """
    groups: dict[tuple[Any, ...], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decays = parameter.ndim >= 2 and not name.startswith("heads.")
        age, factor = (update_counts or {}).get(name, 0), (lr_scales or {}).get(name, 1.0)
        key = (-age, not decays, -factor, patterns_of(name, freezable))
        groups.setdefault(key, []).append(parameter)
    return [
        {
            "params": groups[key],
            "weight_decay": 0.0 if key[1] else weight_decay,
            "lr_scale": -key[2],
            "patterns": key[3],
        }
        for key in sorted(groups)
    ]


def set_lr(groups: Iterable[dict[str, Any]], lr: float) -> None:
    """Set each group's learning rate to `lr` times the group's own multiplier."""
    for group in groups:
        group["lr"] = lr * group["lr_scale"]


def patterns_of(name: str, freezable: Iterable[str]) -> tuple[str, ...]:
    """Which patterns fit a parameter's name."""
    return tuple(sorted({pattern for pattern in freezable if fnmatchcase(name, pattern)}))


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    *,
    zero_stage: int,
    checked: bool,
    update_counts: Mapping[str, int] | None = None,
    lr_scales: Mapping[str, float] | None = None,
    freezable: Iterable[str] = (),
) -> torch.optim.Optimizer:
    """`checked`: the optimizer itself clips and skips steps with non-finite gradients. That is for
    ZeRO 0 in fp32, where DeepSpeed does neither well (everywhere else it does both). `lr_scales`
    and `freezable` are as in `param_groups`."""
    cls, spec = optimizer_class(config, zero_stage=zero_stage)
    groups = param_groups(
        model, config.weight_decay, update_counts, lr_scales=lr_scales, freezable=freezable
    )
    settings: dict[str, Any] = dict(lr=config.lr, ema=config.ema, **config.options)
    if config.kind in _KINDS:
        settings |= dict(betas=config.betas, eps=config.eps)
    if config.kind == "adamw":
        settings["fused"] = True
    if checked:
        settings["clip"] = config.clip
    bases = (*([ClipAndSkipNonFinite] if checked else []), EMA, cls)
    return type(cls.__name__, bases, {"state_spec": spec})(groups, **settings)


def optimizer_class(
    config: OptimizerConfig, *, zero_stage: int
) -> tuple[type[torch.optim.Optimizer], OptimizerStateSpec]:
    """What computes the updates, and what it keeps of each parameter. Raises UserError where that
    cannot be under a ZeRO stage."""
    if config.kind == "adamw":
        return torch.optim.AdamW, ADAM
    if config.kind == "lamb":
        if zero_stage > 0:
            raise UserError(
                f"optimizer.kind: lamb scales each matrix by its own norm, which ZeRO {zero_stage} "
                "cuts into flat pieces; use zero_optimization.stage 0, or adamw"
            )
        return Lamb, LAMB
    decays = config.weight_decay > 0
    return checked_optimizer_class(
        config.kind, config.options, decays=decays, zero_stage=zero_stage
    )


class StepFreezing:
    """Freezes parameters in some steps: they keep their weights, moments and update counts, and do
    not count in the gradient norm that is clipped."""

    def __init__(self, patterns: Iterable[str], names: Sequence[str]):
        """`patterns` over parameter names: those that a step may freeze."""
        self.patterns = tuple(dict.fromkeys(patterns))
        self.frozen: frozenset[str] = frozenset()
        match_patterns(self.patterns, names, "parameters to freeze")

    def watch(self, model: nn.Module) -> None:
        """Gradients of frozen parameters become 0 before anything adds or measures them."""
        for name, parameter in model.named_parameters():
            patterns = patterns_of(name, self.patterns)
            if patterns and parameter.requires_grad:
                parameter.register_hook(partial(self._gradient, patterns))

    def _gradient(self, patterns: tuple[str, ...], gradient: torch.Tensor) -> torch.Tensor:
        return gradient if self.frozen.isdisjoint(patterns) else torch.zeros_like(gradient)

    def prepare(self, groups: list[dict[str, Any]], frozen: Iterable[str]) -> None:
        """Freeze the parameters that match the patterns `frozen` for the next step."""
        self.frozen = frozenset(frozen)
        assert self.frozen <= set(self.patterns), (
            f"{set(self.frozen)} are not among {self.patterns}"
        )
        for group in groups:
            group["frozen"] = not self.frozen.isdisjoint(group["patterns"])


class EMA(torch.optim.Optimizer):
    """Keeps running averages of the weights, and passes over groups that are frozen in a step.

    A group whose "frozen" is true is passed over: weights, moments and count of steps stay as they
    are. `averages[weights]` begin as the weights are before their first step, and go to
    ema * average + (1 - ema) * weights with every step that is applied. Both happen within a step,
    where ZeRO has its flat pieces in the groups, so that a process averages only what it updates.
    """

    state_spec = ADAM
    """What the optimizer below keeps of each tensor."""

    def __init__(self, groups: list[dict[str, Any]], *, ema: float = 0.0, **settings: Any):
        super().__init__(groups, **settings)
        self.ema = ema
        self.averages: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        weights = [weight for group in groups for weight in group["params"]] if self.ema else []
        averages = [self.ema_of(weight) for weight in weights]
        self.param_groups = [group for group in groups if not group.get("frozen")]
        super().step()
        for group in self.param_groups:
            for weight in group["params"]:
                _flush_denormals(self.state.get(weight), self.state_spec)
        self.param_groups = groups
        if weights:
            foreach: Any = torch._foreach_lerp_  # pyright: ignore[reportPrivateImportUsage]
            foreach(averages, weights, 1 - self.ema)

    def ema_of(self, weight: torch.Tensor) -> torch.Tensor:
        """The running average of a tensor of the groups; as it begins where there is none yet."""
        if weight not in self.averages:
            self.averages[weight] = weight.detach().clone()
        return self.averages[weight]


def _flush_denormals(state: Mapping[str, Any] | None, spec: OptimizerStateSpec) -> None:
    """Now and then makes 0 of moments that are nearly that, on CPUs. Those of a word that is read
    no more shrink to denormal numbers and stay there (0.9 of the smallest ones rounds to
    themselves), which CPUs compute with many times slower. `eps` hides them from the weights long
    before."""
    if spec not in (ADAM, LAMB) or not state or state["exp_avg"].device.type != "cpu":
        return
    if int(state["step"]) % _SETTLED_EVERY == 0:
        for name in spec.moments:
            torch.hardshrink(state[name], _TINY, out=state[name])


class ClipAndSkipNonFinite(torch.optim.Optimizer):
    """Measures the global gradient norm before each step, clips to `clip`, and leaves everything
    alone where the norm is not finite.

    DeepSpeed reads `overflow` and `_global_grad_norm` from its own optimizers to count skipped
    steps and to report the norm; it finds them here too. Gradients were averaged over all
    processes before, so every process decides the same.
    """

    def __init__(self, groups: list[dict[str, Any]], *, clip: float, **settings: Any):
        super().__init__(groups, **settings)
        self.clip = clip
        self.overflow = False
        self._global_grad_norm = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        parameters = [p for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        self._global_grad_norm = norm.item()
        self.overflow = not math.isfinite(self._global_grad_norm)
        if self.overflow:
            return
        if 0 < self.clip < self._global_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.clip, norm)
        super().step()


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al. 2020, algorithm 2): Adam's step of each matrix, scaled to the matrix's norm.

    Tensors of the group without decay take Adam's step as it is, as in the authors' code. Moments
    are corrected for their start at 0.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
    ):
        super().__init__(groups, dict(lr=lr, betas=betas, eps=eps, weight_decay=0.0))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(parameter))
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (square / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
        update = (mean / (1 - beta1 ** state["step"])).div_(root)
        update.add_(parameter, alpha=group["weight_decay"])
        if group["weight_decay"] > 0:
            update.mul_(_trust(parameter, update))
        parameter.sub_(update, alpha=group["lr"])


def _trust(parameter: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """|weights| / |update|, and 1 where either is 0."""
    weights, length = parameter.norm(), update.norm()
    usable = (weights > 0) & (length > 0)
    return torch.where(usable, weights / length, torch.ones_like(weights))
