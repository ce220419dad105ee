"""Plans the export of an encoder and its heads to a Hugging Face folder; no value is read yet.

A bert encoder with task embeddings becomes an Ernie model. In other families the embedding of one
task is added to every row of another table, so that each token gets the same sum: to the token
types of Bert and Roberta, which leaves the token embeddings and their tied decoder unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any

import torch

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.config.encoder_kinds import is_custom
from palm_ds.model.encoder.encoder import encoder_class
from palm_ds.model.heads.outputs import HeadOutputs
from palm_ds.model.pooling import TextPooling
from palm_ds.weights.formats.contents import (
    COPY,
    NEXT_SENTENCE_CLASSES,
    Extras,
    HeadInfo,
    TensorEntry,
)
from palm_ds.weights.formats.expected_shapes import TRANSITIONS
from palm_ds.weights.formats.huggingface.architecture import (
    CLASSIFIER,
    COUNTS,
    CROSS_ENCODER,
    MASKED_WORDS,
    READING,
    TASKS,
    Names,
)
from palm_ds.weights.formats.huggingface.cross_encoder import PARTS
from palm_ds.weights.formats.huggingface.families import KIND, architecture_for, other_masked_lm
from palm_ds.weights.formats.huggingface.names import prefixed
from palm_ds.weights.formats.huggingface.read import KEPT_KEYS
from palm_ds.weights.formats.huggingface.sentence_transformers import MODULES
from palm_ds.weights.formats.huggingface.target import (
    BARE,
    DTYPES,
    ExportOptions,
    ResolvedExport,
    check_whole,
    reads_another,
    resolve_export,
)
from palm_ds.weights.formats.tensor_files import TORCH_DTYPES, TensorGroup


@dataclass(frozen=True, kw_only=True)
class ExportPlan:
    """The content of the folder to write, and its sources."""

    config_json: Mapping[str, Any]
    """The content of config.json."""
    config: EncoderConfig
    """The encoder's config as written."""
    groups: tuple[TensorGroup, ...]
    """The tensors of the model."""
    dtype: torch.dtype
    max_shard_bytes: int
    created: Mapping[str, str] = field(default_factory=dict)
    """{Hugging Face name: what in it has no source}"""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """{palm_ds name: why it, or a part of it, is skipped}"""
    extras: Extras = Extras()
    pooling: TextPooling | None = None
    """How texts become vectors, unless the files of `extras` say so."""
    embeds: bool = False
    """Whether sentence-transformers' files belong to it."""
    head: tuple[TensorGroup, ...] = ()
    """The tensors of a CrossEncoder's head, which has a file of its own (cross_encoder.py)."""

    @property
    def mapped(self) -> dict[str, tuple[tuple[str, ...], str]]:
        """{Hugging Face name: (palm_ds names, transform)}."""
        return {
            name: (group.source_names, group.transform)
            for group in (*self.groups, *self.head)
            for name in group.names
        }

    @property
    def architecture(self) -> str:
        """The class of the model."""
        return CROSS_ENCODER if self.head else self.config_json["architectures"][0]


def plan(
    entries: Mapping[str, TensorEntry],
    config: EncoderConfig,
    heads: Mapping[str, HeadInfo],
    target: ExportOptions,
    extras: Extras | None = None,
    *,
    prefix: bool = False,
) -> ExportPlan:
    """Plan a Hugging Face folder. Raises UserError if the options do not fit this encoder and
    its heads. `extras`: parts of the source's folder to keep. `prefix`: an encoder without heads
    has the base model's prefix too (`bert.`); vLLM reads its names only without it."""
    extras = extras or Extras()
    architecture_for(config)
    if not 0 <= target.task_id < max(config.task_types, 1):
        raise UserError(
            f"task_id: no row {target.task_id}; the encoder has {config.task_types} task types"
        )
    chosen = resolve_export(config, heads, target)
    check_whole(chosen, heads, entries, config)
    bare = chosen.ending == CROSS_ENCODER or (chosen.ending == BARE and not chosen.heads)
    names = _names(chosen, config, prefix=prefix or not bare)
    names |= (parts := _names_of_cross_encoder(chosen))
    wanted = [x for x in (*names, TASKS) if x in entries]
    kept = {x: replace(entries[x], source_names=(x,), transform="") for x in wanted}
    skipped = {x: _why(x, chosen, heads, config, target) for x in entries if x not in kept}
    skipped |= _copies(entries, kept, chosen)
    if config.task_types > 1 and not chosen.family.task_embedding:
        skipped[TASKS] = (
            f"its rows other than {target.task_id}, of {config.task_types}: a "
            f"{chosen.family.class_prefix} has no task embedding"
            + ("; --family ernie keeps all" if "ernie" in chosen.form.families else "")
        )
    kept |= _as_predicted(kept, heads, chosen)
    kept, new, created = chosen.form.reshape(kept, config, chosen.kind, target.task_id)
    untied = [name for name in kept if name.endswith(".decoder")]
    ties = encoder_class(new).ties_words(new)
    new = replace(new, tie_word_embeddings=ties and not untied)
    head = tuple(x for ours in parts for x in _groups(ours, kept.pop(ours), names[ours], new))
    groups = tuple(
        x for ours, entry in kept.items() for x in _groups(ours, entry, names[ours], new)
    )
    groups += tuple(x for decoder in untied for x in _decoder_bias(kept, names, decoder, new))
    dtype = _dtype(kept, target)
    return ExportPlan(
        config_json={
            **dict.fromkeys(chosen.form.published_ids),
            **{key: value for key, value in extras.config.items() if key in KEPT_KEYS},
            **_config_json(new, chosen, heads),
            "dtype": str(dtype).removeprefix("torch."),
        },
        config=new,
        groups=groups,
        dtype=dtype,
        max_shard_bytes=target.max_shard_bytes,
        created={names[ours][0]: what for ours, what in created.items()},
        skipped=skipped,
        extras=replace(extras, files={}) if head else extras,
        head=head,
        pooling=target.pooling if chosen.embeds and MODULES not in extras.files else None,
        embeds=chosen.embeds and (target.pooling is not None or MODULES in extras.files),
    )


def _names(chosen: ResolvedExport, config: EncoderConfig, *, prefix: bool) -> Names:
    """{palm_ds name: Hugging Face names}, with the source's head names, and the base model's
    prefix if asked for."""
    ours_of = {hf_name: ours for ours, hf_name in chosen.heads.items()}
    names: Names = {}
    layout = chosen.form.layout_of(chosen.kind, chosen.layout)
    for ours, hf_name in chosen.form.names(chosen.kind, config, layout).items():
        first, head, rest = ours.split(".", 2)
        if first == "heads":
            if head not in ours_of:
                continue
            ours = f"heads.{ours_of[head]}.{rest}"
        names[ours] = tuple(prefixed(x, chosen.kind) if prefix else x for x in hf_name)
    return names


def _names_of_cross_encoder(chosen: ResolvedExport) -> Names:
    """{palm_ds name of the head's parameter: its name in the head's file}, if it is one."""
    heads = chosen.heads if chosen.ending == CROSS_ENCODER else ()
    return {f"heads.{head}.out.{ours}": (x,) for head in heads for ours, x in PARTS.items()}


def _why(
    name: str,
    chosen: ResolvedExport,
    heads: Mapping[str, HeadInfo],
    config: EncoderConfig,
    target: ExportOptions,
) -> str:
    """Reason why a palm_ds parameter is skipped."""
    head = heads.get(name.split(".")[1]) if name.startswith("heads.") else None
    if name.endswith(TRANSITIONS) and head is not None:
        return f"the transitions of a CRF, which {chosen.architecture} does not have"
    words = head is not None and head.kind == "masked_words"
    if words and not chosen.family.has_masked_lm(config):
        return other_masked_lm(chosen.kind, config)
    pair = head if name.startswith(f"heads.{chosen.family.pair_head}.") else None
    if pair and chosen.embeds and reads_another(pair, chosen.kind, target):
        return f"its texts had row {pair.task_id} of the task embedding, not {target.task_id}"
    return f"no place in {chosen.architecture}"


def _copies(
    entries: Mapping[str, TensorEntry], kept: Mapping[str, TensorEntry], chosen: ResolvedExport
) -> dict[str, str]:
    """{palm_ds name: why it is skipped} of tensors that a reader of the file makes of others."""
    head_of = {its: ours for ours, its in chosen.heads.items()}
    copies = {}
    for name, source in chosen.form.shared.items():
        first, head, rest = source.split(".", 2)
        source = f"{first}.{head_of.get(head, head)}.{rest}"
        unwritten = name in entries and name not in kept and source in kept
        if unwritten and torch.equal(entries[name].read(), kept[source].read()):
            copies[name] = COPY + source
    return copies


def _groups(
    ours: str, entry: TensorEntry, hf_name: tuple[str, ...], config: EncoderConfig
) -> Iterator[TensorGroup]:
    """The tensors of a file that one of ours is split into, a group for those of one shape."""
    stacked = {x.path: x.stacked for x in encoder_class(config).matrices(config)}
    shares = stacked.get(".".join(ours.split(".")[3:-1]), (1,))
    shares = shares if len(shares) == len(hf_name) else (1,) * len(hf_name)
    rows = [entry.shape[0] * share // sum(shares) for share in shares]
    for size in dict.fromkeys(rows):
        places = [place for place, x in enumerate(rows) if x == size]
        yield TensorGroup(
            names=tuple(hf_name[place] for place in places),
            shape=(size, *entry.shape[1:]),
            make=partial(_parts, entry, rows, places),
            source_names=entry.source_names,
            transform=entry.transform if len(hf_name) == 1 else f"one of {COUNTS[len(hf_name)]}",
        )


def _parts(entry: TensorEntry, rows: Sequence[int], places: Sequence[int]) -> list[torch.Tensor]:
    parts = entry.read().split(list(rows))
    return [parts[place] for place in places]


def _decoder_bias(
    kept: Mapping[str, TensorEntry], names: Names, decoder: str, config: EncoderConfig
) -> tuple[TensorGroup, ...]:
    """The head's bias once more, if it has another name: transformers computes with an untied
    decoder's own."""
    bias = decoder.removesuffix("decoder") + "bias"
    if bias not in names:
        return ()
    name = names[decoder][0].removesuffix("weight") + "bias"
    if names[bias] == (name,):
        return ()
    return tuple(_groups(bias, kept[bias], (name,), config))


def _dtype(kept: Mapping[str, TensorEntry], target: ExportOptions) -> torch.dtype:
    if target.dtype:
        return TORCH_DTYPES[target.dtype]
    types = [entry.read().dtype for entry in kept.values()]
    dtype = reduce(torch.promote_types, types)  # a mixture loses nothing
    if dtype not in (TORCH_DTYPES[name] for name in DTYPES):
        raise UserError(f"dtype: cannot write {dtype}; give one of {', '.join(DTYPES)}")
    return dtype


def _config_json(
    config: EncoderConfig, chosen: ResolvedExport, heads: Mapping[str, HeadInfo]
) -> dict[str, Any]:
    """The content of config.json."""
    values = {
        "architectures": [chosen.architecture],
        "model_type": chosen.kind,
        **chosen.form.config_json(config, chosen.kind),
        **({KIND: config.kind} if is_custom(config.kind) else {}),
    }
    for ours, hf_name in chosen.heads.items():
        if hf_name == CLASSIFIER and chosen.ending != "ForMultipleChoice":
            values |= _labels(heads[ours])
            values |= _problem_type(heads[ours], chosen)
        reading = heads[ours].outputs.reading
        if hf_name == MASKED_WORDS and reading != "masked":
            values[READING] = reading
    return values


def _problem_type(head: HeadInfo, chosen: ResolvedExport) -> dict[str, str]:
    """The problem type, which selects the function that transformers applies to a text's scores."""
    of_texts = chosen.ending in ("ForSequenceClassification", CROSS_ENCODER)
    known = head.outputs.problem_type and of_texts
    return {"problem_type": head.outputs.problem_type} if known else {}


def _labels(head: HeadInfo) -> dict[str, Any]:
    names = head.outputs.labels
    if names == NEXT_SENTENCE_CLASSES:
        names = names[::-1]  # as _meant turns its parameters
    names = names or tuple(f"LABEL_{i}" for i in range(head.exported_classes))
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }


# ---- heads whose scores differ from the predictions ----


def _as_predicted(
    kept: Mapping[str, TensorEntry], heads: Mapping[str, HeadInfo], chosen: ResolvedExport
) -> dict[str, TensorEntry]:
    """The parameters of heads whose scores other programs interpret differently: standardized
    numbers, palm_ds's next-sentence task, and a relevance, which is one score in a reranker."""
    changed = {}
    for name in chosen.heads:
        for end in ("weight", "bias") if heads[name].kind == "classes" else ():
            entry = kept[f"heads.{name}.out.{end}"]
            changed[f"heads.{name}.out.{end}"] = _meant(entry, end, heads[name].outputs)
    return changed


def _meant(entry: TensorEntry, end: str, outputs: HeadOutputs) -> TensorEntry:
    if outputs.labels == NEXT_SENTENCE_CLASSES:
        return replace(entry, read=lambda: entry.read().flip(0), transform="classes reversed")
    if outputs.relevance:
        return replace(
            entry,
            shape=(1, *entry.shape[1:]),
            read=lambda: entry.read().double().diff(dim=0).float(),
            transform="the second row minus the first",
        )
    if not outputs.scaled:
        return entry
    added = outputs.mean if end == "bias" else 0.0
    how = f"times the deviation {outputs.deviation:g}"
    return replace(
        entry,
        read=lambda: (entry.read().double() * outputs.deviation + added).float(),
        transform=f"{how}, plus the mean {outputs.mean:g}" if end == "bias" else how,
    )
