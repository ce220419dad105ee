"""Keeps the files of sentence-transformers in a model folder, which its embeddings depend on.

    modules.json                     modules after the encoder: Pooling, Normalize, Dense,
                                     SpladePooling, ...
    1_Pooling/config.json, ...       settings of a module, and its weights if it has any
    sentence_bert_config.json        maximum length
    config_sentence_transformers.json  prompts, similarity function

They are copied, since the encoder's outputs are the same. Only the weights of a module are
converted to the model's dtype, the maximum length is limited to the number of positions, and a
Pooling is stated for old and new readers (text_pooling.py).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from palm_ds.common.config import shorten
from palm_ds.common.errors import UserError
from palm_ds.common.json_files import write_json
from palm_ds.common.messages import printable
from palm_ds.model.pooling import SPLADE
from palm_ds.weights.formats.contents import CheckpointContents, TensorEntry
from palm_ds.weights.formats.huggingface.text_pooling import (
    FLAGS,
    SPLADE_SETTINGS,
    UNTRAINED,
    in_both_dialects,
)
from palm_ds.weights.formats.tensor_files import (
    BIN,
    SAFETENSORS,
    TensorGroup,
    open_bin,
    open_safetensors,
    read_json,
    write_file,
)

MODULES = "modules.json"
FOLDER = "sentence_transformers"
"""Where our own weights folder keeps them."""
SETTINGS = "config_sentence_transformers.json"
_ENCODERS = ("Transformer", "MLMTransformer")
_FOLLOWING = ("Pooling", "Normalize", "Dense", "LayerNorm", "Dropout", "SpladePooling")
_READ = ("Pooling", "Normalize", "Dropout", "SpladePooling")
_PARTS = ("config.json", SAFETENSORS, BIN)
_FLAG = "pooling_mode_"
_POOLINGS = {
    **{"mean": "mean", "cls": "cls", "max": "max"},
    **{"mean_tokens": "mean", "cls_token": "cls", "max_tokens": "max"},
    SPLADE: SPLADE,
}
_KNOWN_POOLINGS = {*FLAGS, *(flag.removeprefix(_FLAG) for flag in FLAGS.values())}
"""Names of sentence-transformers 6, and of earlier versions."""
_MAX_STATED_LENGTH = 10**9
"""Tokenizers without a maximum length state 10^30."""
_MAX_BYTES = 1 << 20  # bytes of modules.json
_OTHERS = "the embeddings of sentence-transformers would differ: "
"""Before the reason for skipping modules."""


def find_modules(folder: Path, hidden_size: int) -> tuple[dict[str, Path], dict[str, str]]:
    """({path: file} to copy, {path: why it is skipped}). If a module is unknown, or cannot be what
    its files say, all are skipped: embeddings without it would be different."""
    files = {path.name: path for path in sorted(folder.glob("sentence_*_config.json"))}
    root = folder if (folder / MODULES).is_file() else folder.parent
    if (root / SETTINGS).is_file():
        files[SETTINGS] = root / SETTINGS
    if not (root / MODULES).is_file():
        return (files if root == folder or not files else {}), {}
    try:
        modules = modules_in(root / MODULES)
        if root != folder and modules[0]["path"] != folder.name:
            return {}, {}  # the parent folder belongs to another model
        width = hidden_size if kind_of(modules[0]) == _ENCODERS[0] else 0
        for module in modules[1:]:
            parts = _parts_of(module, root)
            width = _width(module, parts, width)
            files |= parts
    except UserError:
        raise
    except ValueError as error:
        return {}, {MODULES: f"{_OTHERS}{error}"}
    return {MODULES: root / MODULES, **files}, {}


def modules_in(path: Path) -> list[dict[str, str]]:
    """The modules in order, the encoder first. Raises ValueError."""
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"{MODULES} is larger than {_MAX_BYTES:,} bytes")
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        raise ValueError(f"{MODULES} is not JSON") from None
    if not isinstance(content, list) or not content:
        raise ValueError(f"{MODULES} is not a list of modules")
    modules = sorted(map(_module, content), key=lambda each: each["idx"])
    if kind_of(modules[0]) not in _ENCODERS:
        raise ValueError(f"its first module is {printable(kind_of(modules[0]))}, not a Transformer")
    return modules


def _module(value: object) -> dict[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("idx"), int):
        raise ValueError(f"{MODULES} has a module without idx")
    for key in ("type", "path"):
        if not isinstance(value.get(key), str):
            raise ValueError(f"{MODULES} has a module without {key}")
    return value


def kind_of(module: Mapping[str, str]) -> str:
    """`Pooling` of `sentence_transformers.models.Pooling`; the full name of any other class."""
    package, _, name = module["type"].rpartition(".")
    return name if package.split(".")[0] == "sentence_transformers" else module["type"]


def _parts_of(module: Mapping[str, str], root: Path) -> dict[str, Path]:
    """The files of a module after the encoder. Raises ValueError for an unknown module."""
    kind, place = kind_of(module), module["path"]
    if kind not in _FOLLOWING:
        raise ValueError(f"its module {printable(kind)} is not supported")
    if Path(place).name != place or place in ("", "..") or not place.isprintable():
        raise ValueError(f"its module {kind} is outside the folder: {printable(place)!r}")
    files = {f"{place}/{part}": root / place / part for part in _PARTS}
    files = {name: path for name, path in files.items() if path.is_file()}
    if kind not in ("Normalize", "Dropout") and f"{place}/config.json" not in files:
        raise ValueError(f"{place}/config.json of its module {kind} is missing")
    if f"{place}/{SAFETENSORS}" in files:
        files.pop(f"{place}/{BIN}", None)
    return files


def _width(module: Mapping[str, str], parts: Mapping[str, Path], width: int) -> int:
    """The size of the vectors after a module that gets vectors of this size; 0: not known. Raises
    ValueError if its files contradict that, or each other."""
    kind, place = kind_of(module), module["path"]
    if not width or f"{place}/config.json" not in parts:
        return width
    settings = read_json(parts[f"{place}/config.json"])
    if kind == "Pooling":
        chosen = pooling_of(settings).split("+")
        if unknown := [name for name in chosen if name not in _KNOWN_POOLINGS]:
            raise ValueError(f"{place}: no pooling {printable(unknown[0])!r}")
        for key in ("word_embedding_dimension", "embedding_dimension"):
            _check_size(place, key, settings.get(key, width), width)
        return width * len(chosen)
    shapes = {}
    if kind == "Dense":
        shapes = _dense(place, settings, width)
        width = shapes["linear.weight"][0]
    elif kind == "LayerNorm":
        _check_size(place, "dimension", settings.get("dimension"), width)
        shapes = {"norm.weight": (width,), "norm.bias": (width,)}
    _check_shapes(place, parts, shapes)
    return width


def _dense(place: str, settings: Mapping[str, Any], width: int) -> dict[str, tuple[int, ...]]:
    """{name: shape} of the weights of a Dense. Raises ValueError for settings that it cannot have:
    its activation is a class of torch.nn, which sentence-transformers imports."""
    _check_size(place, "in_features", settings.get("in_features"), width)
    size = settings.get("out_features")
    if type(size) is not int or size < 1:
        shown = printable(shorten(size))
        raise ValueError(f"{place}: out_features is {shown}, not a whole number above 0")
    activation = settings.get("activation_function", "torch.nn.Tanh")
    package, _, name = str(activation).rpartition(".")
    known = getattr(torch.nn, name, None) if package.startswith("torch.nn") else None
    if not (isinstance(known, type) and issubclass(known, torch.nn.Module)):
        shown = printable(shorten(activation))
        raise ValueError(f"{place}: activation_function {shown} is not a module of torch.nn")
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (size, width)}
    if settings.get("bias", True):
        shapes["linear.bias"] = (size,)
    if settings.get("use_residual") and size != width:
        shapes["residual.weight"] = (size, width)
    return shapes


def _check_size(place: str, key: str, size: object, width: int) -> None:
    if size != width:
        raise ValueError(
            f"{place}: {key} is {printable(shorten(size))}, but it gets vectors of {width}"
        )


def _check_shapes(
    place: str, parts: Mapping[str, Path], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    file = parts.get(f"{place}/{SAFETENSORS}") or parts.get(f"{place}/{BIN}")
    if shapes and file is None:
        raise ValueError(f"{place}: its weights are missing")
    tensors = tensors_in(file) if shapes and file else {}
    if further := sorted(tensors.keys() - shapes.keys()):
        raise ValueError(f"{place}: {printable(further[0])} does not fit its config.json")
    for name, shape in shapes.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.shape != shape:
            has = f"of {list(tensor.shape)}" if tensor else "missing"
            raise ValueError(f"{place}: {name} is {has}; its config.json says {list(shape)}")


def tensors_in(path: Path) -> dict[str, TensorEntry]:
    return (open_safetensors if path.name == SAFETENSORS else open_bin)(path)


@dataclass(frozen=True, kw_only=True)
class EmbeddingModules:
    """Modules that follow the encoder, as far as vectors of texts depend on them."""

    pooling: str = ""
    """mean, cls, max or splade; empty: not stated."""
    normalize: bool = False
    max_length: int = 0
    """Tokens; 0: not stated."""
    other: str = ""
    """Something that the same vectors need and that is not supported."""
    prompts: bool = False
    """Whether any text is put before others."""
    prompt: str = ""
    """The prompt of every text for which no other is given."""
    pools_prompt: bool = True
    """Whether the tokens of a prompt are pooled like those of the text."""
    dimensions: int = 0
    """Only the first numbers of a vector are used; 0: all."""
    max_active_dims: int = 0
    """Only the largest numbers of a sparse vector are used, as many as this; 0: all."""
    lower: bool = False
    """Texts are lower-cased, whatever the tokenizer does."""
    trained: bool = True
    """Whether the encoder was trained to give such vectors."""

    def is_usual(self, max_length: int) -> bool:
        """Whether programs that read up to `max_length` tokens do the same without the files."""
        plain = self.pooling in ("", "mean") and not (self.normalize or self.other or self.prompts)
        return plain and self.max_length in (0, max_length) and not (self.dimensions or self.lower)


def modules_of(contents: CheckpointContents) -> EmbeddingModules:
    """Modules that a checkpoint states, in files or as a run's checkpoint does. Raises
    UserError."""
    if why := contents.skipped.get(MODULES):
        return EmbeddingModules(other=f"{MODULES} ({why.removeprefix(_OTHERS)})")
    if (stated := contents.pooling) is None:
        return read_modules(contents.extras.files)
    return EmbeddingModules(
        pooling=stated.pooling,
        normalize=stated.normalize,
        max_length=stated.max_length,
        prompts=any(stated.prompts.values()),
        trained=stated.trained,
    )


def read_modules(files: Mapping[str, Path]) -> EmbeddingModules:
    """Modules that the files of `find_modules` state. Raises UserError for one that is no JSON
    object."""
    length = max(map(_cut, _encoders(files)), default=0)
    settings = read_json(files[SETTINGS]) if SETTINGS in files else {}
    named = settings.get("prompts")
    named = named if isinstance(named, dict) else {}
    default = settings.get("default_prompt_name")
    size, most = settings.get("truncate_dim"), settings.get("max_active_dims")
    described = EmbeddingModules(
        max_length=length,
        prompts=any(named.values()),
        prompt=str(named.get(default) or "") if isinstance(default, str) else "",
        dimensions=size if isinstance(size, int) else 0,
        max_active_dims=most if isinstance(most, int) else 0,
        lower=any(read_json(path).get("do_lower_case") is True for path in _encoders(files)),
        trained=settings.get(UNTRAINED) is not True,
    )
    if MODULES not in files:
        return described
    modules = modules_in(files[MODULES])[1:]
    kinds = [kind_of(module) for module in modules]
    other = next((kind for kind in kinds if kind not in _READ), "")
    pooling, pools_prompt = "", True
    for module in modules:
        if kind_of(module) == "Pooling":
            settings = read_json(files[f"{module['path']}/config.json"])
            pooling, pools_prompt = pooling_of(settings), settings.get("include_prompt", True)
            if pooling not in _POOLINGS:
                pooling, other = "", f"Pooling {printable(pooling)}"
        elif kind_of(module) == "SpladePooling":
            pooling = SPLADE
            other = other or _other_splade(read_json(files[f"{module['path']}/config.json"]))
    return replace(
        described,
        pooling=_POOLINGS.get(pooling, ""),
        normalize="Normalize" in kinds,
        other=other,
        pools_prompt=bool(pools_prompt),
    )


def _other_splade(settings: Mapping[str, Any]) -> str:
    """The difference of a SpladePooling from SPLADE v2's; empty if there is none."""
    for key in ("pooling_strategy", "activation_function"):
        if (value := settings.get(key, SPLADE_SETTINGS[key])) != SPLADE_SETTINGS[key]:
            return f"SpladePooling with {key} {printable(shorten(value))}"
    return ""


def _encoders(files: Mapping[str, Path]) -> list[Path]:
    """The settings of the encoder: sentence_bert_config.json, sentence_roberta_config.json, ..."""
    return [path for name, path in files.items() if name.startswith("sentence_")]


def embedding_length(contents: CheckpointContents) -> int:
    """The tokens of a text after which it is truncated: as its files of sentence-transformers say,
    those of its tokenizer in a Hugging Face folder without them, at most what the encoder reads."""
    length = modules_of(contents).max_length
    if not length and contents.tokenizer == contents.path:
        length = _cut(contents.path / "config.json")
    return min(length or contents.config.max_length, contents.config.max_length)


def pooling_of(settings: Mapping[str, Any]) -> str:
    """The pooling as sentence-transformers 6 names it, `+` between several; older versions have a
    flag for each kind. The mean if nothing is stated, as there."""
    mode = settings.get("pooling_mode")
    if isinstance(mode, str):
        return mode
    flags = [name for name, on in settings.items() if name.startswith(_FLAG) and on is True]
    named = mode if isinstance(mode, list) else [name.removeprefix(_FLAG) for name in flags]
    return "+".join(map(str, named)) or "mean"


def write_modules(
    files: Mapping[str, Path], folder: Path, *, max_length: int, dtype: torch.dtype
) -> None:
    """Write the files to a folder. Raises UserError if the weights of a module cannot be read."""
    poolings = _poolings(files)
    for name, path in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.name in (SAFETENSORS, BIN):
            _write_weights(path, target.with_name(SAFETENSORS), dtype)
        elif path.name == MODULES:
            _write_list(path, target)
        elif name in poolings:
            write_json(target, in_both_dialects(read_json(path)))
        elif name.startswith("sentence_"):
            _write_settings(path, target, max_length)
        else:
            shutil.copyfile(path, target)


def _poolings(files: Mapping[str, Path]) -> set[str]:
    """The names of the settings of Pooling modules."""
    modules = modules_in(files[MODULES]) if MODULES in files else []
    return {f"{module['path']}/config.json" for module in modules if kind_of(module) == "Pooling"}


def _write_weights(path: Path, target: Path, dtype: torch.dtype) -> None:
    entries = tensors_in(path)
    groups = [
        TensorGroup(names=(name,), shape=entry.shape, make=lambda entry=entry: [entry.read()])
        for name, entry in entries.items()
    ]
    try:
        write_file(target, groups, dtype)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _write_list(path: Path, target: Path) -> None:
    """Write modules.json. The encoder is in the folder itself; old versions had a subfolder for
    it."""
    modules = modules_in(path)
    if not modules[0]["path"]:
        shutil.copyfile(path, target)
        return
    write_json(target, [modules[0] | {"path": ""}, *modules[1:]])


def _write_settings(path: Path, target: Path, max_length: int) -> None:
    """Write a sentence_*_config.json with the maximum length, which servers require."""
    settings, length = read_json(path), min(_cut(path) or max_length, max_length)
    if settings.get("max_seq_length") == length and "do_lower_case" in settings:
        shutil.copyfile(path, target)
    else:
        write_json(target, {"do_lower_case": False, **settings, "max_seq_length": length})


def _cut(path: Path) -> int:
    """The maximum length in a settings file, or in the tokenizer's, where sentence-transformers 6
    writes it; 0 if not given."""
    tokenizer = path.with_name("tokenizer_config.json")
    length = read_json(path).get("max_seq_length") if path.is_file() else None
    if length is None and tokenizer.is_file():
        length = read_json(tokenizer).get("model_max_length")
    return length if isinstance(length, int) and length < _MAX_STATED_LENGTH else 0
