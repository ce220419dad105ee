"""Maps parameter names between palm_ds and Hugging Face.

The names are those of an architecture (architectures/), in one table for both directions; here are
the rules that all share: prefixes of wrappers, tied tensors, tensors that are parts of one of ours.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from palm_ds.common.errors import UserError, suggest
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import encoder_class
from palm_ds.weights.formats.contents import BUFFER, COPY, HeadInfo, TensorEntry
from palm_ds.weights.formats.huggingface.architecture import (
    CLASSIFIER,
    COUNTS,
    MASKED_WORDS,
    PAIR_HEADS,
    QUESTION_ANSWERING,
    REPLACED_TOKENS,
    Architecture,
)
from palm_ds.weights.formats.huggingface.families import FAMILIES, architecture_of
from palm_ds.weights.formats.tensor_files import TORCH_DTYPES

State = dict[str, torch.Tensor]

UNTIED_HEAD = ("keep", "skip")
_WRAPPERS = ("_orig_mod", "model", "module")


def wrappers(kind: str) -> re.Pattern[str]:
    """Prefixes that torch.compile, Lightning and DistributedDataParallel put before a parameter's
    name. A word that is also the base model's prefix is not one of them."""
    words = "|".join(x for x in _WRAPPERS if x != FAMILIES[kind].tensor_prefix)
    return re.compile(rf"^(?:(?:{words})\.)+|(?<=\.)_orig_mod\.")


def prefixed(name: str, kind: str) -> str:
    """The name in a file: parameters of the base model start with its name."""
    outside = name.split(".")[0] in architecture_of(kind).heads
    return name if outside else f"{FAMILIES[kind].tensor_prefix}.{name}"


def heads_in(entries: Mapping[str, TensorEntry], *, pooled: Collection[str]) -> dict[str, HeadInfo]:
    """The heads with the names above. `pooled`: classification heads that read the pooled text."""
    heads = {}
    if {f"heads.{MASKED_WORDS}.{part}" for part in ("bias", "decoder")} & entries.keys():
        heads[MASKED_WORDS] = HeadInfo(kind="masked_words", pooled=False)
    if f"heads.{REPLACED_TOKENS}.out.weight" in entries:
        heads[REPLACED_TOKENS] = HeadInfo(kind="replaced_tokens", pooled=False)
    for name in (*PAIR_HEADS, CLASSIFIER, QUESTION_ANSWERING):
        if out := entries.get(f"heads.{name}.out.weight"):
            classes = out.shape[0] if out.shape else 0
            heads[name] = HeadInfo(kind="classes", classes=classes, pooled=name in pooled)
    return heads


# ---- Hugging Face to palm_ds ----


def to_palm_ds_names(
    stored: Mapping[str, TensorEntry],
    kind: str,
    config: EncoderConfig,
    where: str,
    *,
    tied: bool = True,
    untied_head: str | None = None,
    class_name: str = "",
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """({palm_ds name: entry}, {source name: why it is skipped}) of the tensors of a file.

    `where` is the prefix of messages, `kind` the model type, `class_name` what config.json calls
    the model's class. `tied`: config.json's `tie_word_embeddings`. `untied_head`:
    whether to keep (by default) or skip a masked-LM head with its own output embeddings. Raises
    UserError, also if a tensor appears under two names, or if embeddings that config.json ties
    differ.
    """
    untied_head = untied_head or "keep"
    if untied_head not in UNTIED_HEAD:
        raise UserError(f"untied_head: no {untied_head!r}{suggest(untied_head, UNTIED_HEAD)}")
    layers = encoder_class(config).own_layers(config)
    if layers > len(stored):  # checked before building as many names as the file claims
        what = f"its configuration has {layers} layers, but there are only {len(stored)} tensors"
        raise UserError(f"{where}: incomplete: {what}")
    form, hf_entries = architecture_of(kind), _clean_names(stored, kind, where)
    skipped = {
        hf_entries.pop(name).source_names[0]: BUFFER
        for name in form.constants(config)
        if name in hf_entries
    }
    if not tied and untied_head == "keep" and _has_own_decoder(hf_entries, form):
        skipped |= _use_own_bias(hf_entries, form)
    else:
        copies, untied = _drop_tied(hf_entries, form)
        skipped |= copies
        if untied and untied_head == "keep":
            raise UserError(
                f"{where}: {untied} differs from {form.tied[untied]}, but config.json does not say "
                "that the masked-LM head has its own output embeddings; set tie_word_embeddings to "
                "false there, or leave the head out with untied_head: skip (--untied_head skip)"
            )
        if untied:
            skipped |= _drop_masked_lm(hf_entries, form)
    layout = form.layout_in(hf_entries, class_name)
    entries: dict[str, TensorEntry] = {}
    for palm_name, names in form.names(kind, config, layout).items():
        if missing := [name for name in names if name not in hf_entries]:
            if len(missing) < len(names):
                raise UserError(f"{where}: incomplete, it has no {prefixed(missing[0], kind)}")
            continue
        entries[palm_name] = _joined([hf_entries.pop(name) for name in names], where)
    return form.complete(entries), skipped | {
        entry.source_names[0]: _why(name) for name, entry in sorted(hf_entries.items())
    }


def lost(skipped: Mapping[str, str]) -> list[str]:
    """Names of the skipped tensors whose values are lost."""
    return sorted(name for name, why in skipped.items() if not why.startswith((BUFFER, COPY)))


def _joined(parts: Sequence[TensorEntry], where: str) -> TensorEntry:
    """One palm_ds entry from one Hugging Face tensor, or from several stacked by rows."""
    if len(parts) == 1:
        return replace(parts[0], read=lambda: _values(parts[0], where))
    rows = sum(part.shape[0] if part.shape else 0 for part in parts)
    how = ", ".join([f"{COUNTS[len(parts)]} in one", *filter(None, [parts[0].transform])])
    return TensorEntry(
        source_names=tuple(name for part in parts for name in part.source_names),
        shape=(rows, *parts[0].shape[1:]),
        read=lambda: torch.cat([_values(part, where) for part in parts]),
        transform=how,
    )


def _values(entry: TensorEntry, where: str) -> torch.Tensor:
    """The values; refuses quantized weights, whose scales are in other tensors."""
    values = entry.read()
    if values.dtype not in TORCH_DTYPES.values():
        raise UserError(
            f"{where}: {entry.source_names[0]} is {values.dtype}; expected floating-point values"
        )
    return values


def _why(name: str) -> str:
    if name.startswith("pooler."):
        return "the classifier has its own dense layer in place of the pooler"
    return "no place in this encoder and its heads"


def _clean_names(
    stored: Mapping[str, TensorEntry], kind: str, where: str
) -> dict[str, TensorEntry]:
    """Names without the prefixes of wrappers and the base model, and LayerNorm's gamma and beta as
    weight and bias."""
    clean: dict[str, TensorEntry] = {}
    prefix, wrapped = f"{FAMILIES[kind].tensor_prefix}.", wrappers(kind)
    for name, entry in stored.items():
        short = wrapped.sub("", name)
        for start in (prefix, *architecture_of(kind).other_prefixes):
            short = short.removeprefix(start)
        short = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", short)
        short = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", short)
        if short in clean:
            raise UserError(
                f"{where}: {name} and {clean[short].source_names[0]} are the same parameter"
            )
        clean[short] = entry
    return clean


def _drop_tied(
    hf_entries: dict[str, TensorEntry], form: Architecture
) -> tuple[dict[str, str], str]:
    """({source name of a copy: why it is skipped}, the first that is not a copy, if any)."""
    skipped, untied = {}, ""
    for name, source in form.tied.items():
        copy = hf_entries.pop(name, None)
        if copy is None:
            continue
        if source not in hf_entries:
            hf_entries[source] = copy
            continue
        if _same(copy, hf_entries[source]):
            skipped[copy.source_names[0]] = COPY + hf_entries[source].source_names[0]
        else:
            hf_entries[name], untied = copy, untied or name
    return skipped, untied


def untied_config(config: EncoderConfig, entries: Collection[str]) -> EncoderConfig:
    """The config of a file, whose masked-LM head may have its own output embeddings."""
    ties = encoder_class(config).ties_words(config)
    tied = ties and f"heads.{MASKED_WORDS}.decoder" not in entries
    return replace(config, tie_word_embeddings=tied)


def _has_own_decoder(hf_entries: Mapping[str, TensorEntry], form: Architecture) -> bool:
    """Whether a masked-LM head computes otherwise than with the token embeddings and its bias."""
    pairs = [(hf_entries.get(name), hf_entries.get(source)) for name, source in form.tied.items()]
    return any(one and other and not _same(one, other) for one, other in pairs)


def _use_own_bias(hf_entries: dict[str, TensorEntry], form: Architecture) -> dict[str, str]:
    """Make the bias of an untied decoder, with which transformers computes, the head's; {source
    name: why it is skipped}."""
    skipped = {}
    for decoders, name in form.tied.items():
        own = hf_entries.pop(decoders, None) if decoders.endswith(".bias") else None
        if own is None:
            continue
        if other := hf_entries.get(name):
            why = COPY + own.source_names[0] if _same(own, other) else "the decoder has its own"
            skipped[other.source_names[0]] = why
        hf_entries[name] = own
    return skipped


def _drop_masked_lm(hf_entries: dict[str, TensorEntry], form: Architecture) -> dict[str, str]:
    """{source name: why it is skipped} of a masked-LM head."""
    names = [name for name in hf_entries if name.startswith(form.masked_lm)]
    why = "of a masked-LM head with untied output embeddings, which is left out as requested"
    return {hf_entries.pop(name).source_names[0]: why for name in names}


def _same(one: TensorEntry, other: TensorEntry) -> bool:
    return one.shape == other.shape and torch.equal(one.read(), other.read())
