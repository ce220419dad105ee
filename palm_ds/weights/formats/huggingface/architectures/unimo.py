"""UNIMO-text, which PaddleNLP has and transformers does not: BERT's names, with a masked-LM head of
its own, and without a pooler.

These are its names as a Bert's would be; the writer of Paddle's files makes PaddleNLP's of them.
PaddleNLP counts positions from 0 and adds token types, so that an encoder with an offset or without
token types is written with its positions moved and token types of zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from palm_ds.model.config.config import EncoderConfig
from palm_ds.weights.formats.contents import TensorEntry
from palm_ds.weights.formats.huggingface.architecture import (
    MASKED_WORDS,
    SEGMENTS,
    Entries,
    Family,
    Names,
    both_ends,
    fold_task_into,
)
from palm_ds.weights.formats.huggingface.bert_like import BertLike, moved_positions
from palm_ds.weights.formats.huggingface.check_config import check_only

_TOKEN_TYPES = 2  # those of two texts, the fewest that UNIMO's encoder has a table for
_TRANSFORM = {"dense": "lm_head.transform", "norm": "lm_head.layer_norm"}
_OUTPUT = {"bias": "lm_head.decoder_bias", "decoder": "lm_head.decoder_weight"}


class UnimoArchitecture(BertLike):
    """The architecture of `kind: unimo`."""

    kind = "unimo"
    families = {
        "unimo": Family(
            class_prefix="UNIMO",
            tensor_prefix="unimo",
            class_names={"ForMaskedLM": "UNIMOLMHeadModel"},
            paddle_tokenizer="UNIMOTokenizer",
            paddle_only=True,
            paddle_eps=1e-5,
        )
    }
    tables = {**BertLike.without("task"), "norm": "encoder_norm"}
    tied = {_OUTPUT["decoder"]: BertLike.words}
    heads = ("lm_head",)
    masked_lm = ("lm_head.",)
    classes = ()

    def names(self, kind: str, config: EncoderConfig, layout: str = "") -> Names:
        head = {f"heads.{MASKED_WORDS}.{ours}": (its,) for ours, its in _TRANSFORM.items()}
        output = {f"heads.{MASKED_WORDS}.{ours}": (its,) for ours, its in _OUTPUT.items()}
        return {**both_ends({**self.body_names(config), **head}), **output}

    def read_config(self, about: Mapping[str, Any], where: str) -> EncoderConfig:
        check_only(about, {"normalize_before": (False, None)}, where)
        return self.read_usual(about, where, position_offset=0)

    def config_json(self, config: EncoderConfig, kind: str) -> dict[str, Any]:
        return {**super().config_json(config, kind), "normalize_before": False}

    def reshape(
        self, kept: Entries, config: EncoderConfig, kind: str, task_id: int
    ) -> tuple[Entries, EncoderConfig, dict[str, str]]:
        """With token types, and positions from 0."""
        result, created = dict(kept), {}
        if SEGMENTS not in result:
            shape = (_TOKEN_TYPES, config.hidden_size)
            result[SEGMENTS] = TensorEntry(
                source_names=(), shape=shape, read=lambda: torch.zeros(shape)
            )
            created[SEGMENTS] = f"{_TOKEN_TYPES} token types of zeros: the encoder has none"
            config = replace(config, token_types=_TOKEN_TYPES)
        if config.position_offset:
            result, config, more = moved_positions(result, config, 0)
            created |= more
        result, config, more = fold_task_into(result, config, task_id, "segment")
        return result, config, created | more
