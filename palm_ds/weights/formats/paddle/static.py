"""Writes encoders of texts and images as ERNIE's static graph has them: UNIMO and ERNIE-ViL.

    plan(entries, config, heads, target) ──> ExportPlan      names and shapes; no value is read yet
    write(plan, folder)    ──> params/ with a file for each variable, unimo_config.json, tokenizer

Neither PaddleNLP nor transformers has such encoders; ERNIE's own programs read these folders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch

from palm_ds.common.errors import UserError
from palm_ds.common.json_files import write_json
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import encoder_class
from palm_ds.text.tokenizer import Tokenizer
from palm_ds.weights.formats.contents import HeadInfo, TensorEntry
from palm_ds.weights.formats.huggingface.architecture import COUNTS
from palm_ds.weights.formats.huggingface.plan import ExportPlan
from palm_ds.weights.formats.huggingface.target import ExportOptions
from palm_ds.weights.formats.paddle.names import STATIC, static_names
from palm_ds.weights.formats.paddle.variable_files import write_variable
from palm_ds.weights.formats.tensor_files import TORCH_DTYPES, TensorGroup

PARAMS = "params"
_NO_PLACE = "no place in ERNIE's static graph of this encoder"


def reads_images(config: EncoderConfig) -> bool:
    """Whether it is an encoder that this module writes."""
    return encoder_class(config).region_size(config) > 0


def plan(
    entries: Mapping[str, TensorEntry],
    config: EncoderConfig,
    heads: Mapping[str, HeadInfo],
    target: ExportOptions,
) -> ExportPlan:
    """Plan a folder. Raises UserError for options that do not apply."""
    for name in ("family", "head_class"):
        if value := getattr(target, name):
            raise UserError(f"{name}: {value!r} does not apply: ERNIE's graph has one form")
    words = [name for name, head in heads.items() if head.kind == "masked_words"]
    if len(words) > 1 and not target.words:
        raise UserError(f"words: several masked-LM heads ({', '.join(words)}); name one")
    names = static_names(entries, target.words or (words or [""])[0])
    groups = tuple(x for ours in entries for x in _groups(ours, entries[ours], names.get(ours, ())))
    return ExportPlan(
        config_json=_config_json(config),
        config=config,
        groups=groups,
        dtype=_dtype([entries[ours] for ours in names], target),
        max_shard_bytes=target.max_shard_bytes,
        skipped={ours: _NO_PLACE for ours in entries if ours not in names},
    )


def write(planned: ExportPlan, folder: Path, tokenizer: Tokenizer | None) -> None:
    """Fill an empty folder, one tensor at a time. Raises UserError for a weight that is not
    finite."""
    write_json(folder / f"{planned.config.kind}_config.json", planned.config_json)
    (folder / PARAMS).mkdir()
    for group in planned.groups:
        for name, tensor in zip(group.names, group.make(), strict=True):
            values = tensor.detach().to(planned.dtype)
            if not bool(values.isfinite().all()):
                raise UserError(f"{name}: has values that are NaN or infinite in {planned.dtype}")
            write_variable(folder / PARAMS / name, values)
    if tokenizer is not None:
        tokenizer.save(folder)


def _groups(ours: str, entry: TensorEntry, names: Sequence[str]) -> Iterator[TensorGroup]:
    if not names:
        return
    role = STATIC.role(names[0])
    turned = role is not None and role.transposed
    shape = (entry.shape[0] // len(names), *entry.shape[1:])
    parts = [f"one of {COUNTS[len(names)]}"] if len(names) > 1 else []
    yield TensorGroup(
        names=tuple(names),
        shape=shape[::-1] if turned else shape,
        make=partial(_parts, entry, len(names), turned),
        source_names=(ours,),
        transform=", ".join([*parts, "transposed"] if turned else parts),
    )


def _parts(entry: TensorEntry, count: int, turned: bool) -> list[torch.Tensor]:
    return [part.T if turned else part for part in entry.read().chunk(count)]


def _dtype(entries: Sequence[TensorEntry], target: ExportOptions) -> torch.dtype:
    if target.dtype:
        return TORCH_DTYPES[target.dtype]
    return reduce(torch.promote_types, (entry.read().dtype for entry in entries))


def _config_json(config: EncoderConfig) -> dict[str, Any]:
    """The keys of ERNIE's configs, and those that only we read: its programs know them without."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "hidden_act": config.activation,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "max_position_embeddings": config.max_positions,
        "initializer_range": config.init_range,
        "pad_token_id": config.pad,
        "image_embedding_size": encoder_class(config).region_size(config),
        **encoder_class(config).paddle_json(config),
    }
