"""Embeddings that a generator and a discriminator share.

    shared                  one set of tables, and the norm behind them, which both losses train
                            (ELECTRA, Clark et al. 2020, section 3.2)
    gradient_disentangled   the discriminator's tables are those of the generator, which its loss
                            does not train, plus tables of differences, which start at 0
                            (DeBERTa-v3, He et al. 2021, section 3.3)
    none                    each has its own

A discriminator with differences has parameters `backbone.word.delta` instead of
`backbone.word.weight`. Weights that are written have the sums, under the usual names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from palm_ds.common.errors import UserError
from palm_ds.model.encoder.encoder import Encoder

EmbeddingSharing: TypeAlias = Literal["shared", "gradient_disentangled", "none"]
TABLES = ("word", "position", "segment", "task")
"""The embeddings of an encoder, where it has them."""
_DELTA = re.compile(r"backbone\.(\w+)\.delta")
_BASE = re.compile(r"heads\.[^.]+\.generator\.encoder\.(\w+)\.weight")


class DisentangledEmbedding(nn.Module):
    """Another embedding plus a table of differences, with the gradient of the differences alone."""

    def __init__(self, base: nn.Embedding):
        super().__init__()
        self.num_embeddings, self.embedding_dim = base.num_embeddings, base.embedding_dim
        self.delta = nn.Parameter(torch.zeros_like(base.weight))
        self._base = (base,)  # in a tuple, or it would become a submodule

    @property
    def base(self) -> nn.Embedding:
        return self._base[0]

    @property
    def weight(self) -> torch.Tensor:
        """The sum of both tables, (rows, width)."""
        return self.base.weight.detach() + self.delta

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():  # called as a module: ZeRO 3 gathers its weight
            known = self.base(ids)
        return known + F.embedding(ids, self.delta)


def check_sharing(discriminator: Encoder, how: EmbeddingSharing, where: str) -> None:
    """Raises UserError, with `where`, if the embeddings of an encoder cannot be shared so."""
    if how == "gradient_disentangled" and type(discriminator.word) is not nn.Embedding:
        raise UserError(
            f"{where}: {how} does not go with explicit_ngram_masking, which changes the token "
            "embeddings too; use shared or none"
        )


def share_embeddings(generator: Encoder, discriminator: Encoder, how: EmbeddingSharing) -> None:
    """Connect the embeddings of two encoders, in place; the tables have the same shapes. What the
    generator shares stays out of its own parameters."""
    if how == "shared":
        for name in (*TABLES, "norm"):
            if name in discriminator._modules:
                del generator._modules[name]
                # Past nn.Module, which would register it here too: it would have two names.
                object.__setattr__(generator, name, getattr(discriminator, name))
    elif how == "gradient_disentangled":
        for name in TABLES:
            if name in discriminator._modules:
                setattr(discriminator, name, DisentangledEmbedding(getattr(generator, name)))


def tied_tables(word: nn.Module) -> tuple[nn.Parameter, nn.Parameter | None]:
    """The parameters of a token embedding for a module that uses them too: the table, and the
    differences that are added to it, if there are any; that table is then not trained."""
    delta = word.delta if isinstance(word, DisentangledEmbedding) else None
    table = word.base.weight if isinstance(word, DisentangledEmbedding) else word.weight
    assert isinstance(table, nn.Parameter)
    return table, delta


def tied_sum(table: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
    """The token embeddings (vocabulary, width) of `tied_tables`."""
    return table if delta is None else table.detach() + delta


# ---- names and values ----


class Parts(NamedTuple):
    """The names of two tables whose sum is one of the discriminator's."""

    base: str
    delta: str


def parts_of_tables(names: Iterable[str]) -> dict[str, Parts]:
    """{name of a table of the discriminator: its parts among these names of parameters}"""
    names = list(names)
    bases = {match[1]: name for name in names if (match := _BASE.fullmatch(name))}
    deltas = {match[1]: name for name in names if (match := _DELTA.fullmatch(name))}
    return {
        f"backbone.{delta}.weight": Parts(bases[delta], deltas[delta])
        for delta in deltas
        if delta in bases
    }


def differences_of_tables(names: Iterable[str]) -> set[str]:
    """Those of the parameters that are differences from a generator's embeddings."""
    return {name for name in names if _DELTA.fullmatch(name)}


def merged_tables(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A model's parameters with the sums in place of the differences."""
    parts = parts_of_tables(state)
    names = {part.delta: name for name, part in parts.items()}
    return {
        names.get(name, name): values + state[parts[names[name]].base] if name in names else values
        for name, values in state.items()
    }


def split_tables(
    state: Mapping[str, torch.Tensor], names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """The inverse, for a model with these names of parameters."""
    parts = parts_of_tables(names)
    rest = {name: values for name, values in state.items() if name not in parts}
    return rest | {part.delta: state[name] - state[part.base] for name, part in parts.items()}
