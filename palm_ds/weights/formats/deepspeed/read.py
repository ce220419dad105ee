"""Reads a palm_ds or Hugging Face model from the shards that DeepSpeed wrote while training it.

    FOLDER/latest, FOLDER/TAG/*_states.pt            (zero_shards.py reads them)
    config.json or weights.json in the same folder   the encoder's config, which the shards lack

Parameters have the names of the trained module, with a prefix (`model.`) if it was wrapped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.text.tokenizer import TOKENIZER_FILES
from palm_ds.weights.formats import native
from palm_ds.weights.formats.contents import CheckpointContents, Extras, TensorEntry, with_eps
from palm_ds.weights.formats.deepspeed.zero_shards import Shards, open_shards, tag_folder
from palm_ds.weights.formats.expected_shapes import checked
from palm_ds.weights.formats.format import Format
from palm_ds.weights.formats.huggingface import read as huggingface
from palm_ds.weights.formats.huggingface.families import (
    ARCHITECTURES,
    FAMILIES,
    FAMILY_NAMES,
    architecture_of,
)
from palm_ds.weights.formats.huggingface.names import to_palm_ds_names, untied_config
from palm_ds.weights.formats.weights_info import INFO, read_info

_OURS = "backbone.word.weight"
_THEIRS = tuple(each.words for each in ARCHITECTURES.values())


def recognizes(path: Path) -> bool:
    """Whether the path is a folder of shards, or has a `latest` that names one."""
    return tag_folder(Path(path)) is not None


def open_contents(
    path: Path,
    *,
    config: Path | None = None,
    eps: float | None = None,
    untied_head: str | None = None,
) -> CheckpointContents:
    """Open a model stored in shards.

    `config`: a config.json or weights.json with the encoder's config, or the folder that has one;
    by default the shards' folder or its parent. `eps` overrides the LayerNorm eps of that file;
    `untied_head`: see names.to_palm_ds_names.
    """
    path = Path(path)
    folder = tag_folder(path)
    if folder is None:
        raise UserError(f"{path}: not DeepSpeed shards: no *_model_states.pt and no latest")
    shards = open_shards(folder)
    prefix, ours = _prefix(shards)
    file = _config_file(folder, config)
    contents = (
        _ours(shards, prefix, file) if ours else _huggingface(shards, prefix, file, untied_head)
    )
    return checked(with_eps(contents, eps))


def _prefix(shards: Shards) -> tuple[str, bool]:
    """The prefix that a wrapper adds to each name, and whether the names are palm_ds's."""
    for end, ours in ((_OURS, True), *((name, False) for name in _THEIRS)):
        for name in shards.entries:
            if name == end or name.endswith("." + end):
                return name.removesuffix(end), ours
    some = ", ".join(list(shards.entries)[:3])
    raise UserError(
        f"{shards.folder}: neither a palm_ds model (no {_OURS}) nor a Hugging Face "
        f"{FAMILY_NAMES} (no {' or '.join(_THEIRS)}); it has {some}, ..."
    )


def _config_file(folder: Path, given: Path | None) -> Path:
    places = [Path(given)] if given else [folder, folder.parent]
    for place in places:
        for file in (place, place / huggingface.CONFIG, place / INFO):
            if file.is_file() and file.name in (huggingface.CONFIG, INFO):
                return file
    where = str(given) if given else f"{folder} or {folder.parent}"
    raise UserError(
        f"{folder}: the shards do not contain the encoder's config, and there is no "
        f"{huggingface.CONFIG} or {INFO} in {where}; give one with --config"
    )


def _encoder_config(file: Path) -> EncoderConfig:
    return (
        read_info(file).backbone if file.name == INFO else huggingface.read_config(file.parent)[1]
    )


def _ours(shards: Shards, prefix: str, file: Path) -> CheckpointContents:
    config = _encoder_config(file)
    inside, skipped = _within(shards, prefix)
    inside = {name: inside[name] for name in native.ordered(inside)}
    shapes = {name: entry.shape for name, entry in inside.items()}
    info = read_info(file) if file.name == INFO else None
    return CheckpointContents(
        path=shards.folder,
        format=_format(shards, "palm_ds"),
        config=_with_words(config, inside),
        entries=inside,
        heads=native.heads_of(shapes, info.token_heads if info else (), info.heads if info else {}),
        task_ids=info.task_ids if info else {},
        head_of=info.head_of if info else {},
        export_task=info.export_task if info else "",
        skipped=skipped,
        tokenizer=_tokenizer(file.parent),
        notes=shards.notes,
    )


def _huggingface(
    shards: Shards, prefix: str, file: Path, untied_head: str | None
) -> CheckpointContents:
    if file.name == INFO:
        raise UserError(
            f"{shards.folder}: has a Hugging Face model, but {file} describes a palm_ds one; give "
            "its config.json with --config"
        )
    about, config = huggingface.read_config(file.parent)
    kind = about["model_type"]
    family = FAMILIES[kind]
    inside, skipped = _within(shards, prefix.removesuffix(f"{family.tensor_prefix}."))
    entries, more = to_palm_ds_names(
        inside,
        kind,
        config,
        str(shards.folder),
        tied=config.tie_word_embeddings,
        untied_head=untied_head,
        class_name=huggingface.class_of(about),
    )
    entries = architecture_of(kind).arrange(entries, config)
    return CheckpointContents(
        path=shards.folder,
        format=_format(shards, f"Hugging Face {family.class_prefix}"),
        config=untied_config(_with_words(config, entries), entries),
        entries=entries,
        heads=huggingface.described_heads(entries, about, file),
        skipped={**skipped, **more},
        tokenizer=_tokenizer(file.parent),
        extras=Extras(config=huggingface.kept_entries(about)),
        notes=shards.notes,
    )


def _within(shards: Shards, prefix: str) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The model's tensors without the wrapper's prefix, and {skipped name: reason}."""
    inside = {n.removeprefix(prefix): e for n, e in shards.entries.items() if n.startswith(prefix)}
    outside = [name for name in shards.entries if not name.startswith(prefix)]
    why = f"outside the model, which is under {prefix}" if prefix else ""
    return inside, {**shards.skipped, **dict.fromkeys(outside, why)}


def _with_words(config: EncoderConfig, entries: Mapping[str, TensorEntry]) -> EncoderConfig:
    words = entries.get(_OURS)
    if config.vocab_size is None and words is not None:
        return replace(config, vocab_size=words.shape[0])
    return config


def _format(shards: Shards, whose: str) -> str:
    return f"DeepSpeed ZeRO {shards.stage}, {whose}"


def _tokenizer(folder: Path) -> Path | None:
    for place in (folder / "tokenizer", folder):
        if any((place / name).is_file() for name in TOKENIZER_FILES):
            return place
    return None


FORMAT = Format(
    name="deepspeed",
    looks_for="DeepSpeed: latest, or *_model_states.pt",
    recognizes=recognizes,
    open=open_contents,
)
