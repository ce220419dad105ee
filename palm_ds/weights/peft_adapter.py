"""Writes LoRA's matrices as an adapter of peft, for the transformers model of a hf/ folder.

    model = AutoModelForSequenceClassification.from_pretrained(BASE, num_labels=2)
    model = peft.PeftModel.from_pretrained(model, "RUN/adapter")

BASE has the weights that the run started from. A folder that holds the head of a task gives an
adapter for the class of that head, with the head; any other one for AutoModel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from palm_ds.common.atomic import follow_umask, write_folder_atomically
from palm_ds.common.config import read_json
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import encoder_class
from palm_ds.model.lora import LoraSettings, lora_modules, peft_config
from palm_ds.weights.formats.huggingface.architecture import HEAD_CLASSES, Architecture
from palm_ds.weights.formats.huggingface.families import FAMILIES, architecture_for, architecture_of

FOLDER, WEIGHTS = "adapter", "adapter_model.safetensors"
_ADAPTER = re.compile(r"backbone\.layers\.(\d+)\.(.+)\.lora_([AB])\.default\.weight")
_STEM = "base_model.model."
_TASK_TYPES = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}


def has_adapter(config: EncoderConfig) -> bool:
    """Whether the matrices of this encoder that LoRA changes are modules of transformers."""
    return bool(architecture_for(config).lora_modules)


def write_adapter(
    folder: Path,
    adapter: Mapping[str, torch.Tensor],
    settings: LoraSettings,
    hf: Path,
    *,
    base: str,
) -> None:
    """Write adapter_config.json and adapter_model.safetensors. `adapter`: the A and B by the names
    of the model; `hf`: the Hugging Face folder of the merged model, which has the head; `base`: the
    weights that the adapter belongs to."""
    config = read_json(hf / "config.json")
    form = architecture_of(config["model_type"])
    prefix = f"{FAMILIES[config['model_type']].tensor_prefix}."
    kind = next((each for each in HEAD_CLASSES if config["architectures"][0].endswith(each)), "")
    saved = _saved(hf, prefix, with_head=bool(kind))
    tensors = {_hf_name(name, prefix, form): tensor for name, tensor in adapter.items()} | saved
    modules = "|".join(re.escape(form.lora_modules[name]) for name in settings.target_names)
    described = peft_config(
        settings,
        target_modules=rf"(.*\.)?{re.escape(form.layer)}\.\d+\.({modules})",
        modules_to_save=sorted({_module(name, prefix) for name in saved}) or None,
        task_type=_TASK_TYPES.get(kind, None if kind else "FEATURE_EXTRACTION"),
        base_model_name_or_path=base,
        inference_mode=True,
    )

    def write(part: Path) -> None:
        described.save_pretrained(str(part))
        named = {_STEM + (x if kind else x.removeprefix(prefix)): y for x, y in tensors.items()}
        save_file({x: y.contiguous() for x, y in named.items()}, part / WEIGHTS, {"format": "pt"})
        follow_umask(part / WEIGHTS)

    write_folder_atomically(folder, write)


def _saved(hf: Path, prefix: str, *, with_head: bool) -> dict[str, torch.Tensor]:
    """The trained tensors of a Hugging Face folder that are no matrices of LoRA: the pooler, and
    the head of a task."""
    with safe_open(hf / "model.safetensors", "pt") as file:
        poolers = ("pooler.", f"{prefix}pooler.")  # an encoder without a head has no prefix
        names = [name for name in file.keys() if name.startswith(poolers)]  # noqa: SIM118
        names += [x for x in file.keys() if with_head and not x.startswith(prefix)]  # noqa: SIM118
        return {name: file.get_tensor(name) for name in names}


def _hf_name(name: str, prefix: str, form: Architecture) -> str:
    """The name in transformers of an A or B."""
    match = _ADAPTER.fullmatch(name)
    assert match is not None
    config = EncoderConfig(kind=form.kind)
    targets = lora_modules(encoder_class(config).matrices(config))
    target = next(key for key, module in targets.items() if module == match[2])
    module = form.lora_modules[target]
    return f"{prefix}{form.layer}.{match[1]}.{module}.lora_{match[3]}.weight"


def _module(name: str, prefix: str) -> str:
    """The module that peft saves whole for this tensor."""
    return name.removeprefix(prefix).split(".")[0]
