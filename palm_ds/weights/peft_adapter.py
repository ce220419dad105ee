"""Writes LoRA's matrices as an adapter of peft, for the transformers model of a hf/ folder.

    model = AutoModelForSequenceClassification.from_pretrained(BASE, num_labels=2)
    model = peft.PeftModel.from_pretrained(model, "RUN/adapter")

BASE has the weights that the run started from. A folder that holds the head of a task gives an
adapter for the class of that head, with the head; any other one for AutoModel.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from palm_ds.common.atomic import follow_umask, write_folder_atomically
from palm_ds.common.config import read_json
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import encoder_class
from palm_ds.model.lora import LoraSettings, lora_modules, peft_config
from palm_ds.weights.formats.huggingface.architecture import HEAD_CLASSES, Architecture
from palm_ds.weights.formats.huggingface.families import FAMILIES, architecture_for, architecture_of
from palm_ds.weights.formats.tensor_files import open_tensors

FOLDER, WEIGHTS = "adapter", "adapter_model.safetensors"
_ADAPTER = re.compile(
    r"backbone\.layers\.(\d+)\.(.+)\.lora_(A|B|magnitude_vector)\.default\.weight"
)
_STEM = "base_model.model."
_TASK_TYPES = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}


def has_adapter(config: EncoderConfig, settings: LoraSettings) -> bool:
    """Whether the matrices of this encoder that LoRA changes are modules of transformers. With DoRA
    a module there has the magnitudes of all of its rows, so it has to be changed as a whole."""
    modules = architecture_for(config).lora_modules
    changed = {modules[role] for role in settings.target_names if role in modules}
    rest = {module for role, module in modules.items() if role not in settings.target_names}
    return bool(modules) and not (settings.dora and changed & rest)


def write_adapter(
    folder: Path,
    adapter: Mapping[str, torch.Tensor],
    settings: LoraSettings,
    hf: Path,
    *,
    base: str,
) -> None:
    """Write adapter_config.json and adapter_model.safetensors. `adapter`: the A, B and
    magnitudes by the names of the model; `hf`: the Hugging Face folder of the merged model, which
    has the head; `base`: the weights that the adapter belongs to."""
    about = read_json(hf / "config.json")
    form = architecture_of(about["model_type"])
    prefix = f"{FAMILIES[about['model_type']].tensor_prefix}."
    kind = next(
        (ending for ending in HEAD_CLASSES if about["architectures"][0].endswith(ending)), ""
    )
    saved = _saved(hf, prefix, with_head=bool(kind))
    layers = _layers(form, form.read_config(about, str(hf / "config.json")))
    tensors = _hf_adapter(adapter, prefix, form, layers) | saved
    names = dict.fromkeys(x for role in settings.target_names for x in _modules(form, role))
    modules = "|".join(map(re.escape, names))
    layer = re.sub(r"\d+", r"\\d+", re.escape(layers[0]))
    described = peft_config(
        settings,
        **_patterns(settings, form),
        target_modules=rf"(.*\.)?{layer}\.({modules})",
        modules_to_save=sorted({_module(name, prefix) for name in saved}) or None,
        task_type=_TASK_TYPES.get(kind, None if kind else "FEATURE_EXTRACTION"),
        base_model_name_or_path=base,
        inference_mode=True,
    )

    def write(part: Path) -> None:
        described.save_pretrained(str(part))
        named = {
            _STEM + (name if kind else name.removeprefix(prefix)): y for name, y in tensors.items()
        }
        save_file({x: y.contiguous() for x, y in named.items()}, part / WEIGHTS, {"format": "pt"})
        follow_umask(part / WEIGHTS)

    write_folder_atomically(folder, write)


def _layers(form: Architecture, config: EncoderConfig) -> list[str]:
    """The names of the layers in transformers."""
    names = form.layers_in_file(config)
    return [f"{form.lora_layer}.{i}" for i in range(len(names))] if form.lora_layer else names


def _modules(form: Architecture, role: str) -> tuple[str, ...]:
    """The modules of a layer of transformers that a target is."""
    modules = form.lora_modules[role]
    return (modules,) if isinstance(modules, str) else modules


def _saved(hf: Path, prefix: str, *, with_head: bool) -> dict[str, torch.Tensor]:
    """The trained tensors of a Hugging Face folder that are no matrices of LoRA: the pooler, and
    the head of a task."""
    stored = open_tensors(hf)
    poolers = ("pooler.", f"{prefix}pooler.")  # an encoder without a head has no prefix
    names = [name for name in stored if name.startswith(poolers)]
    names += [name for name in stored if with_head and not name.startswith(prefix)]
    return {name: stored[name].read() for name in names}


def _hf_adapter(
    adapter: Mapping[str, torch.Tensor], prefix: str, form: Architecture, layers: Sequence[str]
) -> dict[str, torch.Tensor]:
    """The A and B under their names in transformers. Those of matrices that are stacked there are
    one: A below A, and a B whose parts change their own rows. Where a matrix is several there, each
    has the same A and its rows of B."""
    config = EncoderConfig(kind=form.kind)
    matrices = encoder_class(config).matrices(config)
    role_of = {module: role for role, module in lora_modules(matrices).items()}
    roles_of = {role: matrix.roles for matrix in matrices for role in matrix.roles}
    pieces: dict[tuple[str, tuple[str, ...], str], dict[str, torch.Tensor]] = {}
    for name, tensor in adapter.items():
        match = _ADAPTER.fullmatch(name)
        assert match is not None
        role = role_of[match[2]]
        pieces.setdefault((match[1], _modules(form, role), match[3]), {})[role] = tensor
    made = {}
    for (layer, modules, part), of_roles in pieces.items():
        first, tensor = next(iter(of_roles.items()))
        roles = roles_of[first]
        if len({form.lora_modules[role] for role in roles}) < len(roles):
            tensor = _stacked(part, of_roles, roles)
        parts = (tensor,) * len(modules) if part == "A" else tensor.chunk(len(modules))
        ending = "" if part == "magnitude_vector" else ".weight"  # as peft names them in files
        for module, rows in zip(modules, parts, strict=True):
            name = f"{layers[int(layer)]}.{module}"
            made[f"{prefix}{name}.lora_{part}{ending}"] = rows.clone()
    return made


def _stacked(part: str, of_roles: Mapping[str, torch.Tensor], roles: Sequence[str]) -> torch.Tensor:
    """A (targets * rank, hidden), B (roles * hidden, targets * rank) or the magnitudes (targets *
    hidden,) of several targets."""
    if part != "B":
        return torch.cat([of_roles[role] for role in roles if role in of_roles])
    size, rank = next(iter(of_roles.values())).shape
    whole, column = torch.zeros(len(roles) * size, len(of_roles) * rank), 0
    for row, role in enumerate(roles):
        if role in of_roles:
            rows = slice(row * size, (row + 1) * size)
            whole[rows, column : column + rank] = of_roles[role]
            column += rank
    return whole


def _patterns(settings: LoraSettings, form: Architecture) -> dict[str, dict[str, Any]]:
    """peft's ranks and alphas of modules that several targets are stacked in: the factor of their
    B A stays."""
    counts = Counter(x for role in settings.target_names for x in _modules(form, role))
    several = {module: count for module, count in counts.items() if count > 1}
    factor = {x: n**0.5 if settings.rank_stabilized else n for x, n in several.items()}
    ranks = {x: settings.rank * n for x, n in several.items()}
    return {
        "rank_pattern": ranks,
        "alpha_pattern": {x: settings.alpha * y for x, y in factor.items()},
    }


def _module(name: str, prefix: str) -> str:
    """The module that peft saves whole for this tensor."""
    return name.removeprefix(prefix).split(".")[0]
