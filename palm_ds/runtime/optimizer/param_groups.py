"""Parameter groups: which parameters train, at what learning rate, and which decay.

Parameters are selected by patterns over their names, in which * matches anything, dots included:
"backbone.layers.0.*", "backbone.word.weight", "heads.*". AllBut(patterns) selects the others.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from palm_ds.common.errors import UserError, suggest

_LAYER = re.compile(r"backbone\.layers\.(\d+)\.")
_GENERATOR = ".generator."  # an encoder within a head


def match_patterns(patterns: Iterable[str], names: Sequence[str], where: str) -> set[str]:
    """The names that match any of the patterns. Raises UserError, starting with `where`, for a
    pattern without a match."""
    matched: set[str] = set()
    for pattern in patterns:
        matches = {name for name in names if fnmatchcase(name, pattern)}
        if not matches:
            raise UserError(f"{where}: no parameter matches {pattern!r}{_near(pattern, names)}")
        matched |= matches
    return matched


def _near(pattern: str, names: Sequence[str]) -> str:
    """Suggests similar names and modules, or the top modules if none is similar."""
    parts = [name.split(".") for name in names]
    modules = {".".join(part[:n]) + ".*" for part in parts for n in range(1, len(part))}
    near = difflib.get_close_matches(pattern, sorted({*names, *modules}), n=1)
    return suggest(pattern, near or {m for m in modules if m.count(".") <= 2})


@dataclass(frozen=True)
class AllBut:
    """All parameters but those that match one of the patterns."""

    patterns: tuple[str, ...]

    def __str__(self) -> str:
        return f"all but {', '.join(self.patterns)}"


Selection: TypeAlias = str | AllBut
"""Some parameters: those that match a pattern, or those that match none of several."""


def is_selected(name: str, selection: Selection) -> bool:
    """Whether a selection contains the parameter of this name."""
    if isinstance(selection, AllBut):
        return not any(fnmatchcase(name, pattern) for pattern in selection.patterns)
    return fnmatchcase(name, selection)


def selections_of(name: str, selections: Iterable[Selection]) -> tuple[str, ...]:
    """The selections, as text, that contain the parameter of this name; sorted."""
    return tuple(sorted({str(each) for each in selections if is_selected(name, each)}))


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Exclude the matching parameters from training: they need no gradient. Raises UserError if a
    pattern matches none, or if nothing is left to train."""
    parameters = dict(model.named_parameters())
    frozen = match_patterns(patterns, list(parameters), "optimizer.freeze")
    if frozen >= {name for name, parameter in parameters.items() if parameter.requires_grad}:
        raise UserError(
            f"optimizer.freeze: {list(patterns)} freezes every parameter; leave some to train"
        )
    for name in frozen:
        parameters[name].requires_grad_(False)


class EncoderNames(NamedTuple):
    """Meaning of the names of an encoder's parameters, `backbone.` left out."""

    above: tuple[str, ...] = ("pooler",)
    """Modules that come after the last layer."""
    stacked: Mapping[str, tuple[int, ...]] = MappingProxyType({"qkv": (1, 1, 1)})
    """{module of a layer: shares of the matrices that are stacked by rows in its weight}"""


USUAL_NAMES = EncoderNames()


def param_lr_scales(
    names: Sequence[str],
    layer_decay: float,
    scales: Mapping[str, float] | None = None,
    *,
    above: Sequence[str] = USUAL_NAMES.above,
) -> dict[str, float]:
    """{parameter: multiplier of the scheduled learning rate}, for all `names`.

    Layers are numbered as in ERNIE's code (ELECTRA's counts the pooler as one more): heads and
    pooler have 1, the top layer layer_decay, the one below its square, and so on; embeddings, with
    their LayerNorm, have layer_decay ** (layers + 1).

    `scales` {pattern: scale} override that; the last matching pattern wins. `above`: the
    encoder's modules after its last layer, which count as the pooler does.
    """
    layers = max((int(m[1]) + 1 for m in map(_LAYER.match, names) if m), default=0)
    if layer_decay < 1 and not layers:
        raise UserError("optimizer.layer_decay: the model has no layers named backbone.layers.0")
    factors = {name: layer_decay ** _depth(name, layers, above) for name in names}
    for pattern, scale in (scales or {}).items():
        factors |= dict.fromkeys(match_patterns([pattern], names, "learning rates"), scale)
    return factors


def _depth(name: str, layers: int, above: Sequence[str]) -> int:
    """Number of layers that a parameter is below the pooler; 0 for the pooler and the heads."""
    if match := _LAYER.match(name):
        return layers - int(match[1])
    over = name.startswith(tuple(f"backbone.{module}." for module in above))
    return layers + 1 if name.startswith("backbone.") and not over else 0


class _GroupKey(NamedTuple):
    """Parameters with the same key share a group; groups are ordered by it."""

    negative_update_count: int
    undecayed: bool
    negative_lr_scale: float
    freezable: tuple[str, ...]
    hidden: bool


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a matrix of one of the encoder's layers."""
    return parameter.ndim == 2 and _LAYER.match(name) is not None


def param_groups(
    model: nn.Module,
    weight_decay: float,
    update_counts: Mapping[str, int] | None = None,
    *,
    lr_scales: Mapping[str, float] | None = None,
    freezable: Iterable[Selection] = (),
    split_hidden: bool = False,
) -> list[dict[str, Any]]:
    """Two groups: parameters with weight decay (matrices and embeddings of the backbone and of
    generators) and without (biases, LayerNorm, heads). Frozen parameters are in none.

    A parameter shared by backbone and head appears once, as the backbone's. Heads do not decay, so
    that a head whose task has not started yet keeps its weights bit for bit.

    `update_counts`: updates that each parameter has had (0 by default). Parameters with different
    counts get groups of their own, since ZeRO keeps one step count per group.
    `lr_scales`: multipliers of the learning rate by name (1 by default); each gets its own groups.
    `freezable`: the parameters that some steps freeze; a group lists, as text, the selections that
    contain its own in "freezable".
    `split_hidden`: matrices of the encoder's layers get groups of their own, with a true "hidden".
    """
    groups: dict[_GroupKey, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decays = parameter.ndim >= 2 and (not name.startswith("heads.") or _GENERATOR in name)
        count, scale = (update_counts or {}).get(name, 0), (lr_scales or {}).get(name, 1.0)
        hidden = split_hidden and is_hidden_matrix(name, parameter)
        key = _GroupKey(-count, not decays, -scale, selections_of(name, freezable), hidden)
        groups.setdefault(key, []).append(parameter)
    return [
        {
            "params": groups[key],
            "weight_decay": 0.0 if key.undecayed else weight_decay,
            "decays": not key.undecayed,
            "lr_scale": -key.negative_lr_scale,
            "freezable": key.freezable,
            "hidden": key.hidden,
        }
        for key in sorted(groups)
    ]


def set_rates(
    groups: Iterable[dict[str, Any]], lr: float, weight_decay: float | None = None
) -> None:
    """Set each group's learning rate to `lr` times the group's own multiplier and, if given, the
    weight decay of those whose parameters have one."""
    for group in groups:
        group["lr"] = lr * group["lr_scale"]
        if weight_decay is not None and group["decays"]:
            group["weight_decay"] = weight_decay
