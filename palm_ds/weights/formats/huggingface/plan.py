"""How an encoder and its heads become a Hugging Face folder, before any value is read.

An encoder with task embeddings is an Ernie model. As a Bert or Roberta model it takes the embedding
of one task with it, added to every segment's: the same sum for each token; the word table, and the
decoder tied to it, stay as they are. Positions that a family counts from elsewhere are moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from palm_ds.common.errors import UserError
from palm_ds.model.config import EncoderConfig
from palm_ds.weights.formats.contents import Entry, Head
from palm_ds.weights.formats.expected_shapes import TRANSITIONS
from palm_ds.weights.formats.huggingface.families import FAMILIES, other_masked_lm
from palm_ds.weights.formats.huggingface.names import CLASSIFIER, Names, prefixed, table
from palm_ds.weights.formats.huggingface.target import (
    DTYPES,
    Chosen,
    Target,
    check_whole,
    choose,
)
from palm_ds.weights.formats.tensor_files import TORCH_DTYPES, Group


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a folder will hold, and what it is made of."""

    about: Mapping[str, Any]
    """config.json."""
    config: EncoderConfig
    """The encoder's numbers, as it is written."""
    groups: tuple[Group, ...]
    dtype: torch.dtype
    most: int
    created: Mapping[str, str] = field(default_factory=dict)
    """{their name: what is in it that none of ours had}"""
    left: Mapping[str, str] = field(default_factory=dict)
    """{our name: why it stays behind}"""

    @property
    def mapped(self) -> dict[str, tuple[tuple[str, ...], str]]:
        """{their name: (ours, what is done to them)}."""
        return {name: (group.ours, group.how) for group in self.groups for name in group.names}

    @property
    def architecture(self) -> str:
        """The class of the model."""
        return self.about["architectures"][0]


def plan(
    entries: Mapping[str, Entry],
    config: EncoderConfig,
    heads: Mapping[str, Head],
    target: Target,
) -> Plan:
    """What a Hugging Face folder takes, under which names. Raises UserError where the target is
    not for this encoder and these heads."""
    if config.kind:
        raise UserError(f"Hugging Face has no encoder like {config.kind}, a class of one's own")
    if not 0 <= target.task_id < max(config.task_types, 1):
        raise UserError(f"task_id: {target.task_id} is none of {config.task_types} task slots")
    chosen = choose(config, heads, target)
    check_whole(chosen, heads, entries, config)
    names = _names(chosen, config.num_layers)
    kept = {x: replace(entries[x], theirs=(x,), how="") for x in names if x in entries}
    left = {x: _why(x, chosen, heads, config) for x in entries if x not in kept}
    kept, new, created = _reshaped(kept, config, chosen.kind, target)
    groups = tuple(_group(entry, names[ours]) for ours, entry in kept.items())
    dtype = _dtype(kept, target)
    return Plan(
        about=_about(new, chosen, heads) | {"dtype": str(dtype).removeprefix("torch.")},
        config=new,
        groups=groups,
        dtype=dtype,
        most=target.most,
        created={names[ours][0]: what for ours, what in created.items()},
        left=left,
    )


def _names(chosen: Chosen, layers: int) -> Names:
    """{our name: theirs}, with our heads' own names and their prefixes."""
    ours_of = {theirs: ours for ours, theirs in chosen.heads.items()}
    names: Names = {}
    for ours, theirs in table(chosen.kind, layers, own_dense=chosen.own_dense).items():
        first, head, rest = ours.split(".", 2)
        if first == "heads":
            if head not in ours_of:
                continue
            ours = f"heads.{ours_of[head]}.{rest}"
        names[ours] = tuple(prefixed(name, chosen.kind) for name in theirs)
    return names


def _why(name: str, chosen: Chosen, heads: Mapping[str, Head], config: EncoderConfig) -> str:
    """Why something of ours stays behind."""
    head = heads.get(name.split(".")[1]) if name.startswith("heads.") else None
    if name.endswith(TRANSITIONS) and head is not None:
        return f"the transitions of a CRF, which {chosen.architecture} does not have"
    words = head is not None and head.kind == "masked_words"
    if words and not FAMILIES[chosen.kind].has_masked_lm(config.activation):
        return other_masked_lm(chosen.kind, config.activation)
    return f"no place in {chosen.architecture}"


def _group(entry: Entry, theirs: tuple[str, ...]) -> Group:
    rows, *rest = entry.shape
    return Group(
        names=theirs,
        shape=(rows // len(theirs), *rest),
        make=lambda: entry.read().chunk(len(theirs)),
        ours=entry.theirs,
        how=entry.how if len(theirs) == 1 else "one of three",
    )


def _dtype(kept: Mapping[str, Entry], target: Target) -> torch.dtype:
    if target.dtype:
        return TORCH_DTYPES[target.dtype]
    found = kept["backbone.word.weight"].read().dtype
    if found not in (TORCH_DTYPES[name] for name in DTYPES):
        raise UserError(f"dtype: the weights are {found}; give one of {', '.join(DTYPES)}")
    return found


def _about(config: EncoderConfig, chosen: Chosen, heads: Mapping[str, Head]) -> dict[str, Any]:
    """The content of config.json. transformers takes no 1 for 1.0 there."""
    values = {
        "architectures": [chosen.architecture],
        "model_type": chosen.kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.feed_forward_size,
        "hidden_act": config.activation,
        "hidden_dropout_prob": float(config.dropout),
        "attention_probs_dropout_prob": float(config.attention_dropout),
        "max_position_embeddings": config.max_positions,
        "type_vocab_size": config.token_types,
        "initializer_range": float(config.init_range),
        "layer_norm_eps": float(config.layer_norm_eps),
        "pad_token_id": config.pad,
        "tie_word_embeddings": True,
    }
    if FAMILIES[chosen.kind].task_embedding:
        values["use_task_id"] = bool(config.task_types)
        if config.task_types:
            values["task_type_vocab_size"] = config.task_types
    for ours, theirs in chosen.heads.items():
        if theirs == CLASSIFIER and chosen.ending != "ForMultipleChoice":
            values |= _labels(heads[ours])
    return values


def _labels(head: Head) -> dict[str, Any]:
    names = head.labels or tuple(f"LABEL_{i}" for i in range(head.classes))
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }


# ---- reshaping ----


def _reshaped(
    kept: Mapping[str, Entry], config: EncoderConfig, kind: str, target: Target
) -> tuple[dict[str, Entry], EncoderConfig, dict[str, str]]:
    """The entries and the numbers of the model that is written; {our name: what was created}."""
    result, created = dict(kept), {}
    family = FAMILIES[kind]
    if config.task_types and family.task_embedding and target.task_id:
        name = "backbone.task.weight"
        result[name] = _swapped(kept[name], target.task_id)
    if config.task_types and not family.task_embedding:
        task, name = result.pop("backbone.task.weight"), "backbone.segment.weight"
        result[name] = _folded(kept[name], task, target.task_id)
        config = replace(config, task_types=0)
    offset = family.position_offset(config.pad)
    if more := offset - config.position_offset:
        name = "backbone.position.weight"
        result[name] = _moved(kept[name], more)
        if more > 0:
            created[name] = f"{more} rows of zeros in front, for positions that no token has"
        config = replace(config, max_positions=config.max_positions + more, position_offset=offset)
    return result, config, created


def _swapped(rows: Entry, row: int) -> Entry:
    """Hugging Face fills in task 0 where a caller gives none: that is then the task of choice."""
    order = list(range(rows.shape[0]))
    order[0], order[row] = row, 0
    how = f"rows 0 and {row} have changed places"
    return Entry(theirs=rows.theirs, shape=rows.shape, read=lambda: rows.read()[order], how=how)


def _folded(segments: Entry, task: Entry, row: int) -> Entry:
    """Every text is of this task: what that adds to each token is added to each segment's row."""
    return Entry(
        theirs=segments.theirs + task.theirs,
        shape=segments.shape,
        read=lambda: segments.read().float() + task.read()[row].float(),
        how=f"row {row} of the task embedding folded in",
    )


def _moved(positions: Entry, more: int) -> Entry:
    """Begins so many rows later (of zeros, in front), or earlier (without its first rows, which no
    token has)."""
    rows, width = positions.shape

    def read() -> torch.Tensor:
        found = positions.read()
        return torch.cat([found.new_zeros(more, width), found]) if more > 0 else found[-more:]

    how = f"{more} rows of zeros in front" if more > 0 else f"without its first {-more} rows"
    return Entry(theirs=positions.theirs, shape=(rows + more, width), read=read, how=how)
