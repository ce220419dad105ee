"""Merges checkpoints of one shape into a new one.

    sources ──open_model──> CheckpointContents ... ──MERGES[method]──> CheckpointContents ──> target

    mean    weighted arithmetic mean (a model soup: Wortsman et al. 2022)
    ema     exponential moving average in the order of the sources, the oldest first
    slerp   spherical interpolation between two, tensor by tensor
    ties    differences from a common ancestor: the largest ones of each, and of those the mean of
            the ones that agree with the elected sign (Yadav et al. 2023)

Tensors are merged one by one in fp64, so memory does not grow with the number of sources. A Hugging
Face folder is written if the first source is one, otherwise a weights/ folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import yaml
from pydantic import FiniteFloat, NonNegativeFloat

from palm_ds.common.atomic import check_new_folder, write_new_folder
from palm_ds.common.errors import UserError
from palm_ds.common.files import sha256_of_file
from palm_ds.common.messages import counted
from palm_ds.common.settings import PositiveShare, Rate, Settings
from palm_ds.common.version import __version__
from palm_ds.runtime.checkpoint import checkpoint
from palm_ds.text.tokenizer import load_tokenizer
from palm_ds.weights.convert.resize import hf_writer
from palm_ds.weights.formats import native
from palm_ds.weights.formats.contents import CheckpointContents, TensorEntry
from palm_ds.weights.formats.huggingface import read as huggingface
from palm_ds.weights.formats.huggingface.sentence_transformers import modules_of
from palm_ds.weights.model_folder import open_model

Method = Literal["mean", "ema", "slerp", "ties"]
Tensors = Sequence[torch.Tensor]
_OF_METHOD: Mapping[str, Method] = {"decay": "ema", "density": "ties", "scale": "ties"}
"""Settings that one method alone has."""
_PARALLEL = 1e-6
"""Slerp of vectors whose angle is smaller than this (radians) is linear."""


@dataclass(frozen=True, kw_only=True)
class MergeOptions(Settings):
    """Settings for merging checkpoints."""

    method: Method = "mean"
    """mean, ema, slerp or ties."""
    weights: tuple[NonNegativeFloat, ...] = ()
    """mean, ties: the weight of each source, relative to their sum (equal ones). slerp: the
    distances from 0 to 1 of the result from the second and the first source."""
    decay: Rate = 0.9
    """ema: weight of what was merged before, when the next source is added."""
    base: Path | None = None
    """ties: the checkpoint that all sources were trained from."""
    density: PositiveShare = 0.2
    """ties: part of each difference that is kept, its largest values."""
    scale: FiniteFloat = 1.0
    """ties: factor of the merged difference when it is added to the base."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights and not sum(self.weights):
            raise UserError("weights: all are 0; at least one must be larger")
        if (self.method == "ties") != (self.base is not None):
            raise UserError(
                "base: ties needs the checkpoint that all sources were trained from"
                if self.method == "ties"
                else f"base: is for ties, not {self.method}; remove it"
            )
        if self.weights and self.method == "ema":
            raise UserError("weights: are not for ema, which has `decay`; remove them")
        for name, method in _OF_METHOD.items():
            if getattr(self, name) != getattr(type(self), name) and self.method != method:
                raise UserError(f"{name}: is for {method}, not {self.method}; remove it")

    def check(self, sources: int) -> None:
        """Raises UserError if they do not fit the number of sources."""
        if sources < 2:
            raise UserError(
                f"nothing to merge: {counted(sources, 'checkpoint')}; give at least two"
            )
        if self.method == "slerp" and sources != 2:
            raise UserError(f"slerp interpolates between two checkpoints, got {sources}")
        if self.weights and len(self.weights) != sources:
            raise UserError(
                f"weights: {counted(len(self.weights), 'number')} for {sources} checkpoints; give "
                "one for each"
            )

    def shares(self, sources: int) -> list[float]:
        """The weights of the sources, which add up to 1."""
        weights = self.weights or (1.0,) * sources
        return [weight / sum(weights) for weight in weights]


def sources_of(paths: Sequence[Path], last: int = 0, best: int = 0) -> list[Path]:
    """The checkpoints to merge, the oldest first: the paths, or those that a run has kept if its
    folder is the only path. `last`: only this many of the newest. `best`: only this many of those
    that the run evaluated as best."""
    for name, number in (("last", last), ("best", best)):
        if number < 0:
            raise UserError(f"{name}: expected a number of checkpoints, got {number}")
    if last and best:
        raise UserError("last, best: both choose among checkpoints; set only one of them")
    if len(paths) > 1:
        if name := "last" if last else "best" if best else "":
            raise UserError(f"{name}: chooses among the checkpoints of one run; give one folder")
        return list(paths)
    folder = paths[0] / "checkpoints" if (paths[0] / "checkpoints").is_dir() else paths[0]
    steps = sorted(checkpoint.steps_in(folder))
    if not steps:
        raise UserError(
            f"{paths[0]}: has no checkpoints to merge; name a run that has some, or two or more "
            "folders of weights"
        )
    if best:
        steps = sorted(_best_steps(folder, steps)[:best])
    return [folder / checkpoint.folder_name(step) for step in steps[-last:]]


def _best_steps(folder: Path, steps: Sequence[int]) -> list[int]:
    """Those of the steps, ascending, that were evaluated, the best first, as the newest checkpoint
    has recorded."""
    newest = folder / checkpoint.folder_name(steps[-1])
    state = checkpoint.open_published(newest, hashes=False).state
    values = {int(step): value for step, value in state.get("best", {}).get("values", {}).items()}
    if not (best := checkpoint.best_of(steps, values)):
        raise UserError(
            f"best: none of the checkpoints in {folder} was evaluated; a run evaluates them if "
            "`evaluate.every` divides `save.every` (and keeps the best with `save.best`)"
        )
    return best


def merge_checkpoints(sources: Sequence[Path], target: Path, wanted: MergeOptions) -> list[str]:
    """Merge checkpoints of any format into the new folder `target`; returns a line for each source,
    and one for each remark. If it raises UserError, nothing is written."""
    wanted.check(len(sources))
    check_new_folder(target)
    opened = [open_model(source) for source in sources]
    base = open_model(wanted.base) if wanted.base else None
    first = opened[0]
    for other in [*opened[1:], *([base] if base else [])]:
        _check_alike(first, other)
    for other in opened[1:]:
        _check_same_use(first, other)
    entries = {name: _merged(name, opened, base, wanted) for name in first.entries}
    made = {
        "method": wanted.method,
        "sources": [_provenance(each) for each in opened],
        **({"base": _provenance(base)} if base else {}),
        **_settings(wanted, len(sources)),
    }
    contents = replace(first, entries=entries)
    said = [f"merged: {each.path}" for each in opened]
    if huggingface.recognizes(first.path):
        tokenizer = load_tokenizer(first.tokenizer) if first.tokenizer else None
        write = hf_writer(contents, tokenizer, said, _card(made))
    else:
        about = {"palm_ds": __version__, "merged": made}
        write = partial(native.write, contents, **about)
    write_new_folder(target, write)
    return [*said, f"written to {target}"]


def _card(made: Mapping[str, object]) -> str:
    """README.md of a merged Hugging Face folder."""
    facts = yaml.safe_dump(dict(made), sort_keys=False)
    return f"---\ntags: [merge]\n---\n\nMerged by palm_ds {__version__}:\n\n```yaml\n{facts}```\n"


def _settings(wanted: MergeOptions, sources: int) -> dict[str, object]:
    """The settings that the method has."""
    of = [name for name, method in _OF_METHOD.items() if method == wanted.method]
    values = {name: getattr(wanted, name) for name in of}
    return values if wanted.method == "ema" else {"weights": wanted.shares(sources), **values}


def _provenance(contents: CheckpointContents) -> dict[str, object]:
    """The origin of weights, without the folder names of this machine."""
    return {"name": contents.path.name, "format": contents.format}


def _check_alike(one: CheckpointContents, other: CheckpointContents) -> None:
    """Raises UserError naming the first difference of two checkpoints that cannot be merged."""
    for name in one.entries.keys() ^ other.entries.keys():
        lacking = other if name in one.entries else one
        raise UserError(f"{lacking.path}: has no tensor {name}, which the other checkpoints have")
    for name, entry in one.entries.items():
        if entry.shape != (shape := other.entries[name].shape):
            raise UserError(
                f"{other.path}: {name} is {list(shape)}, but {list(entry.shape)} in {one.path}"
            )
    mine, its = asdict(one.config), asdict(other.config)
    for key in mine:
        if mine[key] != its[key] and key not in ("dropout", "attention_dropout", "init_range"):
            raise UserError(f"{other.path}: {key} is {its[key]}, but {mine[key]} in {one.path}")
    for name, head in one.heads.items():
        if head.outputs.averaged != other.heads[name].outputs.averaged:
            raise UserError(
                f"{other.path}, {one.path}: head {name} was trained with `pooling: mean` in one, "
                "with `pooling: pooler` in the other"
            )
        if head.outputs.labels != (labels := other.heads[name].outputs.labels):
            raise UserError(
                f"{other.path}: the classes of {name} are {list(labels)}, but "
                f"{list(head.outputs.labels)} in {one.path}"
            )
    tokenizers = [
        load_tokenizer(side.tokenizer).fingerprint for side in (one, other) if side.tokenizer
    ]
    if len(set(tokenizers)) > 1:
        raise UserError(f"{other.path}: its tokenizer differs from that of {one.path}")


def _check_same_use(one: CheckpointContents, other: CheckpointContents) -> None:
    """Raises UserError naming the first difference in the meaning of two checkpoints' outputs,
    since the merged one has the meaning of the first. The base of `ties` may differ: it may be
    untrained."""
    for name, head in one.heads.items():
        mine, its = asdict(head.outputs), asdict(other.heads[name].outputs)
        if key := next((key for key in mine if mine[key] != its[key]), ""):
            raise UserError(
                f"{other.path}: {key} of head {name} is {its[key]!r}, but {mine[key]!r} in "
                f"{one.path}"
            )
    if one.config.task_types and one.task_ids != other.task_ids:
        raise UserError(
            f"{other.path}: the rows of the task embedding are {dict(other.task_ids)}, but "
            f"{dict(one.task_ids)} in {one.path}"
        )
    mine, its = asdict(modules_of(one)), asdict(modules_of(other))
    if key := next((key for key in mine if mine[key] != its[key]), ""):
        raise UserError(
            f"{other.path}: turns texts into vectors with {key} {its[key]!r}, but {one.path} with "
            f"{mine[key]!r}"
        )
    for name in sorted({*one.extras.files} | {*other.extras.files}):
        if Path(name).suffix == ".json":
            continue
        files = [each.extras.files.get(name) for each in (one, other)]
        if len({sha256_of_file(file) for file in files if file}) != 1 or None in files:
            raise UserError(
                f"{other.path}: {name} differs from that in {one.path}; the modules after the "
                "encoder are copied, not merged, so they must be equal"
            )


def _merged(
    name: str,
    opened: Sequence[CheckpointContents],
    base: CheckpointContents | None,
    wanted: MergeOptions,
) -> TensorEntry:
    """A tensor that is merged when it is read, in the dtype of the first source."""
    entry = opened[0].entries[name]

    def read() -> torch.Tensor:
        first = entry.read()
        values = [first, *(each.entries[name].read() for each in opened[1:])]
        origin = base.entries[name].read().double() if base else None
        merged = _MERGES[wanted.method]([value.double() for value in values], origin, wanted)
        return merged.to(first.dtype)

    return replace(entry, read=read)


def mean(values: Tensors, base: torch.Tensor | None, wanted: MergeOptions) -> torch.Tensor:
    """The weighted mean of tensors (any shape)."""
    shares = wanted.shares(len(values))
    return torch.stack([share * value for share, value in zip(shares, values, strict=True)]).sum(0)


def ema(values: Tensors, base: torch.Tensor | None, wanted: MergeOptions) -> torch.Tensor:
    """The exponential moving average of tensors in their order."""
    average = values[0]
    for value in values[1:]:
        average = wanted.decay * average + (1 - wanted.decay) * value
    return average


def slerp(values: Tensors, base: torch.Tensor | None, wanted: MergeOptions) -> torch.Tensor:
    """Spherical interpolation between two tensors, as vectors (Shoemake 1985): along the arc from
    the first to the second, by the second one's share. Linear where they are parallel."""
    one, other = values
    share = wanted.shares(2)[1]
    norms = one.norm() * other.norm()
    cosine = (one * other).sum() / norms if norms > 0 else torch.ones((), dtype=one.dtype)
    angle = torch.arccos(cosine.clamp(-1, 1))
    if torch.sin(angle) < _PARALLEL:
        return (1 - share) * one + share * other
    near, far = torch.sin((1 - share) * angle), torch.sin(share * angle)
    return (near * one + far * other) / torch.sin(angle)


def ties(values: Tensors, base: torch.Tensor | None, wanted: MergeOptions) -> torch.Tensor:
    """TIES merging of one tensor: trim each difference from the base, elect the sign of every
    value by the weighted sum, and average those that have it (Yadav et al. 2023, section 3; they
    trim the model as a whole, this trims tensor by tensor)."""
    assert base is not None
    weights = torch.tensor(wanted.shares(len(values)), dtype=base.dtype)
    weights = weights.view(-1, *[1] * base.dim())
    changes = torch.stack([_largest(value - base, wanted.density) for value in values])
    sign = torch.sign((weights * changes).sum(0))
    agrees = (torch.sign(changes) == sign) & (changes != 0)
    total = (weights * agrees).sum(0)
    change = (weights * changes * agrees).sum(0) / torch.where(total > 0, total, 1.0)
    return base + wanted.scale * change


def _largest(change: torch.Tensor, density: float) -> torch.Tensor:
    """The change with all but the largest part of its values set to 0; of equal ones the first."""
    flat = change.flatten()
    kept = max(1, round(density * flat.numel()))
    order = torch.sort(flat.abs(), descending=True, stable=True).indices[:kept]
    out = torch.zeros_like(flat)
    out[order] = flat[order]
    return out.view_as(change)


_MERGES: Mapping[Method, Callable[[Tensors, torch.Tensor | None, MergeOptions], torch.Tensor]] = {
    "mean": mean,
    "ema": ema,
    "slerp": slerp,
    "ties": ties,
}
