"""Numbers of every tensor of a checkpoint, and how far those of another one of any format are.

Tensors have palm_ds's names and orientation, so that two formats of one model compare.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from palm_ds.common.messages import printable
from palm_ds.weights.formats.contents import CheckpointContents


@dataclass(frozen=True, kw_only=True)
class TensorNumbers:
    """A tensor: its L2 norm, extremes and values that are not finite; with another checkpoint the
    largest absolute difference and the norm of the difference as a share of its own norm."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    norm: float
    least: float
    most: float
    not_finite: int = 0
    difference: float | None = None
    relative: float | None = None
    remark: str = ""
    """Reason for having no difference."""

    def record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {key: value for key, value in asdict(self).items() if value not in (None, "")}


def numbers_of(
    contents: CheckpointContents, other: CheckpointContents | None = None
) -> Iterator[TensorNumbers]:
    """Numbers of each tensor, one in memory at a time; then those that only `other` has."""
    others = other.entries if other else {}
    for name, entry in contents.entries.items():
        tensor = entry.read()
        numbers = _numbers(name, tensor)
        if other and name not in others:
            yield replace(numbers, remark="only here")
        elif other and others[name].shape != entry.shape:
            yield replace(numbers, remark=f"other shape: {_shape(others[name].shape)}")
        elif other:
            largest, relative = _difference(tensor, others[name].read())
            yield replace(numbers, difference=largest, relative=relative)
        else:
            yield numbers
    for name, entry in others.items():
        if name not in contents.entries:
            yield replace(_numbers(name, entry.read()), remark="only there")


def _numbers(name: str, tensor: torch.Tensor) -> TensorNumbers:
    values = tensor.double()
    finite = values[values.isfinite()]
    least, most = (finite.min(), finite.max()) if len(finite) else (math.nan, math.nan)
    return TensorNumbers(
        name=name,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        norm=float(values.norm()),
        least=float(least),
        most=float(most),
        not_finite=values.numel() - finite.numel(),
    )


def _difference(one: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """(the largest absolute difference, the norm of the difference as a share of that of `one`)."""
    apart = one.double() - other.double()
    norm = float(one.double().norm())
    largest = float(apart.abs().max()) if apart.numel() else 0.0
    return largest, float(apart.norm()) / norm if norm else (math.inf if largest else 0.0)


# ---- display ----


def shown(
    every: Sequence[TensorNumbers], *, compared: bool, terminal: bool
) -> list[RenderableType]:
    """A table, elsewhere than in a terminal lines with tabs; and one line about the whole."""
    heads = ["tensor", "shape", "type", "norm"]
    heads += ["difference", "relative"] if compared else ["least", "most"]
    rows = [_cells(each, compared) for each in every]
    summary = [_summary(every)] if compared else []
    if not terminal:
        return [*("\t".join(row) for row in (heads, *rows)), *summary]
    table = Table(box=None, pad_edge=False)
    for number, head in enumerate(heads):
        table.add_column(
            head, overflow="fold", no_wrap=number > 0, justify="right" if number > 2 else "left"
        )
    for row in rows:
        table.add_row(*(escape(printable(cell)) for cell in row))
    return [table, *summary]


def _cells(each: TensorNumbers, compared: bool) -> list[str]:
    odd = f", {each.not_finite:,} not finite" if each.not_finite else ""
    cells = [each.name, _shape(each.shape), each.dtype + odd, f"{each.norm:.4g}"]
    if not compared:
        return [*cells, f"{each.least:.4g}", f"{each.most:.4g}"]
    if each.difference is None or each.relative is None:
        return [*cells, each.remark, ""]
    return [*cells, f"{each.difference:.3g}", f"{each.relative:.3g}"]


def _summary(every: Sequence[TensorNumbers]) -> str:
    both = [each for each in every if each.difference is not None]
    if not both:
        return "no tensor has the same name and shape in both"
    equal = sum(each.difference == 0 for each in both)
    alone = len(every) - len(both)
    line = f"{equal:,} of {len(both):,} tensors have equal values"
    if equal < len(both):
        furthest = max(both, key=_distance)
        line += f"; the largest difference is {furthest.difference:.3g}, in {furthest.name}"
    return line + (f"; {alone:,} cannot be compared" if alone else "")


def _distance(each: TensorNumbers) -> float:
    """For sorting: NaN is larger than any number."""
    difference = each.difference or 0.0
    return math.inf if math.isnan(difference) else difference


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a number"
