"""Resizes the embedding tables of a trained encoder: more or fewer tokens and positions.

    add_token_rows     rows for new tokens; the table grows as needed
    pad_vocab          rounds the number of rows to a multiple; used rows are always kept
    resize_positions   a longer or shorter maximum length

Each takes parameters by palm_ds name and the encoder's config, modifies neither, and returns new
ones with a one-line summary. Existing inputs give the same outputs as before, because used rows
keep their values; only interpolated positions change meaning. The bias of every masked-LM head is
resized with the token embeddings, and so are the tables of a generator of replaced tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from palm_ds.common.errors import UserError, suggest
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import encoder_class, memory_shape

State = Mapping[str, torch.Tensor]

WORDS, POSITIONS = "backbone.word.weight", "backbone.position.weight"
_HEAD = r"heads\.[^.]+"
_WORDS = re.compile(rf"{re.escape(WORDS)}|{_HEAD}\.generator\.encoder\.word\.weight")
_POSITIONS = re.compile(rf"{re.escape(POSITIONS)}|{_HEAD}\.generator\.encoder\.position\.weight")
_DECODER = re.compile(rf"{_HEAD}(\.generator\.words)?\.decoder")
"""The output embeddings of a masked-LM head that has its own."""
_BIAS = re.compile(rf"{_HEAD}(\.generator\.words)?\.bias")
"""Of a masked-LM head alone: a classification head has heads.NAME.out.bias."""
HOW = ("tile", "interpolate")
MOST_MULTIPLE, MOST_POSITIONS = 1 << 16, 1 << 17


@dataclass(frozen=True, kw_only=True)
class ResizedState:
    """Parameters and config after resizing; unaffected tensors are passed through."""

    state: dict[str, torch.Tensor]
    config: EncoderConfig
    summary: str


def resizable_names(names: Iterable[str]) -> list[str]:
    """The parameters that the functions here need from a checkpoint."""
    known = (_WORDS, _POSITIONS, _DECODER, _BIAS)
    return [name for name in names if any(each.fullmatch(name) for each in known)]


# ---- tokens ----


def add_token_rows(
    state: State,
    config: EncoderConfig,
    rows: Mapping[int, Sequence[int]],
    *,
    used: int,
    seed: int = 0,
) -> ResizedState:
    """Add new tokens. `rows`: {row: rows to initialize it from, as their mean; empty: at random}.

    `used`: size of the old vocabulary; a new row below it replaces a placeholder such as [unused1].
    The masked-LM bias is the mean over the same rows, or over all used rows for a random row. Rows
    in the gaps between new tokens are initialized as in `pad_vocab`. Raises UserError if a source
    row does not exist.
    """
    table = _table(state, WORDS, config.vocab_size)
    _check_used(used, len(table), config)
    for row, like in rows.items():
        if wrong := [i for i in like if not 0 <= i < used]:
            raise UserError(
                f"token {row}: cannot be initialized from row {wrong[0]}; the vocabulary has "
                f"{used} tokens"
            )
        if row < 0:
            raise UserError(f"token {row}: row numbers start at 0")
    size = max(len(table), 1 + max(rows, default=0))
    grown = _with_rows(state, config, size, used, seed)
    for name in _word_tables(state, len(table)):
        new, old = grown[name], state[name][:used].double()
        drawn = iter(() if _BIAS.fullmatch(name) else _drawn(len(rows), old, config, seed + 1))
        for row, like in rows.items():
            new[row] = old[list(like)].mean(0) if like else next(drawn, old.mean(0))
    means = sum(1 for like in rows.values() if like)
    beyond = sum(1 for row in rows if used <= row < len(table))
    summary = (
        f"tokens: {len(rows)} added, {means} initialized as the mean of others, "
        f"{len(rows) - means} at random; {sum(row < used for row in rows)} in rows of unused "
        f"tokens, {beyond} in free rows beyond the vocabulary; {len(table)} rows, now {size}"
    )
    return ResizedState(state=grown, config=replace(config, vocab_size=size), summary=summary)


def pad_vocab(
    state: State, config: EncoderConfig, *, used: int, multiple: int = 1, seed: int = 0
) -> ResizedState:
    """Resize to the smallest multiple that holds all `used` rows.

    New rows are random. No text contains them, and their masked-LM bias is the minimum over the
    used rows, so they take no more probability than the least likely token.
    """
    table = _table(state, WORDS, config.vocab_size)
    _check_used(used, len(table), config)
    if not 1 <= multiple <= MOST_MULTIPLE:
        raise UserError(f"multiple: must be from 1 to {MOST_MULTIPLE:,}, got {multiple}")
    size = -(-used // multiple) * multiple
    new = _with_rows(state, config, size, used, seed)
    did = {-1: "removed", 0: "changed", 1: "added"}[(size > len(table)) - (size < len(table))]
    summary = (
        f"tokens: {len(table)} rows, now {size}, a multiple of {multiple}: "
        f"{abs(size - len(table))} {did}; {used} in use"
    )
    return ResizedState(state=new, config=replace(config, vocab_size=size), summary=summary)


def _with_rows(
    state: State, config: EncoderConfig, size: int, used: int, seed: int
) -> dict[str, torch.Tensor]:
    """A copy of the state with `size` rows in every per-token table."""
    table = state[WORDS]
    more = max(size - len(table), 0)
    new = dict(state)
    for name in _word_tables(state, len(table)):
        old = state[name]
        if _BIAS.fullmatch(name):
            extra = old[:used].min().expand(more)
        else:
            extra = _drawn(more, old, config, seed).to(old.dtype)
        new[name] = torch.cat([old[:size], extra])
    return new


def _drawn(count: int, like: torch.Tensor, config: EncoderConfig, seed: int) -> torch.Tensor:
    """(count, hidden): initialized as in a new model."""
    rows = torch.empty(count, like.shape[1])
    generator, deviation = torch.Generator().manual_seed(seed), config.init_range
    return nn.init.trunc_normal_(
        rows, std=deviation, a=-2 * deviation, b=2 * deviation, generator=generator
    )


def _word_tables(state: State, words: int) -> list[str]:
    """Names of the tables with one entry per token: the embeddings, those of untied masked-LM
    heads, and the biases of these heads."""
    found = [x for x in state if any(y.fullmatch(x) for y in (_WORDS, _DECODER, _BIAS))]
    for name in found:
        if len(state[name]) != words:
            raise UserError(f"{name}: has {len(state[name])} values for {words} tokens")
    return found


def _check_used(used: int, rows: int, config: EncoderConfig) -> None:
    if not config.pad < used <= rows:
        raise UserError(
            f"{WORDS}: has {rows} rows, which do not fit a vocabulary of {used} with padding at "
            f"{config.pad}"
        )


def _table(state: State, name: str, rows: int | None) -> torch.Tensor:
    table = state.get(name)
    if table is None:
        raise UserError(f"{name}: is missing")
    if table.ndim != 2 or (rows is not None and len(table) != rows):
        raise UserError(f"{name}: has shape {tuple(table.shape)}, the config expects {rows} rows")
    return table


# ---- positions ----


def resize_positions(
    state: State, config: EncoderConfig, longest: int, *, how: str = "tile"
) -> ResizedState:
    """Resize to texts of `longest` tokens, special tokens included.

    Shorter: the last rows are removed. Longer, `tile`: the rows are repeated from the first, so
    texts of the old length give the same outputs and each new position has familiar neighbors
    (Longformer, section 5). Longer, `interpolate`: the old rows are stretched over the new length
    (Chen et al. 2023), with new position i at i * old / new among the old ones; every position is
    familiar, but outputs change and the model needs further training. Rows before `position_offset`
    (RoBERTa) are kept.
    """
    if not 1 <= longest <= MOST_POSITIONS:
        raise UserError(f"positions: must be from 1 to {MOST_POSITIONS:,}, got {longest}")
    if not encoder_class(config).has_positions(config):
        summary = (
            f"positions: {config.max_length}, now {longest}: {config.kind} has no position "
            "embeddings to resize"
        )
        new = replace(config, max_positions=longest)
        return ResizedState(state=dict(state), config=new, summary=summary)
    if memory_shape(config)[1]:
        raise UserError(
            f"positions: {config.kind} reads documents of any length, in windows of "
            f"{config.max_positions} tokens with a memory; its positions cannot be resized and "
            "need not be"
        )
    _table(state, POSITIONS, config.max_positions)
    offset, before = config.position_offset, config.max_length
    if how not in HOW:
        raise UserError(f'positions: no method "{how}"{suggest(how, HOW)}')
    tables = {name: x for name, x in state.items() if _POSITIONS.fullmatch(name)}
    if longest <= before:
        resized, did = (lambda rows: rows[:longest]), "the first rows kept"
    elif how == "tile":
        repeated = torch.arange(longest) % before
        resized, did = (lambda rows: rows[repeated]), "the old rows repeated"
    else:
        resized = partial(_stretched, longest=longest)
        did = "the old rows interpolated; train further"
    new = {name: torch.cat([x[:offset], resized(x[offset:])]) for name, x in tables.items()}
    return ResizedState(
        state={**state, **new},
        config=replace(config, max_positions=offset + longest),
        summary=f"positions: {before}, now {longest}: {did}",
    )


def _stretched(rows: torch.Tensor, longest: int) -> torch.Tensor:
    """(longest, hidden): row i is interpolated at i * old / new; positions past the last old row
    take its values."""
    old = len(rows)
    at = torch.arange(longest, dtype=torch.float64) * old / longest
    low = at.floor().long()
    high = (low + 1).clamp(max=old - 1)
    part = (at - low).unsqueeze(1)
    first, second = rows[low].double(), rows[high].double()
    return (first + (second - first) * part).to(rows.dtype)
