"""How Hugging Face's Bert, Ernie and Roberta call our parameters, and their config.json.

One table, read in both directions. Query, key and value are one matrix here and three there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from palm_ds.backbone_config import BackboneConfig
from palm_ds.errors import UserError

State = dict[str, torch.Tensor]

MASKED_WORDS = "masked_words"  # what the head of an imported folder is called

_EMBEDDINGS = {
    "word.weight": "embeddings.word_embeddings.weight",
    "position.weight": "embeddings.position_embeddings.weight",
    "segment.weight": "embeddings.token_type_embeddings.weight",
    "task.weight": "embeddings.task_type_embeddings.weight",
    "norm": "embeddings.LayerNorm",
    "pooler.dense": "pooler.dense",
}
_LAYER = {
    "project": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "expand": "intermediate.dense",
    "contract": "output.dense",
    "output_norm": "output.LayerNorm",
}
_QKV = ("query", "key", "value")
_HEAD = {
    "bert": {
        "dense": "cls.predictions.transform.dense",
        "norm": "cls.predictions.transform.LayerNorm",
        "bias": "cls.predictions.bias",
    },
    "roberta": {"dense": "lm_head.dense", "norm": "lm_head.layer_norm", "bias": "lm_head.bias"},
}
_HEAD["ernie"] = _HEAD["bert"]
_TIED = {
    "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "lm_head.decoder.weight": "embeddings.word_embeddings.weight",
    "lm_head.decoder.bias": "lm_head.bias",
}
_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
_CLASSES = {"bert": "Bert", "ernie": "Ernie", "roberta": "Roberta"}


def model_type(config: BackboneConfig) -> str:
    """Which of Hugging Face's models this encoder is. Raises UserError where it is none."""
    if config.position_offset == 0:
        return "ernie" if config.task_slots else "bert"
    if config.task_slots:
        raise UserError("Hugging Face has no encoder with task embeddings and a position offset")
    if config.position_offset != config.pad + 1:
        raise UserError(
            f"Hugging Face's Roberta counts positions from pad + 1 = {config.pad + 1}, this "
            f"encoder from position_offset = {config.position_offset}"
        )
    return "roberta"


def to_config(config: BackboneConfig, *, with_head: bool) -> dict[str, Any]:
    """The content of config.json."""
    kind = model_type(config)
    values = {
        "architectures": [_CLASSES[kind] + ("ForMaskedLM" if with_head else "Model")],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.inner,
        "hidden_act": config.activation,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "max_position_embeddings": config.positions,
        "type_vocab_size": config.segments,
        "initializer_range": config.init_range,
        "layer_norm_eps": config.eps,
        "pad_token_id": config.pad,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    if kind == "ernie":
        values |= {"task_type_vocab_size": config.task_slots, "use_task_id": True}
    return values


def to_names(state: Mapping[str, torch.Tensor], config: BackboneConfig, head: str | None) -> State:
    """Our parameters under Hugging Face's names. `head`: the masked-word head to take along. The
    word table is written once: their decoder is tied to it."""
    kind, renamed = model_type(config), {}
    for name, tensor in state.items():
        if name.startswith("backbone."):
            for theirs, piece in _backbone_names(name.removeprefix("backbone."), tensor):
                renamed[f"{kind}.{theirs}"] = piece
        elif head is not None and name.startswith(f"heads.{head}."):
            renamed[_head_name(name.removeprefix(f"heads.{head}."), kind)] = tensor
    # A copy each: safetensors refuses tensors that share memory, as the thirds of qkv do.
    return {name: tensor.detach().clone().contiguous() for name, tensor in renamed.items()}


def from_names(state: Mapping[str, torch.Tensor], kind: str) -> tuple[State, list[str]]:
    """Hugging Face's parameters under our names, and the names of what is none of ours.

    `kind` is the model_type. Raises UserError where the output table is not the word table.
    """
    theirs = {_clean(name, kind): tensor for name, tensor in state.items()}
    for name in _BUFFERS:
        theirs.pop(name, None)
    _drop_tied(theirs)
    ours: State = {}
    for name, source in _wanted(theirs, kind).items():
        pieces = [theirs.pop(part) for part in source]
        ours[name] = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    return ours, sorted(theirs)


def _backbone_names(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    match = re.fullmatch(r"layers\.(\d+)\.(\w+)\.(\w+)", name)
    if match is None:
        stem, _, end = name.rpartition(".")
        found = _EMBEDDINGS[name] if name in _EMBEDDINGS else f"{_EMBEDDINGS[stem]}.{end}"
        return [(found, tensor)]
    layer, part, end = match.groups()
    prefix = f"encoder.layer.{layer}"
    if part != "qkv":
        return [(f"{prefix}.{_LAYER[part]}.{end}", tensor)]
    thirds = tensor.chunk(3)
    return [
        (f"{prefix}.attention.self.{which}.{end}", third)
        for which, third in zip(_QKV, thirds, strict=True)
    ]


def _head_name(name: str, kind: str) -> str:
    stem, _, end = name.rpartition(".")
    return _HEAD[kind][name] if not stem else f"{_HEAD[kind][stem]}.{end}"


def _clean(name: str, kind: str) -> str:
    """Without the base model's prefix, and with today's names of a LayerNorm's parameters."""
    name = name.removeprefix(f"{kind}.")
    return re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name).replace(
        "LayerNorm.beta", "LayerNorm.bias"
    )


def _drop_tied(theirs: State) -> None:
    for name, source in _TIED.items():
        copy = theirs.pop(name, None)
        if copy is None:
            continue
        if source not in theirs:
            theirs[source] = copy
        elif not torch.equal(copy, theirs[source]):
            raise UserError(
                f"{name} differs from {source}: this encoder's masked-word head has the word "
                "table itself, an output table of its own cannot be taken over"
            )


def _wanted(theirs: State, kind: str) -> dict[str, list[str]]:
    """{our name: their name or names} of what is there to take."""
    found: dict[str, list[str]] = {}
    for ours, name in _EMBEDDINGS.items():
        for end in [""] if name.endswith(".weight") else [".weight", ".bias"]:
            found[f"backbone.{ours}{end}"] = [name + end]
    for ours, name in _HEAD[kind].items():
        for end in [""] if name.endswith(".bias") else [".weight", ".bias"]:
            found[f"heads.{MASKED_WORDS}.{ours}{end}"] = [name + end]
    layers = {m[1] for m in (re.match(r"encoder\.layer\.(\d+)\.", x) for x in theirs) if m}
    for layer in sorted(layers, key=int):
        prefix, ours = f"encoder.layer.{layer}", f"backbone.layers.{layer}"
        for end in ("weight", "bias"):
            qkv = [f"{prefix}.attention.self.{which}.{end}" for which in _QKV]
            found[f"{ours}.qkv.{end}"] = qkv
            for part, name in _LAYER.items():
                found[f"{ours}.{part}.{end}"] = [f"{prefix}.{name}.{end}"]
    return {ours: names for ours, names in found.items() if all(x in theirs for x in names)}
