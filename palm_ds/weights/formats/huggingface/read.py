"""Reads Hugging Face folders of known architectures (families.py), with any of their heads.

config.json + model.safetensors or pytorch_model.bin, whole or sharded; tokenizer files
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from palm_ds.common.config import parse, shorten
from palm_ds.common.errors import UserError
from palm_ds.common.messages import printable
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import encoder_class
from palm_ds.model.heads.outputs import HeadOutputs
from palm_ds.text.tokenizer import TOKENIZER_FILES
from palm_ds.weights.formats.contents import (
    NO_POOLER,
    SENTENCE_ORDER_CLASSES,
    CheckpointContents,
    Extras,
    HeadInfo,
    TensorEntry,
    TrainingNote,
    with_eps,
)
from palm_ds.weights.formats.expected_shapes import checked
from palm_ds.weights.formats.huggingface.architecture import (
    CLASSIFIER,
    HEAD_CLASSES,
    MASKED_WORDS,
    PAIR_HEADS,
    READING,
    SENTENCE_ORDER,
)
from palm_ds.weights.formats.huggingface.check_config import check_labels
from palm_ds.weights.formats.huggingface.cross_encoder import head_in
from palm_ds.weights.formats.huggingface.families import (
    FAMILIES,
    FAMILY_NAMES,
    architecture_of,
    knows_family,
)
from palm_ds.weights.formats.huggingface.names import (
    heads_in,
    prefixed,
    to_palm_ds_names,
    untied_config,
)
from palm_ds.weights.formats.huggingface.sentence_transformers import find_modules
from palm_ds.weights.formats.tensor_files import (
    SAFETENSORS,
    open_safetensors,
    open_tensors,
    read_json,
    weight_files,
)

CONFIG = "config.json"
_PADDLE_QUERY = r"(^|\.)encoder\.layers\.\d+\.self_attn\.q_proj\."

KEPT_KEYS = (
    "bos_token_id",
    "classifier_dropout",
    "classifier_dropout_prob",
    "cls_token_id",
    "decoder_start_token_id",
    "eos_token_id",
    "finetuning_task",
    "is_matryoshka",
    "mask_token_id",
    "matryoshka_dimensions",
    "pooler_dropout",
    "qa_dropout",
    "sbert_ce_default_activation_function",
    "sentence_transformers",
    "sep_token_id",
    "seq_classif_dropout",
    "summary_last_dropout",
    "task_specific_params",
    "unk_token_id",
)
"""Entries of config.json that only training or other programs read."""


def recognizes(path: Path) -> bool:
    """Whether the folder has a config.json of transformers and a weight file."""
    path = Path(path)
    try:
        if not (path / CONFIG).is_file() or not weight_files(path):
            return False
        about = read_json(path / CONFIG)
    except (UserError, OSError, ValueError):
        return False
    paddle = "paddlenlp_version" in about or _has_paddle_names(path / SAFETENSORS)
    return isinstance(about.get("model_type"), str) and not paddle


def _has_paddle_names(path: Path) -> bool:
    """PaddleNLP writes folders that look the same, but with transposed matrices."""
    try:
        return any(re.search(_PADDLE_QUERY, name) for name in open_safetensors(path))
    except UserError:
        return False


def open_contents(
    path: Path, *, eps: float | None = None, untied_head: str | None = None
) -> CheckpointContents:
    """Open a folder. `eps` overrides the LayerNorm eps of config.json; `untied_head`: see
    names.to_palm_ds_names."""
    path = Path(path)
    about, config = read_config(path)
    stored = open_tensors(path)
    entries, skipped = to_palm_ds_names(
        stored,
        about["model_type"],
        config,
        str(path),
        tied=config.tie_word_embeddings,
        untied_head=untied_head,
        class_name=class_of(about),
    )
    entries = architecture_of(about["model_type"]).arrange(entries, config)
    _check_tied(about, stored, entries, path)
    skipped |= _what_is_not_read(entries, config)
    files, behind = find_modules(path, config.hidden_size)
    skipped |= behind
    head = {} if f"heads.{CLASSIFIER}.out.weight" in entries else head_in(files)
    entries |= {f"heads.{CLASSIFIER}.out.{part}": entry for part, entry in head.items()}
    config = untied_config(_with_vocabulary(config, entries), entries)
    contents = CheckpointContents(
        path=path,
        format=f"Hugging Face {class_of(about)}",
        config=config,
        entries=entries,
        heads=described_heads(entries, about, path / CONFIG, averaged=bool(head)),
        skipped=skipped,
        tokenizer=path if any((path / name).is_file() for name in TOKENIZER_FILES) else None,
        extras=Extras(config=kept_entries(about), files={} if head else files),
        notes=_notes(entries, about, config),
    )
    names = architecture_of(about["model_type"]).names(about["model_type"], config)
    return checked(
        with_eps(contents, eps),
        {ours: prefixed(name[0], about["model_type"]) for ours, name in names.items()},
    )


def kept_entries(about: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a config.json that are written again unchanged."""
    return {key: about[key] for key in KEPT_KEYS if key in about}


def read_config(folder: Path) -> tuple[dict[str, Any], EncoderConfig]:
    """config.json as it is, and the encoder's config that it contains. It may have any other keys;
    those that would change what the encoder computes are checked."""
    path = folder / CONFIG
    about = read_json(path)
    kind = about.get("model_type")
    if not knows_family(about):
        raise UserError(
            f"{path}: model_type must be {FAMILY_NAMES}, got {printable(shorten(kind))} "
            "(docs/encoders.md lists those that are read, and why others are not)"
        )
    if quantized := about.get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise UserError(
            f"{path}: quantization_config: quantized weights ({printable(shorten(method))}) cannot "
            "be converted; load the model in transformers, call its dequantize() and "
            "save_pretrained(), or use the model it was quantized from"
        )
    check_labels(about, str(path))
    _check_class(about, str(path))
    try:
        config = architecture_of(about["model_type"]).read_config(about, str(path))
        encoder_class(config).own_layers(config)  # whose options must fit one another
    except UserError as error:
        named = str(error).startswith(str(path))
        raise UserError(str(error) if named else f"{path}: {error}") from None
    return about, config


def _check_class(about: Mapping[str, Any], where: str) -> None:
    """Raises UserError if `architectures` does not contain a class name, since it is displayed and
    looked up."""
    named = about.get("architectures")
    if named is None or named == []:
        return
    classes = named if isinstance(named, list) else [None]
    if not all(
        isinstance(cls, str) and re.fullmatch(r"[A-Z]\w{0,99}", cls, re.A) for cls in classes
    ):
        raise UserError(
            f"{where}: architectures: expected the name of a class in a list, got "
            f"{printable(shorten(named))}"
        )


def _check_tied(
    about: Mapping[str, Any],
    stored: Mapping[str, TensorEntry],
    entries: Mapping[str, TensorEntry],
    path: Path,
) -> None:
    untied = about.get("tie_word_embeddings") is False
    decoders = tuple(x for x in architecture_of(about["model_type"]).tied if x.endswith(".weight"))
    if (
        untied
        and decoders
        and f"heads.{MASKED_WORDS}.bias" in entries
        and not any(name.endswith(decoders) for name in stored)
    ):
        last = decoders[0].split(".", decoders[0].count(".") - 1)[-1]
        raise UserError(f"{path / CONFIG}: tie_word_embeddings is false, but there is no {last}")


def _with_vocabulary(config: EncoderConfig, entries: Mapping[str, TensorEntry]) -> EncoderConfig:
    words = entries.get("backbone.word.weight")
    if config.vocab_size is None and words is not None and words.shape:
        return replace(config, vocab_size=words.shape[0])
    return config


def class_of(about: Mapping[str, Any]) -> str:
    """The model's class according to config.json; by default the base model."""
    named = about.get("architectures")
    if isinstance(named, list) and named and isinstance(named[0], str):
        return named[0]
    return FAMILIES[about["model_type"]].class_name("Model")


def _what_is_not_read(entries: dict[str, TensorEntry], config: EncoderConfig) -> dict[str, str]:
    """Removes tensors that transformers would ignore; {source name: why}."""
    skipped = {}
    if not config.task_types and (table := entries.pop("backbone.task.weight", None)):
        skipped |= dict.fromkeys(table.source_names, "use_task_id is not set: the model ignores it")
    return skipped


def described_heads(
    entries: Mapping[str, TensorEntry],
    about: Mapping[str, Any],
    file: Path,
    *,
    averaged: bool = False,
) -> dict[str, HeadInfo]:
    """The heads, with what config.json (`file`) says of them. `averaged`: the classifier reads
    means. Raises UserError."""
    whole = averaged or _reads_whole_texts(entries, about)
    pooled = {*PAIR_HEADS, *([CLASSIFIER] if whole else [])}
    heads = heads_in(entries, pooled=pooled)
    if order := heads.get(SENTENCE_ORDER):
        heads[SENTENCE_ORDER] = replace(order, outputs=HeadOutputs(labels=SENTENCE_ORDER_CLASSES))
    if head := heads.get(CLASSIFIER):
        try:
            outputs = replace(_outputs(about, head.classes), averaged=averaged)
            heads[CLASSIFIER] = replace(head, outputs=outputs)
        except UserError as error:
            raise UserError(f"{file}: {error}") from None
    if (head := heads.get(MASKED_WORDS)) and READING in about:
        outputs = parse(HeadOutputs, {"reading": about[READING]}, f"{file}: {READING}")
        heads[MASKED_WORDS] = replace(head, outputs=outputs)
    return heads


def _outputs(about: Mapping[str, Any], classes: int) -> HeadOutputs:
    named = class_of(about)
    endings = [x for x, value in HEAD_CLASSES.items() if value.name == CLASSIFIER]
    return HeadOutputs(
        labels=_labels(about, classes),
        problem_type=str(about.get("problem_type") or ""),
        head_class=next((ending for ending in endings if named.endswith(ending)), ""),
    )


def _reads_whole_texts(entries: Mapping[str, TensorEntry], about: Mapping[str, Any]) -> bool:
    """Whether the classifier reads texts or tokens, which its tensor names do not show."""
    named = class_of(about)
    if named.endswith(("ForSequenceClassification", "ForMultipleChoice")):
        return True
    if named.endswith("ForTokenClassification"):
        return False
    return "backbone.pooler.dense.weight" in entries


def _labels(about: Mapping[str, Any], classes: int) -> tuple[str, ...]:
    """The class names, if config.json has all of them."""
    named = about.get("id2label")
    if not isinstance(named, dict):
        return ()
    if class_of(about).endswith(("ForSequenceClassification", "ForTokenClassification")) and (
        len(named) != classes
    ):
        raise UserError(f"id2label: names {len(named)} classes, but the classifier has {classes}")
    labels = [named.get(str(i)) for i in range(classes)]
    known = tuple(label for label in labels if isinstance(label, str))
    return known if len(known) == classes else ()


def _notes(
    entries: Mapping[str, TensorEntry], about: Mapping[str, Any], config: EncoderConfig
) -> tuple[str, ...]:
    notes = []
    for key in architecture_of(about["model_type"]).merged_dropouts:
        if about.get(key, config.dropout) != config.dropout:
            given = printable(shorten(about[key]))
            what = f"{key} is {given}, but training drops {config.dropout} there"
            notes.append(TrainingNote(f"config.json: {what}"))
    if "backbone.pooler.dense.weight" not in entries:
        notes.append(NO_POOLER)
    if f"heads.{CLASSIFIER}.out.weight" in entries and not about.get("architectures"):
        reads = "whole texts" if _reads_whole_texts(entries, about) else "tokens"
        notes.append(f"config.json names no class: assuming that the classifier reads {reads}")
    return tuple(notes)
