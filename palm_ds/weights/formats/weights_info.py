"""The content of weights.json, which describes the weights in the same folder.

It has the size and hash of every other file there, and its own, as a checkpoint's manifest has: no
reader of tensors notices a flipped bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from palm_ds.common.config import parse, shorten
from palm_ds.common.errors import UserError
from palm_ds.common.files import sha256_of_file
from palm_ds.common.json_files import SEAL, seal_problem, write_sealed_json
from palm_ds.common.messages import printable
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.heads.outputs import HeadOutputs
from palm_ds.runtime.checkpoint.checkpoint import check_file
from palm_ds.weights.formats.tensor_files import read_json

INFO = "weights.json"
_VERSION = 2
_UNSEALED = 1
"""The version of the first folders of 0.1.0, which have no hashes."""


@dataclass(frozen=True, kw_only=True)
class WeightsInfo:
    """The content of weights.json."""

    backbone: EncoderConfig
    task_ids: Mapping[str, int] = field(default_factory=dict)
    head_of: Mapping[str, str] = field(default_factory=dict)
    export_task: str = ""
    """The task whose embedding texts get if they name no other (a recipe's `export_task`)."""
    token_heads: tuple[str, ...] = ()
    """Classification heads that read tokens; the others read whole texts through the pooler."""
    heads: Mapping[str, HeadOutputs] = field(default_factory=dict)
    """What the scores of the classification heads mean, as far as known."""
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    """Entries of a Hugging Face folder's config.json, for when it becomes one again."""
    made_by: Mapping[str, Any] = field(default_factory=dict)
    """Free: program, version, step ..."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """The run's recipe, with everything filled in: tasks and the names of their classes."""
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """{path in the folder: its size and sha256} of every other file; none in version 1."""

    @property
    def task_id(self) -> int:
        """The row of the task embedding of `export_task`; 0 if unknown."""
        return self.task_ids.get(self.export_task, 0)

    def record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plain = {**asdict(self), "task_ids": dict(self.task_ids)}
        return {"format": _VERSION, **plain, "heads": outputs_record(self.heads)}


def write_info(folder: Path, info: WeightsInfo) -> None:
    """Write the weights.json of a folder whose other files are complete."""
    paths = sorted(x for x in folder.rglob("*") if x.is_file() and x != folder / INFO)
    files = {
        path.relative_to(folder).as_posix(): {
            "size": path.stat().st_size,
            "sha256": sha256_of_file(path),
        }
        for path in paths
    }
    write_sealed_json(folder / INFO, replace(info, files=files).record())


def damaged_files(folder: Path, info: WeightsInfo, *, but: str = "") -> list[str]:
    """A line for each file that is not as it was written; `but`: a file that is not read."""
    problems = {
        name: check_file(folder / name, entry) for name, entry in info.files.items() if name != but
    }
    return [f"{folder / name}: {problem}" for name, problem in problems.items() if problem]


def outputs_record(heads: Mapping[str, HeadOutputs]) -> dict[str, dict[str, Any]]:
    """Plain values for JSON, without heads of which nothing is known."""
    return {name: record for name, outputs in heads.items() if (record := outputs.record())}


def read_outputs(values: object, where: str) -> dict[str, HeadOutputs]:
    """Read what `outputs_record` wrote; empty if there is nothing. Raises UserError."""
    if not isinstance(values, dict):
        return {}
    return {name: parse(HeadOutputs, value, f"{where}.{name}") for name, value in values.items()}


def read_info(path: Path) -> WeightsInfo:
    """Read a weights.json. Raises UserError."""
    about = read_json(path)
    if about.get("format") not in (_VERSION, _UNSEALED):
        found = f"has format {about.get('format')!r}"
        raise UserError(f"{path}: {found}; this version reads format {_VERSION}")
    if not isinstance(about.get("backbone"), dict):
        raise UserError(f"{path}: has no `backbone`, the encoder's config")
    keys = ("task_ids", "head_of", "extra_config", "made_by", "recipe")
    rest = {key: about[key] for key in keys if isinstance(about.get(key), dict)}
    if isinstance(about.get("export_task"), str):
        rest["export_task"] = about["export_task"]
    if isinstance(about.get("token_heads"), list):
        rest["token_heads"] = tuple(map(str, about["token_heads"]))
    rest["heads"] = read_outputs(about.get("heads"), f"{path}: heads")
    config = EncoderConfig.from_dict(about["backbone"], f"{path}: backbone", strict=True)
    _check_tasks(rest, config, path)
    text = path.read_bytes().decode("utf-8")
    sealed = about["format"] == _VERSION or SEAL in about
    if sealed and (problem := seal_problem(text, about)):
        raise UserError(f"{path}: {problem}")
    files = about.get("files") if about["format"] == _VERSION else {}
    if not isinstance(files, dict) or not all(map(_is_stated, files.values())):
        raise UserError(f"{path}: files: expected the size and sha256 of each")
    return WeightsInfo(backbone=config, files=files, **rest)


def _is_stated(entry: object) -> bool:
    return isinstance(entry, dict) and {"size", "sha256"} <= entry.keys()


def _check_tasks(about: Mapping[str, Any], config: EncoderConfig, path: Path) -> None:
    """Raises UserError for a task that has no row of the task embedding, or no name of a head."""
    for name, row in about.get("task_ids", {}).items():
        if type(row) is not int or row < 0 or (config.task_types and row >= config.task_types):
            what = f"expected a row of the task embedding, which has {config.task_types}"
            raise UserError(f"{path}: task_ids.{printable(name)}: {what}, got {shorten(row)}")
    for name, head in about.get("head_of", {}).items():
        if not isinstance(head, str):
            raise UserError(
                f"{path}: head_of.{printable(name)}: expected the name of a head, got "
                f"{shorten(head)}"
            )
