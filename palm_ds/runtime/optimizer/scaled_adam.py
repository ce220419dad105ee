"""AdamW with updates scaled by sums over the whole parameter:

    LAMB          very large batches (You et al. 2020)
    StableAdamW   large updates are scaled down (Wortsman et al. 2023)

Under ZeRO a parameter may lie on several processes. The sums of those are added in one all-reduce
of one vector per group, during which the parameters that are whole on a process are updated:

    cut parameters      moments, update, sums -> all-reduce ------------> factors, weights
    whole parameters                             moments ... weights

The gradient's memory takes the update. On CPUs, values are handled in chunks that stay in the
cache; on GPUs, scaled_adam_triton.py handles all pieces together.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from palm_ds.runtime.optimizer import scaled_adam_triton
from palm_ds.runtime.optimizer.scaled_adam_triton import Guard
from palm_ds.runtime.optimizer.state import AllReduce, FlatLayout, NeedsLayouts

_CHUNK = 1 << 17  # values; fp32 adds up the squares of as many to 1e-6


class Values(NamedTuple):
    """A flat piece of a parameter with its gradient and moments."""

    weight: torch.Tensor
    gradient: torch.Tensor
    mean: torch.Tensor
    square: torch.Tensor
    step: torch.Tensor
    """The update count, this update included."""

    def chunks(self) -> Iterator[Values]:
        """Parts that fit into the cache."""
        total = len(self.weight)
        size = _CHUNK if self.weight.device.type == "cpu" else total
        for start in range(0, total, size):
            yield self.part(slice(start, start + size))

    def part(self, inside: slice) -> Values:
        weight, gradient, mean, square, step = self
        return Values(weight[inside], gradient[inside], mean[inside], square[inside], step)


class _Piece(NamedTuple):
    values: Values
    param: int
    """The number of its parameter in the vector of sums."""
    numel: int
    """Values of the whole parameter."""

    @property
    def is_whole(self) -> bool:
        return len(self.values.weight) == self.numel


class ScaledAdam(NeedsLayouts):
    """AdamW's update of a parameter (Adam's direction plus weight decay), times the learning rate
    and a factor. Moments are bias-corrected."""

    uses_norms: bool
    """Whether the sums are the squares of weights and update: `sums`, for the GPU's kernels."""
    found_inf: torch.Tensor | None = None
    grad_scale: torch.Tensor | None = None
    """As for torch's fused optimizers; only if `skips_on_device`."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
    ):
        super().__init__(groups, dict(lr=lr, betas=betas, eps=eps, weight_decay=0.0, fused=True))
        self._blocks: dict[torch.Tensor, scaled_adam_triton.Blocks] = {}
        self._sizes: dict[torch.Tensor, torch.Tensor] = {}

    def set_layouts(
        self, layouts: Mapping[torch.Tensor, FlatLayout], all_reduce: AllReduce | None
    ) -> None:
        super().set_layouts(layouts, all_reduce)
        self._blocks, self._sizes = {}, {}

    @property
    def skips_on_device(self) -> bool:
        """Whether a step takes `found_inf`, so that the host need not wait for it."""
        weights = [weight for group in self.param_groups for weight in group["params"]]
        return scaled_adam_triton.is_usable(weights)

    @abstractmethod
    def is_scaled(self, group: dict[str, Any]) -> bool:
        """Whether the updates of a group are scaled at all."""

    @abstractmethod
    def sums(self, values: Values, update: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Two sums over the values, (2,) in float64, on which the factor depends."""

    @abstractmethod
    def factors(self, sums: torch.Tensor, numels: torch.Tensor) -> torch.Tensor:
        """The factors of parameters, (n,), from their sums, (n, 2), and sizes, (n,)."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            values = [count_update(self.state[weight], weight) for weight in weights]
            if not self.is_scaled(group):
                guard = dict(grad_scale=self.grad_scale, found_inf=self.found_inf)
                adamw_(values, [value.weight for value in values], group, **guard)
            elif scaled_adam_triton.is_usable(weights):
                self._scaled_by_kernels(weights, values, group)
            else:
                self._scaled(weights, values, group)
            if self.found_inf is not None:
                for each in values:
                    each.step.sub_(self.found_inf)

    def _scaled(
        self, weights: Sequence[torch.Tensor], values: Sequence[Values], group: dict[str, Any]
    ) -> None:
        pieces, sizes = self._pieces(weights, values), self._param_sizes(weights)
        cut = [piece for piece in pieces if not piece.is_whole]
        sums = torch.stack([torch.zeros_like(sizes)] * 2, 1)
        for piece in cut:
            sums[piece.param] = self._measure(piece.values, group)
        if self._all_reduce:
            sums = self._all_reduce(sums)
        for piece in pieces:
            if piece.is_whole:
                sums[piece.param] = self._measure(piece.values, group)
                own = slice(piece.param, piece.param + 1)
                _apply(piece.values, self.factors(sums[own], sizes[own])[0], group)
        factors = self.factors(sums, sizes)
        for piece in cut:
            _apply(piece.values, factors[piece.param], group)

    def _scaled_by_kernels(
        self, weights: Sequence[torch.Tensor], values: Sequence[Values], group: dict[str, Any]
    ) -> None:
        guard = None
        if self.found_inf is not None and self.grad_scale is not None:
            guard = Guard(found_inf=self.found_inf, grad_scale=self.grad_scale)
        blocks = [self._blocks_of(weight) for weight in weights]
        both = list(zip(blocks, values, strict=True))
        measured = [
            scaled_adam_triton.measure(*each, group, uses_norms=self.uses_norms, guard=guard)
            for each in both
        ]
        sums = torch.cat(measured)
        if self._all_reduce:
            sums = self._all_reduce(sums)
        factors = self.factors(sums, self._param_sizes(weights)).float()
        for each, own in zip(both, factors.split([len(x) for x in measured]), strict=True):
            scaled_adam_triton.apply(*each, own, group["lr"], guard)

    def _blocks_of(self, weight: torch.Tensor) -> scaled_adam_triton.Blocks:
        if weight not in self._blocks:
            layout = self.layout(weight)
            self._blocks[weight] = scaled_adam_triton.blocks_of(layout, weight.device)
        return self._blocks[weight]

    def _param_sizes(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sizes of all parameters, (n,), also of those on other processes."""
        for weight in weights:
            if weight not in self._sizes:
                sizes = [param.shape.numel() for param in self.layout(weight).params]
                values = torch.tensor(sizes, dtype=torch.float64, device=weight.device)
                self._sizes[weight] = values
        return torch.cat([self._sizes[weight] for weight in weights])

    def _pieces(self, weights: Sequence[torch.Tensor], values: Sequence[Values]) -> list[_Piece]:
        """The pieces on this process."""
        pieces: list[_Piece] = []
        first = 0
        for weight, flat in zip(weights, values, strict=True):
            layout = self.layout(weight)
            for piece in layout.pieces:
                numel = layout.params[piece.param].shape.numel()
                pieces.append(_Piece(flat.part(piece.inside), first + piece.param, numel))
            first += len(layout.params)
        return pieces

    def _measure(self, values: Values, group: dict[str, Any]) -> torch.Tensor:
        """Update the moments, write the negative update in place of the gradient, and return its
        sums, (2,)."""
        sums, scratch = [], None
        for chunk in values.chunks():
            scratch = torch.empty_like(chunk.weight) if scratch is None else scratch
            update = scratch[: len(chunk.weight)].copy_(chunk.weight)
            # With a rate of 1 and this decay, what remains of the weight is its own decay.
            adamw_([chunk], [update], group, lr=1.0, weight_decay=1.0 + group["weight_decay"])
            sums.append(self.sums(chunk, update, group))
            chunk.gradient.copy_(update)
        return torch.stack(sums).sum(0)


def _apply(values: Values, factor: torch.Tensor, group: dict[str, Any]) -> None:
    """The gradient's memory has the negative update."""
    update = values.gradient
    values.weight.addcmul_(update, factor.to(update.dtype), value=group["lr"])


def count_update(state: dict[str, Any], weight: torch.Tensor) -> Values:
    """Adam's values of a tensor, flattened, with moments of zero before its first update; counts
    the one that follows."""
    if not state:
        state["step"] = torch.zeros((), device=weight.device)
        state["exp_avg"] = torch.zeros_like(weight, requires_grad=False)
        state["exp_avg_sq"] = torch.zeros_like(weight, requires_grad=False)
    state["step"] += 1
    assert weight.grad is not None
    return Values(
        weight.detach().view(-1),
        weight.grad.view(-1),
        state["exp_avg"].view(-1),
        state["exp_avg_sq"].view(-1),
        state["step"],
    )


def adamw_(
    values: Sequence[Values],
    weights: Sequence[torch.Tensor],
    group: dict[str, Any],
    **instead: Any,
) -> None:
    """Torch's fused AdamW with the gradients and moments of `values`, in place in `weights`.
    `instead`: other settings than the group's."""
    settings = {"lr": group["lr"], "weight_decay": group["weight_decay"], **instead}
    beta1, beta2 = group["betas"]
    torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
        list(weights),
        [value.gradient for value in values],
        [value.mean for value in values],
        [value.square for value in values],
        [],
        [value.step for value in values],
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
        **settings,
    )


class Lamb(ScaledAdam):
    """LAMB (You et al. 2020, algorithm 2): AdamW's update of each matrix, scaled to the matrix's
    norm.

    Biases, LayerNorm and heads, which have no weight decay, take Adam's step unscaled, as in the
    authors' code.
    """

    uses_norms = True

    def is_scaled(self, group: dict[str, Any]) -> bool:
        return group["decays"]

    def sums(self, values: Values, update: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Squares of the weights and of the update."""
        squares = torch.dot(values.weight, values.weight), torch.dot(update, update)
        return torch.stack(squares).double()

    def factors(self, sums: torch.Tensor, numels: torch.Tensor) -> torch.Tensor:
        """|weights| / |update|; 1 if either is 0."""
        weights, updates = sums.unbind(1)
        usable = (weights > 0) & (updates > 0)
        return torch.where(usable, (weights / updates).sqrt(), 1.0)


class StableAdamW(ScaledAdam):
    """StableAdamW (Wortsman et al. 2023, algorithm 2), as ModernBERT and Ettin use it.

    A parameter whose gradient is much larger than its running mean square has a smaller learning
    rate: divided by the root mean square of gradient / root of the mean square, where that is above
    1. It replaces clipping by the global gradient norm.
    """

    uses_norms = False

    def is_scaled(self, group: dict[str, Any]) -> bool:
        return True

    def sums(self, values: Values, update: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Squares of the gradient, each divided by its mean square; 0."""
        correction = 1 - torch.pow(group["betas"][1], values.step.double())
        least = (group["eps"] ** 2 * correction).to(values.square.dtype)
        ratio = values.gradient / torch.maximum(values.square, least)
        total = torch.dot(ratio, values.gradient).double() * correction
        return torch.stack([total, torch.zeros_like(total)])

    def factors(self, sums: torch.Tensor, numels: torch.Tensor) -> torch.Tensor:
        rms = (sums[:, 0] / numels).sqrt()
        return 1 / rms.clamp(min=1.0)
