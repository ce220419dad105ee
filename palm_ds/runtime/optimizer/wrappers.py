"""Additions to the update of every optimizer of a run: clipping and skipping, running averages of
the weights, and freezing in some steps.

`build_optimizer` puts the classes here in front of the optimizer's own:

    ClipAndSkipNonFinite (ZeRO 0 in fp32 only) -> EMA -> AdamW, Lamb, Muon, ... or a custom class
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from palm_ds.runtime.optimizer.param_groups import AllBut, Selection, match_patterns, selections_of
from palm_ds.runtime.optimizer.state import ADAM, MOMENTUM, OptimizerStateSpec, total_norm

_TINY, _FLUSH_EVERY = 1e-33, 64
_CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grads_with_norm_
_MOMENTS = (*ADAM.moments, *MOMENTUM.moments)


class StepFreezing:
    """Freezes parameters in some steps: they keep their weights, moments and update counts, and do
    not count in the gradient norm that is clipped."""

    def __init__(self, selections: Iterable[Selection], model: nn.Module):
        """`selections`: what a step may freeze. Raises UserError if one names no parameter, or none
        that trains."""
        self.selections = tuple(dict.fromkeys(selections))
        self.frozen: frozenset[str] = frozenset()
        parameters = dict(model.named_parameters())
        trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
        for each in self.selections:
            if isinstance(each, AllBut):
                match_patterns(
                    each.patterns, trained, "`trains`, among the parameters that are not frozen"
                )
            else:
                match_patterns([each], [*parameters], "parameters to freeze")

    def watch(self, model: nn.Module) -> None:
        """Set the gradients of frozen parameters to 0 before they are accumulated or measured."""
        for name, parameter in model.named_parameters():
            inside = selections_of(name, self.selections)
            if inside and parameter.requires_grad:
                parameter.register_hook(partial(self._gradient, inside))

    def _gradient(self, inside: tuple[str, ...], gradient: torch.Tensor) -> torch.Tensor:
        return gradient if self.frozen.isdisjoint(inside) else torch.zeros_like(gradient)

    def prepare(self, groups: list[dict[str, Any]], frozen: Iterable[Selection]) -> None:
        """Freeze the parameters of these selections for the next step."""
        self.frozen = frozenset(map(str, frozen))
        unknown = self.frozen - {*map(str, self.selections)}
        assert not unknown, f"{set(unknown)} are not among {self.selections}"
        for group in groups:
            group["frozen"] = not self.frozen.isdisjoint(group["freezable"])


class EMA(torch.optim.Optimizer):
    """Keeps running averages of the weights, and passes over groups that are frozen in a step.

    A group with a true "frozen" keeps its weights, moments and update count. `averages[weights]`
    start as the weights are before their first step, and become ema * average + (1 - ema) * weights
    after every step that is applied. Both happen inside the optimizer's step, where the groups hold
    ZeRO's flat partitions, so that each process averages only what it updates.
    """

    state_spec = ADAM
    """The per-tensor state of the wrapped optimizer."""
    state_specs: Mapping[str, OptimizerStateSpec] = {}
    """The parameters, by name, that have another state."""

    def __init__(self, groups: list[dict[str, Any]], *, ema: float = 0.0, **settings: Any):
        super().__init__(groups, **settings)
        self.ema = ema
        self.averages: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
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
            self._average(averages, weights)

    def _average(self, averages: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
        share = 1 - self.ema
        found_inf: torch.Tensor | None = getattr(self, "found_inf", None)
        if found_inf is None:
            torch._foreach_lerp_(averages, weights, share)  # pyright: ignore[reportPrivateImportUsage]
            return
        for average, weight in zip(averages, weights, strict=True):  # none of a skipped step
            average.lerp_(weight, share * (1 - found_inf))

    def ema_of(self, weight: torch.Tensor) -> torch.Tensor:
        """The running average of a tensor of the groups; the tensor itself before its first
        step."""
        if weight not in self.averages:
            self.averages[weight] = weight.detach().clone()
        return self.averages[weight]


def _flush_denormals(state: Mapping[str, Any] | None, spec: OptimizerStateSpec) -> None:
    """On CPUs, set nearly vanished moments to 0 every few steps. The moments of tokens that no
    longer occur shrink to denormal numbers and stay there (0.9 of the smallest one rounds to
    itself), which CPUs compute with many times more slowly. They are too small compared with `eps`
    to affect weights."""
    if spec != ADAM or not state:
        return
    moments = [state[name] for name in _MOMENTS if name in state]
    if moments[0].device.type == "cpu" and int(state["step"]) % _FLUSH_EVERY == 0:
        for moment in moments:
            torch.hardshrink(moment, _TINY, out=moment)


class ClipAndSkipNonFinite(torch.optim.Optimizer):
    """Clips the global gradient norm to `clip` (0: no clipping) and skips the step if the norm is
    not finite.

    DeepSpeed reads `overflow` and `_global_grad_norm` of its own optimizers to count skipped steps
    and to report the norm, and finds both here. Gradients are already averaged over the processes,
    so all of them decide alike.

    On a GPU, AdamW, LAMB and StableAdamW clip and skip in their kernels, so that the host does
    not wait for the norm; `skipped` counts those steps.
    """

    def __init__(self, groups: list[dict[str, Any]], *, clip: float, **settings: Any):
        super().__init__(groups, **settings)
        self.clip = clip
        self.overflow = False
        self._global_grad_norm: float | torch.Tensor = 0.0
        self.skipped: int | torch.Tensor = 0

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        parameters = [p for p in parameters if p.grad is not None]
        norm = total_norm([p.grad for p in parameters if p.grad is not None])
        if decides_on_device(self, norm):
            self._guard(norm)
        else:
            self._global_grad_norm = norm.item()
            self.overflow = not math.isfinite(self._global_grad_norm)
            if self.overflow:
                return
            if 0 < self.clip < self._global_grad_norm:
                torch.nn.utils.clip_grads_with_norm_(parameters, self.clip, norm)
        super().step()

    def _guard(self, norm: torch.Tensor) -> None:
        """Let the optimizer divide the gradients by `grad_scale` and skip the step if `found_inf`
        is not 0."""
        finite = norm.isfinite()
        scale = ((norm + _CLIP_EPS) / self.clip).clamp(min=1.0) if self.clip else norm.new_ones(())
        self.found_inf = (~finite).float()
        self.grad_scale = torch.where(finite, scale, 1.0).float()
        self.skipped = self.skipped + self.found_inf
        self._global_grad_norm = norm


def decides_on_device(optimizer: torch.optim.Optimizer, norm: torch.Tensor) -> bool:
    """Whether the optimizer can decide, and the host should not wait."""
    return norm.device.type != "cpu" and takes_found_inf(optimizer)


def takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it divides gradients by its `grad_scale`, and changes nothing if its `found_inf` is
    not 0."""
    is_own = getattr(optimizer, "state_spec", None) is ADAM  # a custom class may not
    adamw = is_own and isinstance(optimizer, torch.optim.AdamW)
    return getattr(optimizer, "skips_on_device", adamw and bool(optimizer.defaults["fused"]))
