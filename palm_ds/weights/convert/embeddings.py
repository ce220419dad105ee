"""Changing the tables of an encoder that exists: words and positions more or fewer.

    place_words        new words at these rows; the table grows where it must
    fit_words          as many rows as a multiple asks for, never a used one less
    resize_positions   longer or shorter texts

Each takes parameters by our names and the encoder's numbers, changes neither, and returns new ones
with a line that says what was done. What was there before computes the same afterwards: a row that
was used keeps its values (only interpolated positions mean something else). The bias of every
masked-word head goes with the word table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from palm_ds.common.errors import UserError, suggest
from palm_ds.model.config import EncoderConfig

State = Mapping[str, torch.Tensor]

WORDS, POSITIONS = "backbone.word.weight", "backbone.position.weight"
HOW = ("tile", "interpolate")


@dataclass(frozen=True, kw_only=True)
class Changed:
    """Parameters and numbers after a change; tensors that it does not concern are the old ones."""

    state: dict[str, torch.Tensor]
    config: EncoderConfig
    said: str


def concerned(names: Iterable[str]) -> list[str]:
    """Which of a checkpoint's parameters are to be read for the changes here."""
    return [name for name in names if name in (WORDS, POSITIONS) or _is_word_bias(name)]


# ---- words ----


def place_words(
    state: State,
    config: EncoderConfig,
    rows: Mapping[int, Sequence[int]],
    *,
    used: int,
    seed: int = 0,
) -> Changed:
    """Give rows to new words: {row: the rows whose mean it begins as; none: drawn by the seed}.

    `used` is how many rows the vocabulary had; a row below it is one that no text ever had
    ([unused1]). The bias of a masked-word head is the mean of the same rows, or of all used ones
    for a drawn row. Rows that this makes between the new words are as in `fit_words`. Raises
    UserError for rows that are not there to be learned from.
    """
    table = _table(state, WORDS, config.vocab_size)
    _check_used(used, len(table), config)
    for row, like in rows.items():
        if wrong := [i for i in like if not 0 <= i < used]:
            raise UserError(f"word {row}: is to begin as the mean of {wrong[0]}, of {used} words")
        if row < 0:
            raise UserError(f"word {row}: rows begin at 0")
    size = max(len(table), 1 + max(rows, default=0))
    grown = _with_rows(state, config, size, used, seed)
    drawn = iter(_drawn(len(rows), table, config, seed + 1))
    for name in _word_tables(state, len(table)):
        new, old = grown[name], state[name][:used].double()
        for row, like in rows.items():
            if like:
                new[row] = old[list(like)].mean(0)
            else:
                new[row] = next(drawn) if name == WORDS else old.mean(0)
    means = sum(1 for like in rows.values() if like)
    beyond = sum(1 for row in rows if used <= row < len(table))
    said = (
        f"words: {len(rows)} new ones, {means} begun as the mean of others, {len(rows) - means} "
        f"drawn; {sum(row < used for row in rows)} in rows of unused words, {beyond} in free rows "
        f"beyond the vocabulary; {len(table)} rows, now {size}"
    )
    return Changed(state=grown, config=replace(config, vocab_size=size), said=said)


def fit_words(
    state: State, config: EncoderConfig, *, used: int, multiple: int = 1, seed: int = 0
) -> Changed:
    """The least number of rows that is a multiple and holds the `used` ones.

    New rows are drawn by the seed; no text has them, and in a masked-word head their bias is the
    least of all, so that they take as little as the least likely word from the others.
    """
    table = _table(state, WORDS, config.vocab_size)
    _check_used(used, len(table), config)
    if multiple < 1:
        raise UserError(f"multiple: at least 1, got {multiple}")
    size = -(-used // multiple) * multiple
    new = _with_rows(state, config, size, used, seed)
    did = {-1: "cut off", 0: "left", 1: "added"}[(size > len(table)) - (size < len(table))]
    said = (
        f"words: {len(table)} rows, now {size}, a multiple of {multiple}: "
        f"{abs(size - len(table))} {did}; {used} are used"
    )
    return Changed(state=new, config=replace(config, vocab_size=size), said=said)


def _with_rows(
    state: State, config: EncoderConfig, size: int, used: int, seed: int
) -> dict[str, torch.Tensor]:
    """A copy of the word tables with so many rows."""
    table = state[WORDS]
    more = max(size - len(table), 0)
    new = dict(state)
    for name in _word_tables(state, len(table)):
        old = state[name]
        if name == WORDS:
            extra = _drawn(more, table, config, seed).to(old.dtype)
        else:
            extra = old[:used].min().expand(more)
        new[name] = torch.cat([old[:size], extra])
    return new


def _drawn(count: int, like: torch.Tensor, config: EncoderConfig, seed: int) -> torch.Tensor:
    """(count, hidden): as a model's first weights are."""
    rows = torch.empty(count, like.shape[1])
    generator, deviation = torch.Generator().manual_seed(seed), config.init_range
    return nn.init.trunc_normal_(
        rows, std=deviation, a=-2 * deviation, b=2 * deviation, generator=generator
    )


def _word_tables(state: State, words: int) -> list[str]:
    """The word table, and what has a number for each of its rows."""
    biases = [name for name in state if _is_word_bias(name)]
    for name in biases:
        if len(state[name]) != words:
            raise UserError(f"{name}: {len(state[name])} numbers for {words} words")
    return [WORDS, *biases]


def _is_word_bias(name: str) -> bool:
    """heads.NAME.bias: only a masked-word head has one, a head of classes has heads.NAME.out."""
    return name.startswith("heads.") and name.count(".") == 2 and name.endswith(".bias")


def _check_used(used: int, rows: int, config: EncoderConfig) -> None:
    if not config.pad < used <= rows:
        raise UserError(
            f"{WORDS}: {rows} rows are no table of a vocabulary of {used} with the padding at "
            f"{config.pad}"
        )


def _table(state: State, name: str, rows: int | None) -> torch.Tensor:
    table = state.get(name)
    if table is None:
        raise UserError(f"{name}: not there")
    if table.ndim != 2 or (rows is not None and len(table) != rows):
        raise UserError(f"{name}: is {tuple(table.shape)}, the encoder's numbers say {rows} rows")
    return table


# ---- positions ----


def resize_positions(
    state: State, config: EncoderConfig, longest: int, *, how: str = "tile"
) -> Changed:
    """Texts of `longest` tokens, special ones included.

    Fewer: the last rows go. More, `tile`: the rows again from the first, so that a text that was
    short enough before computes the same, and every new position knows its neighbours (Longformer,
    section 5). More, `interpolate`: the old rows stretched over the new length (Chen et al. 2023),
    new position i between old ones at i * old / new: nothing is new to the model, but old texts
    change, and it wants more training. The rows before `position_offset` (RoBERTa) stay.
    """
    table = _table(state, POSITIONS, config.max_positions)
    offset, before = config.position_offset, config.max_length
    if how not in HOW:
        raise UserError(f'positions: no way "{how}"{suggest(how, HOW)}')
    if longest < 1:
        raise UserError(f"positions: at least 1, got {longest}")
    if longest <= before:
        rows, did = table[offset : offset + longest], "the first of them"
    elif how == "tile":
        rows, did = table[offset:][torch.arange(longest) % before], "the old ones again and again"
    else:
        rows, did = _stretched(table[offset:], longest), "the old ones stretched; train on"
    new = dict(state) | {POSITIONS: torch.cat([table[:offset], rows])}
    return Changed(
        state=new,
        config=replace(config, max_positions=offset + longest),
        said=f"positions: texts of {before} tokens before, of {longest} now: {did}",
    )


def _stretched(rows: torch.Tensor, longest: int) -> torch.Tensor:
    """(longest, hidden): row i lies at i * old / new among the old; the last stays the last."""
    old = len(rows)
    at = torch.arange(longest, dtype=torch.float64) * old / longest
    low = at.floor().long()
    high = (low + 1).clamp(max=old - 1)
    part = (at - low).unsqueeze(1)
    first, second = rows[low].double(), rows[high].double()
    return (first + (second - first) * part).to(rows.dtype)
