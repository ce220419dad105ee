"""UNIMO (Li et al. 2021, arXiv 2012.15409): BERT's layers over texts, or over a text and the
regions of an image in one stream, and ReLU instead of tanh in front of heads of whole texts.

    [CLS] a b [SEP] tag tag r0 r1 r2      each attends to all; tags have positions from the first on

A region's vector is the LayerNorm of a linear map of its features plus one of its location, without
a position. UNIMO puts regions before the text, which is the same to attention; here a text begins
with its [CLS] whether it has an image or not. English models have RoBERTa's positions and no token
types (`token_types: 1`, without a table). The Chinese UNIMO-text, which only PaddleNLP has, reads
no images, adds token types and counts positions from 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import NonNegativeInt
from torch import nn

from palm_ds.common.settings import Settings
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import PLAIN, Pooler, init_weights
from palm_ds.model.encoder.layer import LayerSpec
from palm_ds.model.encoder.regions import RegionEmbedding
from palm_ds.model.encoder.transformer import TransformerEncoder, TransformerSpec
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import Kernels
from palm_ds.model.ops.dropout import DropoutKeys


@dataclass(frozen=True, kw_only=True)
class UnimoOptions(Settings):
    """`backbone.options` of this encoder."""

    region_size: NonNegativeInt = 0
    """Features of a region of an image (2,048 in UNIMO); 0: it reads texts alone."""


class Unimo(TransformerEncoder):
    """The encoder of UNIMO and UNIMO-text."""

    paddle = "unimo"
    options_type = UnimoOptions
    above_layers = ("pooler", "region_pooler")
    defaults = {
        "max_positions": 514,
        "position_offset": 2,
        "pad": 1,
        "token_types": 1,
        "task_types": 0,
        "layer_norm_eps": 1e-5,
    }

    def __init__(self, config: EncoderConfig, kernels: Kernels = PLAIN, *, recompute: bool = False):
        super().__init__(config, kernels, recompute=recompute)
        if features := self.region_size(config):
            size = config.hidden_size
            self.region = RegionEmbedding(features, size, self._norm(size))
            self.region_pooler = Pooler(size, "relu")
            for part in (self.region, self.region_pooler):
                init_weights(part, config.init_range)

    @classmethod
    def spec(cls, config: EncoderConfig) -> TransformerSpec:
        return TransformerSpec(
            layers=(LayerSpec(),) * config.num_layers,
            token_types=config.token_types > 1,
            pooler_activation="relu",
        )

    @classmethod
    def region_size(cls, config: EncoderConfig) -> int:
        options: UnimoOptions = cls.options_of(config)
        return options.region_size

    @property
    def image_pooler(self) -> nn.Module:
        return self.region_pooler

    def _embed(self, batch: Batch, keys: DropoutKeys | None) -> torch.Tensor:
        x = super()._embed(batch, keys)
        if not self.region_size(self.config):
            return x
        return self.region.placed(batch, x, self.config.dropout, keys)
