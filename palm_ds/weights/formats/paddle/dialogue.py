"""Dialogue models of ERNIE-GEN: one embedding of the role and one of the turn, read as token types.

    token type     0                 1                 2              ...    turns
    embedding      turn 0 + role 0   turn 1 + role 1   turn 2 + role 0       turn 0 + role 2

These are all pairs that ERNIE's reader makes (branch `repro`, reader/seq2seq_reader.py): the reply
is turn 0, the speakers, roles 0 and 1, take turns, and facts have role 2. Inputs with these token
types: palm_ds/tasks/shared/generation_sources.py.
"""

from __future__ import annotations

from pathlib import Path

import torch

from palm_ds.common.errors import UserError
from palm_ds.weights.formats.contents import TensorEntry

_TYPES = "backbone.segment.weight"
_FACTS = 2
"""Their role."""


def join_roles_and_turns(entries: dict[str, TensorEntry], path: Path) -> None:
    """Replaces the embeddings of roles and turns, if there are some, by one of token types. Raises
    UserError if they do not fit together."""
    role, turn = (entries.pop(f"backbone.{name}.weight", None) for name in ("role", "turn"))
    if role is None and turn is None:
        return
    if role is None or turn is None or _TYPES in entries:
        raise UserError(
            f"{path}: a dialogue model has role_embedding and turn_embedding, and no sent_embedding"
        )
    if role.shape[1:] != turn.shape[1:] or role.shape[0] < _FACTS:
        raise UserError(
            f"{path}: role_embedding {role.shape} does not fit turn_embedding {turn.shape}"
        )
    entries[_TYPES] = TensorEntry(
        source_names=(*role.source_names, *turn.source_names),
        shape=(turn.shape[0] + (role.shape[0] > _FACTS), *turn.shape[1:]),
        read=lambda: _sums(role.read(), turn.read()),
        transform="sums of turn and role",
    )


def _sums(role: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """(token types, hidden)"""
    speakers = turn + role[torch.arange(len(turn)) % _FACTS]
    return torch.cat([speakers, turn[:1] + role[_FACTS : _FACTS + 1]])
