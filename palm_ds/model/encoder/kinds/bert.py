"""BERT, and encoders whose layers are BERT's: they differ in embeddings, in relative positions, and
in the activation in front of heads that read whole texts.

    bert         BERT (Devlin et al. 2018), ERNIE and RoBERTa: learned positions, and norms after
                 each half of a layer
    distilbert   DistilBERT (Sanh et al. 2019, arXiv 1910.01108): without token types; ReLU, no tanh
    electra      ELECTRA (Clark et al. 2020, arXiv 2003.10555): embeddings that may be narrower;
                 GELU, no tanh
    mpnet        MPNet (Song et al. 2020, arXiv 2004.09297): without token types, positions from 2,
                 and numbers of distances that are added to the scores of attention in all layers
    ernie_gram   ERNIE-Gram (Xiao et al. 2021, arXiv 2010.12148): one table of relative positions
                 for all layers, beside the position embedding
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from palm_ds.common.settings import Settings
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.layer import LayerSpec
from palm_ds.model.encoder.positions import GRAM_BUCKETS
from palm_ds.model.encoder.transformer import TransformerEncoder, TransformerSpec


class Bert(TransformerEncoder):
    """The encoder of a recipe that names no other."""

    hf = "bert"


class DistilBert(TransformerEncoder):
    """The encoder of DistilBERT, of six layers."""

    hf = "distilbert"
    defaults = {"num_layers": 6, "token_types": 1, "task_types": 0}

    @classmethod
    def spec(cls, config: EncoderConfig) -> TransformerSpec:
        return TransformerSpec(
            layers=(LayerSpec(),) * config.num_layers,
            token_types=False,
            pooler_activation="relu",
        )


@dataclass(frozen=True, kw_only=True)
class ElectraOptions(Settings):
    """`backbone.options` of this encoder."""

    embedding_size: PositiveInt | None = None
    """Width of the embeddings; None: the hidden size."""


class Electra(TransformerEncoder):
    """The encoder of ELECTRA's discriminators and generators."""

    hf = "electra"
    options_type = ElectraOptions
    defaults = {"token_types": 2, "task_types": 0}

    @classmethod
    def spec(cls, config: EncoderConfig) -> TransformerSpec:
        return TransformerSpec(
            layers=(LayerSpec(),) * config.num_layers,
            embedding_size=cls.options_of(config).embedding_size,
            pooler_activation="gelu",
        )


@dataclass(frozen=True, kw_only=True)
class MPNetOptions(Settings):
    """`backbone.options` of this encoder."""

    relative_buckets: Annotated[int, Field(ge=4, multiple_of=4)] = 32
    """Buckets of distances."""


class MPNet(TransformerEncoder):
    """The encoder of MPNet and most models of sentence-transformers."""

    hf = "mpnet"
    options_type = MPNetOptions
    defaults = {
        "max_positions": 514,
        "position_offset": 2,
        "pad": 1,
        "token_types": 1,
        "task_types": 0,
        "layer_norm_eps": 1e-5,
    }

    @classmethod
    def spec(cls, config: EncoderConfig) -> TransformerSpec:
        return TransformerSpec(
            layers=(LayerSpec(),) * config.num_layers,
            token_types=False,
            relative_buckets=cls.options_of(config).relative_buckets,
        )


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
    """The encoder of the English ERNIE-Gram.

        score of i and j = q_i . k_j / sqrt(head size) + table[bucket(i, j), head]

        bucket(i, j)     j > i: 0 to 15, j < i: 16 more; then column 0 is 32, and row 0 is 16
                         (positions.py; the branch `repro` of ERNIE)

    Places are those of a text, whatever row it is in. The Chinese release has no such table: it is
    `kind: bert`. Programs differ in what they do with the tables that files have: PaddleNLP adds no
    relative positions, ERNIE's static graph adds token types in reading comprehension alone.
    """

    paddle = "ernie_gram"
    options_type = ErnieGramOptions
    free_options = ("relative_positions", "token_types")
    defaults = {
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
