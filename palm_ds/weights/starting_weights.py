"""Weights of one encoder as the start of another: some layers of a larger one (`init_layers` of a
recipe), and a task embedding or more token types for one without them, such as a BERT that
continues with ERNIE 2.0's tasks.

    init_layers: [0, 5, 11]    layer 0 from layer 0, 1 from 5, 2 from 11; embeddings, pooler, heads
    init_layers: []            the embeddings, pooler and heads alone
    the same, `kind: cnn`      the word (and token type) embeddings alone

Weights are taken as they are, so both hidden sizes must be equal. Of tables with another number of
rows, positions and token types, the first rows are taken. Words of another vocabulary, and a task
embedding of another size, are not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import encoder_class

_LAYER = re.compile(r"backbone\.layers\.(\d+)\.(.+)")
_WORDS, _TASKS = "backbone.word.weight", "backbone.task.weight"
_SEGMENTS = "backbone.segment.weight"
_TABLES = {"backbone.position.weight": "positions", _SEGMENTS: "token types"}

State = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class ChosenWeights:
    """Weights under the names of the smaller model."""

    state: dict[str, torch.Tensor]
    config: EncoderConfig
    """The source's, with the sizes that may differ as the smaller model has them."""
    notes: tuple[str, ...]


def choose_layers(
    state: State,
    source: EncoderConfig,
    own: State,
    target: EncoderConfig,
    *,
    layers: Sequence[int],
    folder: Path,
    masked_words: Sequence[str] = (),
) -> ChosenWeights:
    """The weights `state` of an encoder `source` for an encoder `target`, whose new weights are
    `own`. `masked_words`: the source's masked-LM heads. Raises UserError if they do not fit."""
    if not encoder_class(target).takes_layers:
        return _words_only(state, own, target, layers=layers, folder=folder)
    _check(source, target, layers, folder)
    kept, notes = _renamed(state, layers), [_layers_note(layers, source)]
    for name, what in _TABLES.items():
        if name in kept and name in own and len(kept[name]) != len(own[name]):
            rows = min(len(kept[name]), len(own[name]))
            kept[name] = torch.cat([kept[name][:rows].to(own[name]), own[name][rows:]])
            notes.append(f"{what}: {rows} of {len(own[name])} rows from {folder}")
    if source.vocab_size != target.vocab_size:
        dropped = (_WORDS, *(f"heads.{head}." for head in masked_words))
        kept = {name: item for name, item in kept.items() if not name.startswith(dropped)}
        notes.append(f"words: another vocabulary ({source.vocab_size} tokens), newly initialized")
    if source.task_types != target.task_types:
        kept.pop(_TASKS, None)
        notes.append(f"task embedding: {source.task_types} rows, not taken")
    kind = encoder_class(target)
    sharing = {x: y for x, y in target.options.items() if x in kind.sharing_options}
    same = replace(
        source,
        vocab_size=target.vocab_size,
        num_layers=target.num_layers,
        max_positions=target.max_positions,
        token_types=target.token_types,
        task_types=target.task_types,
        options={x: y for x, y in source.options.items() if x not in kind.sharing_options}
        | sharing,
    )
    return ChosenWeights(state=kept, config=same, notes=tuple(notes))


def _check(
    source: EncoderConfig, target: EncoderConfig, layers: Sequence[int], folder: Path
) -> None:
    if source.kind != target.kind:
        raise UserError(
            f"init_layers: {folder} is {source.kind}, this encoder is {target.kind}; both must be "
            "of the same kind"
        )
    if source.hidden_size != target.hidden_size:
        raise UserError(
            f"init_layers: {folder} has hidden_size {source.hidden_size}, this encoder has "
            f"{target.hidden_size}; weights are taken as they are, so both must be equal"
        )
    kind = encoder_class(target)
    there, here = kind.own_layers(source), kind.own_layers(target)
    for number in layers:
        if not 0 <= number < there:
            raise UserError(f"init_layers: no layer {number}; {folder} has layers 0 to {there - 1}")
    for place, number in enumerate(layers[:here]):
        if not kind.fits_place(source, number, target, place):
            fits = [x for x in range(there) if kind.fits_place(source, x, target, place)]
            right = f"one of {', '.join(map(str, fits))}" if fits else "none of its layers"
            raise UserError(
                f"init_layers: layer {number} of {folder} does not compute what layer {place} here "
                f"does (its window, positions or norms); {right} does"
            )
    if layers and len(layers) != here:
        raise UserError(
            f"init_layers: {len(layers)} layers, but backbone.num_layers is {here}; give one for "
            "each, or none"
            if here == target.num_layers
            else f"init_layers: {len(layers)} layers, but {here} have weights of their own "
            "(backbone.options); give one for each of these, or none"
        )


def _renamed(state: State, layers: Sequence[int]) -> dict[str, torch.Tensor]:
    """Only the chosen layers, under their new numbers; one may be chosen twice."""
    kept = {}
    for name, tensor in state.items():
        if not (match := _LAYER.fullmatch(name)):
            kept[name] = tensor
            continue
        for number, chosen in enumerate(layers):
            if chosen == int(match[1]):
                kept[f"backbone.layers.{number}.{match[2]}"] = tensor
    return kept


def _layers_note(layers: Sequence[int], source: EncoderConfig) -> str:
    if not layers:
        return f"layers: none of {source.num_layers}"
    of = encoder_class(source).own_layers(source)
    return f"layers {', '.join(map(str, layers))} of {of}"


def _words_only(
    state: State, own: State, target: EncoderConfig, *, layers: Sequence[int], folder: Path
) -> ChosenWeights:
    """For an encoder without attention: its word and token type embeddings."""
    if layers:
        raise UserError(
            f"init_layers: a transformer's layers do not fit {target.kind}; [] takes the word "
            "embeddings"
        )
    there, here = state[_WORDS].shape, own[_WORDS].shape
    if there != here:
        key = "backbone.options.embedding_size" if there[0] == here[0] else "the vocabulary"
        raise UserError(
            f"init_layers: the word embeddings of {folder} have shape {tuple(there)}, those of "
            f"this encoder {tuple(here)}; {key} must be the same"
        )
    names = [_WORDS, _SEGMENTS]
    fits = [
        name
        for name in names
        if name in state and name in own and state[name].shape == own[name].shape
    ]
    kept = {name: state[name] for name in fits}
    return ChosenWeights(state=kept, config=target, notes=("the word embeddings alone",))


def expand_embeddings(
    source: EncoderConfig, state: Mapping[str, torch.Tensor], target: EncoderConfig, folder: Path
) -> tuple[EncoderConfig, dict[str, torch.Tensor], list[str]]:
    """The config, tables and notes of an encoder that gets a task embedding or more token types.
    Its outputs are the same at first, whatever the task: rows of the task embedding are zeros, new
    token types are copies of the last one."""
    tables, notes, kind = {}, [], encoder_class(target)
    known, width = kind.is_specified(), kind.embedding_width(target)  # else unknown
    if known and target.task_types and not source.task_types:
        tables[_TASKS] = torch.zeros(target.task_types, width)
        source = replace(source, task_types=target.task_types)
        notes.append(
            f"task embedding: {folder} has none; {target.task_types} rows of zeros are added (if "
            "it is the hf/ of a run: its weights/ has them)"
        )
    new = target.token_types - source.token_types
    if known and new > 0 and _SEGMENTS in state:
        table = state[_SEGMENTS]
        tables[_SEGMENTS] = torch.cat([table, table[-1:].expand(new, -1)])
        notes.append(f"token types: {new} like the last of {source.token_types} are added")
        source = replace(source, token_types=target.token_types)
    return source, tables, notes
