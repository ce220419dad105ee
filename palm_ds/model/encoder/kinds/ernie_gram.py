"""ERNIE-Gram (Xiao et al. 2021, arXiv 2010.12148): BERT's layers with one table of relative
positions for all of them, beside the position embedding.

    score of i and j = q_i . k_j / sqrt(head size) + table[bucket(i, j), head]

    bucket(i, j)     j > i: 0 to 15, j < i: 16 more; then column 0 is 32, and row 0 is 16
                     (positions.py; the branch `repro` of ERNIE)

Places are those of a text, whatever row it is in. The Chinese release has no such table: it is
`kind: bert`. Programs differ in what they do with the tables that files have: PaddleNLP adds no
relative positions, ERNIE's static graph adds token types in reading comprehension alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from palm_ds.common.settings import Settings
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.layer import LayerSpec
from palm_ds.model.encoder.positions import GRAM_BUCKETS
from palm_ds.model.encoder.transformer import TransformerEncoder, TransformerSpec


@dataclass(frozen=True, kw_only=True)
class ErnieGramOptions(Settings):
    """`backbone.options` of this encoder."""

    relative_positions: Literal["added", "kept", "none"] = "added"
    """added: to the scores of attention, as ERNIE does. kept: the table stays in the weights, but
    nothing reads it, as in PaddleNLP. none: there is no table."""
    token_types: Literal["added", "kept"] = "added"
    """added: to the other embeddings. kept: the table stays in the weights, but nothing reads it,
    as in ERNIE's static graph outside reading comprehension."""


class ErnieGram(TransformerEncoder):
    """The encoder of the English ERNIE-Gram."""

    paddle = "ernie_gram"
    options_type: ClassVar[type | None] = ErnieGramOptions
    free_options = ("relative_positions", "token_types")
    defaults: ClassVar[Mapping[str, Any]] = {
        "token_types": 2,
        "task_types": 0,
        "layer_norm_eps": 1e-5,
    }

    @classmethod
    def spec(cls, config: EncoderConfig) -> TransformerSpec:
        options: ErnieGramOptions = cls.options_of(config)
        unread = {
            "segment": options.token_types == "kept",
            "relative_bias": options.relative_positions == "kept",
        }
        return TransformerSpec(
            layers=(LayerSpec(),) * config.num_layers,
            relative_buckets=0 if options.relative_positions == "none" else GRAM_BUCKETS,
            relative_rule="ernie_gram",
            unread=tuple(name for name, applies in unread.items() if applies),
        )
