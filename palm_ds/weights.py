"""Weights on their own: a portable folder, and Hugging Face folders in and out.

    weights/  weights.safetensors   every parameter in fp32 under the model's names, tied ones once
              weights.json          the encoder's numbers, the tasks' ids and heads, what made it
    hf/       model.safetensors config.json + tokenizer files: opens with AutoModel.from_pretrained

`load_weights` starts a model from either (`--init_from`). Folders appear complete or not at all.
Nothing here unpickles, but for `pytorch_model.bin` through torch's weights_only loader.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from palm_ds.backbone_config import FOREIGN_KEYS, BackboneConfig
from palm_ds.errors import UserError
from palm_ds.formats import hf_names
from palm_ds.formats.hf_names import MASKED_WORDS, State
from palm_ds.formats.publish import publish
from palm_ds.heads import MaskedWordHead
from palm_ds.model import Model

FORMAT = 1  # of weights.json
_INFO, _WEIGHTS = "weights.json", "weights.safetensors"
# What must agree for weights to mean the same in another model.
_SHAPE = ("vocab_size", "width", "layers", "heads", "inner", "positions", "segments", "task_slots")
_SAME = (*_SHAPE, "activation", "eps", "position_offset")


class SavesFiles(Protocol):
    """A tokenizer, as far as a folder of weights knows."""

    def save(self, folder: Path) -> object: ...


@dataclass(frozen=True, kw_only=True)
class WeightsInfo:
    """What weights.json says."""

    backbone: BackboneConfig
    task_ids: Mapping[str, int] = field(default_factory=dict)
    head_of: Mapping[str, str] = field(default_factory=dict)
    export_task: str = ""
    """The task whose task embedding texts get that say no other (a recipe's `export_task`)."""
    made_by: Mapping[str, Any] = field(default_factory=dict)
    """Free: program, version, step, recipe ..."""

    @property
    def task_id(self) -> int:
        """The row of the task embedding that `export_task` has; 0 where nothing is known."""
        return self.task_ids.get(self.export_task, 0)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What became of a folder's weights."""

    folder: Path
    taken: tuple[str, ...]
    fresh: tuple[str, ...]
    """Parameters of the model that the folder has not: they keep their first values."""
    left_over: tuple[str, ...]
    """Parameters of the folder that the model has not."""

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """For a person."""
        lines = [f"weights: {len(self.taken)} parameters from {self.folder}"]
        if self.fresh:
            lines.append(f"weights: not in {self.folder}, begun afresh: {', '.join(self.fresh)}")
        if self.left_over:
            lines.append(f"weights: left over in {self.folder}: {', '.join(self.left_over)}")
        return lines


def save_weights(
    state: Mapping[str, torch.Tensor] | Model,
    folder: Path,
    info: WeightsInfo,
    *,
    tokenizer: SavesFiles | None = None,
) -> None:
    """Write a portable folder; an older one of that name is replaced when the new one is whole."""
    tensors = {name: tensor.contiguous() for name, tensor in _state(state).items()}
    about = {"format": FORMAT, **asdict(info), "task_ids": dict(info.task_ids)}

    def write(part: Path) -> None:
        save_file(tensors, part / _WEIGHTS, {"format": "pt"})
        _write_json(part / _INFO, about)
        if tokenizer is not None:
            tokenizer.save(part / "tokenizer")

    publish(folder, write)


def export_hf(
    state: Mapping[str, torch.Tensor] | Model,
    folder: Path,
    *,
    config: BackboneConfig,
    tokenizer: SavesFiles | None = None,
    task_id: int = 0,
) -> None:
    """Write a folder that AutoModel, AutoModelForMaskedLM and AutoTokenizer open.

    An encoder with task embeddings becomes an Ernie model with use_task_id, another a Bert or
    Roberta model; the first masked-word head goes with it, the heads of other tasks have no place
    there. Hugging Face fills in task 0 where a caller gives none: rows 0 and `task_id` of the task
    table change places, so that this is the task of your choice.
    """
    tensors = _state(state)
    if not 0 <= task_id < max(config.task_slots, 1):
        raise UserError(f"task_id: {task_id} is none of {config.task_slots} task slots")
    if task_id:
        order = list(range(config.task_slots))
        order[0], order[task_id] = task_id, 0
        tensors["backbone.task.weight"] = tensors["backbone.task.weight"][order]
    head = _masked_word_head(tensors)
    named = hf_names.to_names(tensors, config, head)

    def write(part: Path) -> None:
        save_file(named, part / "model.safetensors", {"format": "pt"})
        _write_json(part / "config.json", hf_names.to_config(config, with_head=head is not None))
        if tokenizer is not None:
            tokenizer.save(part)

    publish(folder, write)


def load_weights(folder: Path, model: Model) -> Loaded:
    """Start a model from a portable folder or a Hugging Face one (Bert, Roberta, Ernie).

    The encoder must be the same and all there (a Hugging Face folder may lack the pooler). A head
    is taken where the folder has one of its name; an imported masked-word head goes to every
    masked-word head. Raises UserError where anything does not fit; the model is then untouched.
    """
    folder = Path(folder)
    info, state, unknown = _read(folder)
    _check_same(info.backbone, model.backbone.config, folder)
    state = _spread_masked_words(state, model)
    own = model.state_dict()
    missing = [name for name in own if name not in state]
    if lacking := [x for x in missing if x.startswith("backbone.") and ".pooler." not in x]:
        raise UserError(f"{folder}: incomplete, it has no {lacking[0]} ({len(lacking)} missing)")
    _check_shapes(own, state, folder)
    taken = {name: tensor for name, tensor in state.items() if name in own}
    model.load_state_dict({**own, **taken})
    left_over = (*(name for name in state if name not in own), *unknown)
    return Loaded(folder=folder, taken=tuple(taken), fresh=tuple(missing), left_over=left_over)


def read_info(folder: Path) -> WeightsInfo:
    """What a folder of weights says of itself; a Hugging Face folder knows only its encoder."""
    folder = Path(folder)
    if (folder / _INFO).is_file():
        return _parse_info(folder / _INFO)
    if (folder / "config.json").is_file():
        config = _read_hf_config(folder / "config.json")
        return WeightsInfo(backbone=BackboneConfig.from_dict(config, str(folder / "config.json")))
    what = f"neither {_INFO} nor config.json" if folder.is_dir() else "no such folder"
    raise UserError(f"{folder}: {what}; a folder of weights, or of a Hugging Face model, is wanted")


def backbone_config_from(folder: Path) -> BackboneConfig:
    """The encoder's numbers of a folder of weights, ours or Hugging Face's."""
    return read_info(folder).backbone


def task_ids(folder: Path | None) -> dict[str, int]:
    """The tasks that a folder's task embedding knows, and their rows."""
    return dict(read_info(folder).task_ids) if folder else {}


def read_hf(folder: Path) -> tuple[BackboneConfig, State, list[str]]:
    """A Hugging Face folder in our names (its head under `masked_words`), and what is left over."""
    config = read_info(folder).backbone
    kind = _read_hf_config(folder / "config.json")["model_type"]
    try:
        return config, *hf_names.from_names(_read_hf_tensors(folder), kind)
    except UserError as error:
        raise UserError(str(error) if str(folder) in str(error) else f"{folder}: {error}") from None


# ---- reading ----


def _read(folder: Path) -> tuple[WeightsInfo, State, list[str]]:
    info = read_info(folder)
    if (folder / _INFO).is_file():
        return info, _load_safetensors(folder / _WEIGHTS), []
    _, state, left_over = read_hf(folder)
    return info, state, left_over


def _parse_info(path: Path) -> WeightsInfo:
    about = _read_json(path)
    if about.get("format") != FORMAT:
        raise UserError(f"{path}: format {about.get('format')!r}; this version reads {FORMAT}")
    if not isinstance(about.get("backbone"), dict):
        raise UserError(f"{path}: no `backbone`, the encoder's numbers")
    keys = ("task_ids", "head_of", "made_by")
    rest = {key: about[key] for key in keys if isinstance(about.get(key), dict)}
    if isinstance(about.get("export_task"), str):  # folders written before it have none
        rest["export_task"] = about["export_task"]
    return WeightsInfo(
        backbone=BackboneConfig.from_dict(about["backbone"], f"{path}: backbone"), **rest
    )


def _read_hf_config(path: Path) -> dict[str, Any]:
    """What of config.json concerns the encoder. Programs of all ages wrote all kinds of keys there;
    those that would make it another encoder are checked."""
    config = _read_json(path)
    if config.get("model_type") not in ("bert", "ernie", "roberta"):
        kind = config.get("model_type")
        raise UserError(f"{path}: model_type must be bert, ernie or roberta, got {kind!r}")
    return {key: value for key, value in config.items() if key in FOREIGN_KEYS}


def _read_hf_tensors(folder: Path) -> State:
    """model.safetensors or pytorch_model.bin, whole or in shards."""
    readers = {"model.safetensors": _load_safetensors, "pytorch_model.bin": _load_bin}
    for name, read in readers.items():
        if (folder / name).is_file():
            return read(folder / name)
        index = folder / f"{name}.index.json"
        if index.is_file():
            shards = sorted(set(_read_json(index).get("weight_map", {}).values()))
            if any(Path(shard).name != shard for shard in shards):
                raise UserError(f"{index}: a shard lies outside the folder")
            parts = [read(folder / shard) for shard in shards]
            return {key: tensor for part in parts for key, tensor in part.items()}
    raise UserError(f"{folder}: neither model.safetensors nor pytorch_model.bin")


def _load_safetensors(path: Path) -> State:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read as safetensors: {error}") from None


def _load_bin(path: Path) -> State:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle raises many kinds; all mean that the file is not weights
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{path}: cannot be read as tensors alone: {reason}") from None
    if not isinstance(state, dict) or not all(isinstance(x, torch.Tensor) for x in state.values()):
        raise UserError(f"{path}: holds something else than tensors by name")
    return dict(state)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected keys and values, got {type(content).__name__}")
    return content


# ---- fitting ----


def _check_same(theirs: BackboneConfig, mine: BackboneConfig, folder: Path) -> None:
    for name in _SAME:
        if getattr(theirs, name) != getattr(mine, name):
            key = "ffn" if name == "inner" else name
            raise UserError(
                f"{folder}: made with backbone.{key} {getattr(theirs, name)!r}, this model has "
                f"{getattr(mine, name)!r}"
            )


def _check_shapes(own: State, state: State, folder: Path) -> None:
    for name, tensor in state.items():
        if name in own and tensor.shape != own[name].shape:
            raise UserError(
                f"{folder}: {name} is {tuple(tensor.shape)}, this model's {tuple(own[name].shape)}"
            )


def _spread_masked_words(state: State, model: Model) -> State:
    """An imported masked-word head under the name of every masked-word head of the model."""
    prefix = f"heads.{MASKED_WORDS}."
    names = [name for name, head in model.heads.items() if isinstance(head, MaskedWordHead)]
    imported = {
        name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)
    }
    if not imported or not names or MASKED_WORDS in model.heads:
        return state
    rest = {name: x for name, x in state.items() if not name.startswith(prefix)}
    return rest | {f"heads.{name}.{end}": x for name in names for end, x in imported.items()}


def _masked_word_head(state: State) -> str | None:
    """The first head that looks like a masked-word head: only such have a LayerNorm of their own
    and a bias over the vocabulary."""
    words = len(state["backbone.word.weight"])
    for name, tensor in state.items():
        head = name.removeprefix("heads.").removesuffix(".bias")
        found = name == f"heads.{head}.bias" and f"heads.{head}.norm.weight" in state
        if found and len(tensor) == words:
            return head
    return None


# ---- writing ----


def _state(source: Mapping[str, torch.Tensor] | Model) -> State:
    """fp32 on the CPU, tied tables once (under the backbone's name)."""
    state = source.state_dict() if isinstance(source, Model) else source
    kept = {name: x for name, x in state.items() if not name.endswith(".tied_words")}
    return {name: x.detach().to("cpu", torch.float32) for name, x in kept.items()}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
