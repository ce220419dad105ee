"""LoRA: trains low-rank changes of frozen matrices (Hu et al. 2021), with peft's layers.

    y = W x + scale * B A dropout(x)      A: (rank, in), B: (out, rank), scale: alpha / rank

With DoRA (Liu et al. 2024) each row of W + scale * B A is divided by its norm and multiplied by a
trained magnitude (out,), which starts as the norm of the row of W.

Query, key and value are one matrix in the encoder and three in transformers, and each of the three
has an A of its own. So `add_lora` first splits that matrix; `merged` adds B A to W and joins the
three again: what is written to weights/ and hf/ has the names and shapes of any other model.

The dropout of A's input is that of model/ops/dropout.py: its masks depend on a token's place,
not on the process that computes it, nor on what was drawn before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import nn

from palm_ds.common.errors import UserError, suggest
from palm_ds.common.rng import derive_key
from palm_ds.common.settings import Rate, Settings
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.config.meta import on_meta
from palm_ds.model.encoder.encoder import ROLES, Encoder, Matrix
from palm_ds.model.multi_task_model import Model
from palm_ds.model.ops.dropout import dropout

if TYPE_CHECKING:
    from peft import LoraConfig

_PARTS = ("query", "key", "value")
_FIRST_SITE = 16  # of LoRA's dropouts in a layer, above those of the layer itself
_SPLIT = re.compile(r"(.+\.qkv)\.(query|key|value)\.(weight|bias)")
_ADAPTER = re.compile(r"(.+)\.lora_(A|B|magnitude_vector)\.default\.weight")


@dataclass(frozen=True, kw_only=True)
class LoraSettings(Settings):
    """LoRA: which matrices get an adapter, and its size."""

    rank: PositiveInt = 8
    """Rank of the adapters."""
    alpha: PositiveFloat = 16.0
    """The output of an adapter is scaled by alpha / rank."""
    dropout: Rate = 0.0
    """Dropout on the input of the adapters."""
    targets: tuple[str, ...] | str = ("query", "value")
    """The matrices of every layer that get one: some of query, key, value, attention_output,
    intermediate and output (transformers' names), or `all`."""
    rank_stabilized: bool = False
    """Scale by alpha / sqrt(rank) instead (rsLoRA, Kalajdzievski 2023)."""
    dora: bool = False
    """Also train the magnitude of each row of these matrices (DoRA, Liu et al. 2024)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.target_names:
            raise UserError(f"lora.targets: empty; name some of {', '.join(ROLES)}, or `all`")
        for name in self.target_names:
            if name not in ROLES:
                raise UserError(f"lora.targets: no {name!r}{suggest(name, [*ROLES, 'all'])}")

    @property
    def target_names(self) -> tuple[str, ...]:
        """The targets by name, in the order of ROLES."""
        if self.targets == "all":
            return ROLES
        given = [self.targets] if isinstance(self.targets, str) else self.targets
        return (*(name for name in ROLES if name in given), *(set(given) - set(ROLES)))

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilized else self.rank)


def peft_config(settings: LoraSettings, **more: Any) -> LoraConfig:
    """peft's form of the settings. Raises UserError if peft is not installed."""
    try:
        from peft import LoraConfig
    except ImportError:
        raise UserError("lora: needs peft: pip install 'palm_ds[lora]'") from None
    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # peft only divides it
        lora_dropout=settings.dropout,
        use_rslora=settings.rank_stabilized,
        use_dora=settings.dora,
        **more,
    )


# ---- training ----


class SplitLinear(nn.Module):
    """The linear map of query, key and value as three, (..., hidden) -> (..., all of them).
    `shares`: of the rows that each has."""

    def __init__(self, joined: nn.Linear, shares: Sequence[int]):
        super().__init__()
        biased, unit = joined.bias is not None, joined.out_features // sum(shares)
        start = 0
        for name, share in zip(_PARTS, shares, strict=True):
            rows = slice(start, start := start + unit * share)
            with on_meta():
                part = nn.Linear(joined.in_features, unit * share, bias=biased)
            part.weight = nn.Parameter(joined.weight[rows].detach().clone())
            if biased:
                part.bias = nn.Parameter(joined.bias[rows].detach().clone())
            self.add_module(name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([getattr(self, name)(x) for name in _PARTS], dim=-1)


class LoraDropout(nn.Module):
    """Dropout of a layer's inputs, with the keys that the layer has in this forward pass; torch's
    own for a layer without keys."""

    def __init__(self, layer: nn.Module, site: int, rate: float):
        super().__init__()
        self.rate, self._site = rate, site
        self._layers = (layer,)  # in a tuple, or it would become a submodule

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = getattr(self._layers[0], "reads_distances", False)
        rate = self.rate if self.training and not whole else 0.0
        keys_at = getattr(self._layers[0], "keys_at", None)
        return dropout(x, rate, keys_at(self._site, x) if rate and keys_at else None)


def lora_modules(matrices: Iterable[Matrix]) -> dict[str, str]:
    """{role: the module of a layer that LoRA changes}"""
    return {
        role: matrix.path if len(matrix.roles) == 1 else f"{matrix.path}.{role}"
        for matrix in matrices
        for role in matrix.roles
    }


def add_lora(model: Model, settings: LoraSettings, *, seed: int) -> None:
    """Freeze the encoder and add trainable A and B to it, in place. B starts at 0 and A as in peft,
    by the seed: the outputs stay. Heads, and the pooler if one of them reads it, remain trainable.
    Call it once the model has the weights to start from."""
    encoder = model.backbone
    modules = _targets(encoder, settings)
    config = peft_config(settings, target_modules=list(modules.values()))
    from peft import inject_adapter_in_model

    torch.manual_seed(derive_key(seed, "lora") >> 1)
    inject_adapter_in_model(config, encoder)
    encoder.pooler.requires_grad_(model.pooled)
    if settings.dropout:
        changed: list[Any] = [
            each.get_submodule(module) for each in encoder.layers for module in modules.values()
        ]
        encoder.adapter_columns = max(module.in_features for module in changed)
        for layer in encoder.layers:
            _use_keys(layer, modules, settings.dropout)


def check_targets(encoder: type[Encoder], config: EncoderConfig, settings: LoraSettings) -> None:
    """Raises UserError for matrices that such an encoder does not have."""
    known = lora_modules(encoder.matrices(config))
    if not known:
        raise UserError(f"lora: backbone.kind is {config.kind}, which has no matrices for it")
    for name in settings.target_names if settings.targets != "all" else ():
        if name not in known:
            raise UserError(
                f"lora.targets: backbone.kind {config.kind} has no {name!r}{suggest(name, known)}"
            )


def _targets(encoder: Encoder, settings: LoraSettings) -> dict[str, str]:
    """{target: the module of each layer that it is}; stacked matrices are split first."""
    matrices = encoder.matrices(encoder.config)
    check_targets(type(encoder), encoder.config, settings)
    for number, layer in enumerate(encoder.layers):
        for matrix in matrices:
            if set(matrix.roles).isdisjoint(settings.target_names):
                continue
            joined = dict(layer.named_modules()).get(matrix.path)
            if not isinstance(joined, nn.Linear):
                raise UserError(
                    f"lora: {type(encoder).__name__}: layer {number} has no linear map "
                    f"{matrix.path}; its `matrices` says so"
                )
            if len(matrix.roles) > 1:
                layer.set_submodule(matrix.path, SplitLinear(joined, matrix.stacked))
    return {x: y for x, y in lora_modules(matrices).items() if x in settings.target_names}


def _use_keys(layer: nn.Module, modules: Mapping[str, str], rate: float) -> None:
    """Replace peft's dropouts, which draw from the generator of the process."""
    for site, name in enumerate(ROLES, _FIRST_SITE):
        if name in modules:
            dropouts = layer.get_submodule(f"{modules[name]}.lora_dropout")
            dropouts.add_module("default", LoraDropout(layer, site, rate))


# ---- weights ----


class LoraPart(NamedTuple):
    """The rows of a merged parameter: those of `base`, changed by the product of `up` and `down`,
    and with the norms of `magnitude`, where these have names."""

    base: str
    down: str = ""
    up: str = ""
    magnitude: str = ""


def merged_parts(names: Iterable[str]) -> dict[str, list[LoraPart]]:
    """{parameter of the merged model: the parts whose rows it has}, from the names of the
    parameters of a model with LoRA."""
    merged: dict[str, list[LoraPart]] = {}
    known = dict.fromkeys(names)
    for name in sorted(known, key=_place):  # a checkpoint lists them in another order
        if _ADAPTER.fullmatch(name):
            continue
        whole, stem = name.replace(".base_layer.", "."), name.removesuffix(".base_layer.weight")
        down = f"{stem}.lora_A.default.weight"
        magnitude = down.replace(".lora_A.", ".lora_magnitude_vector.")
        own = magnitude if magnitude in known else ""
        part = LoraPart(name, down, down.replace(".lora_A.", ".lora_B."), own)
        split = _SPLIT.fullmatch(whole)
        joined = f"{split[1]}.{split[3]}" if split else whole
        merged.setdefault(joined, []).append(part if down in known else LoraPart(name))
    return merged


def _place(name: str) -> int:
    """The place of a part among those of query, key and value; 0 for any other parameter."""
    split = _SPLIT.fullmatch(name.replace(".base_layer.", "."))
    return _PARTS.index(split[2]) if split else 0


def merged_values(
    parts: Iterable[LoraPart], scale: float, read: Callable[[str], torch.Tensor]
) -> torch.Tensor:
    """A parameter of the merged model; `read(name)` returns one of the model with LoRA."""
    rows = []
    for part in parts:
        base = read(part.base)
        changed = base + scale * (read(part.up) @ read(part.down)) if part.down else base
        if part.magnitude:
            norms = torch.linalg.norm(changed, dim=1, keepdim=True)
            changed = changed * (read(part.magnitude)[:, None] / norms)
        rows.append(changed)
    return torch.cat(rows) if len(rows) > 1 else rows[0]


def merged(
    state: Mapping[str, torch.Tensor], settings: LoraSettings | None
) -> Mapping[str, torch.Tensor]:
    """The weights of the model without LoRA that computes the same; the state itself without
    settings."""
    if settings is None:
        return state
    return {
        name: merged_values(parts, settings.scale, state.__getitem__)
        for name, parts in merged_parts(state).items()
    }


def adapter_of(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The A, B and magnitudes of a model's weights."""
    return {name: tensor for name, tensor in state.items() if _ADAPTER.fullmatch(name)}
