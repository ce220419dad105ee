"""Finds the tensors of a Paddle checkpoint, and their names in it.

A folder is searched in this order:

    params/, persistables/, ckpt.step1/   one file per variable
    __palmmodel__                         PALM: the same in a tar
    __params__, params, *.pdiparams       all variables in one file, without names
    *.pdparams                            pickles of fluid, dygraph and PaddleNLP
    model.safetensors                     PaddleNLP's names and orientation

and then its subfolder `params`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from palm_ds.common.errors import UserError
from palm_ds.weights.formats.contents import TensorEntry
from palm_ds.weights.formats.paddle import variable_files
from palm_ds.weights.formats.paddle.names import NAMING_SCHEMES, STATIC, combined_names
from palm_ds.weights.formats.paddle.pdparams import read_pickle
from palm_ds.weights.formats.tensor_files import (
    SAFETENSORS,
    open_safetensors,
    open_tensors,
    read_json,
)

_USUAL_PICKLES = ("model_state.pdparams", "saved_weights.pdparams")
_COMBINED = ("__params__", "params")
_LAYOUTS = {
    "folder": "one file per variable",
    "archive": "in PALM's archive",
    "combined": "all variables in one file",
    "pickle": ".pdparams",
    "safetensors": "safetensors in Paddle's orientation",
}


@dataclass(frozen=True)
class PaddleFiles:
    """Location of the tensors, and their layout."""

    layout: str
    path: Path

    @property
    def folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    def __str__(self) -> str:
        return _LAYOUTS[self.layout]


def find(path: Path) -> PaddleFiles | None:
    """The checkpoint in a folder or file; None if there is none. Never raises."""
    try:
        return _of_folder(path) if path.is_dir() else _of_file(path)
    except (OSError, UserError):
        return None


def check_alone(source: PaddleFiles, path: Path) -> None:
    """Raises UserError if a folder has several pickles and none has a usual name."""
    if source.layout == "pickle" and path.is_dir() and source.path.name not in _USUAL_PICKLES:
        names = sorted(file.name for file in source.folder.glob("*.pdparams"))
        if len(names) > 1:
            raise UserError(f"{path}: has several files ({', '.join(names[:4])}); give one of them")


def _of_file(path: Path) -> PaddleFiles | None:
    if not path.is_file():
        return None
    if path.name == variable_files.PALM_ARCHIVE:
        return PaddleFiles("archive", path)
    if path.suffix == ".pdparams":
        return PaddleFiles("pickle", path)
    if path.suffix == ".safetensors":
        return PaddleFiles("safetensors", path) if _nlp_names(open_safetensors(path)) else None
    return PaddleFiles("combined", path) if variable_files.is_variables(path) else None


def _of_folder(path: Path) -> PaddleFiles | None:
    names = {entry.name for entry in path.iterdir() if entry.is_file()}
    if _has_variables(names):
        return PaddleFiles("folder", path)
    pickles = [name for name in _USUAL_PICKLES if name in names]
    pickles += sorted(name for name in names if name.endswith(".pdparams"))
    lone = sorted(name for name in names if name.endswith(".pdiparams"))
    for name in (variable_files.PALM_ARCHIVE, *_COMBINED, *lone, *pickles):
        if name in names and (source := _of_file(path / name)):
            return source
    listed = f"{SAFETENSORS}.index.json"
    if SAFETENSORS in names and (source := _of_file(path / SAFETENSORS)):
        return source
    if listed in names and _nlp_names(read_json(path / listed).get("weight_map", {})):
        return PaddleFiles("safetensors", path / listed)
    return _of_folder(path / "params") if (path / "params").is_dir() else None


def _has_variables(names: set[str]) -> bool:
    return any(name == STATIC.word or name.endswith("_" + STATIC.word) for name in names)


def _nlp_names(names: Iterable[object]) -> bool:
    """Whether the names are PaddleNLP's: only its layers are called this."""
    ends = ("encoder.layers.0.linear1.weight", "embeddings.layer_norm.weight")
    listed = names if isinstance(names, Mapping) else {}
    return all(any(str(name).endswith(end) for name in listed) for end in ends)


def tensors(
    source: PaddleFiles, values: Mapping[str, Any], names: Sequence[str]
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """({Paddle name: entry in Paddle's orientation}, {name: type} of values that are not tensors).

    `names` are those of a combined file's variables; by default the usual ones for the `values` of
    the config are tried.
    """
    if source.layout == "safetensors":
        listed = source.path.suffix == ".json"
        return (open_tensors(source.folder) if listed else open_safetensors(source.path)), {}
    others: dict[str, str] = {}
    if source.layout == "pickle":
        pickled = read_pickle(source.path)
        named, others = _by_known_names(pickled.tensors, pickled.parameter_names), pickled.others
    elif source.layout == "archive":
        named = variable_files.read_archive(source.path)
    elif source.layout == "combined":
        stored = variable_files.read_combined(source.path)
        named = dict(zip(_combined(stored, source.path, values, names), stored, strict=True))
    else:
        named = variable_files.read_folder(source.path)
    return {name: _entry(name, stored) for name, stored in named.items()}, others


def _by_known_names(
    variables: dict[str, variable_files.StoredVariable], parameter_names: dict[str, str]
) -> dict[str, variable_files.StoredVariable]:
    """Tensors by parameter name if a custom model gave them unknown structured names and the file
    has the table of both."""
    known = any(name.endswith(scheme.word) for name in variables for scheme in NAMING_SCHEMES)
    if known or not any(name.endswith(STATIC.word) for name in parameter_names.values()):
        return variables
    return {parameter_names.get(name, name): stored for name, stored in variables.items()}


def _entry(name: str, stored: variable_files.StoredVariable) -> TensorEntry:
    def read() -> torch.Tensor:
        if not stored.dtype.is_floating_point:
            raise UserError(
                f"{stored.path}: {name} is {stored.dtype}, expected floating-point values"
            )
        return stored.read()

    return TensorEntry(source_names=(name,), shape=stored.shape, read=read)


def _combined(
    stored: Sequence[variable_files.StoredVariable],
    path: Path,
    values: Mapping[str, Any],
    names: Sequence[str],
) -> list[str]:
    shapes = [one.shape for one in stored]
    if not names:
        return combined_names(shapes, values, str(path))
    if len(names) != len(stored) or len(set(names)) != len(names):
        raise UserError(f"{path}: {len(stored)} variables, but {len(set(names))} names were given")
    return sorted(names)  # as Paddle writes them
