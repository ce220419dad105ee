"""ERNIE-Gram, which PaddleNLP has and transformers does not: BERT's names and a table of relative
positions.

These are its names as a Bert's would be; the writer of Paddle's files makes PaddleNLP's of them.
PaddleNLP never adds the relative positions, so that only an encoder with `relative_positions: kept`
or `none` is written as its ErnieGram.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.kinds.bert import ErnieGram, ErnieGramOptions
from palm_ds.model.encoder.positions import GRAM_BUCKETS
from palm_ds.weights.formats.huggingface.architecture import Family, Names
from palm_ds.weights.formats.huggingface.bert_like import MASKED_LM, BertLike, tied_output
from palm_ds.weights.formats.huggingface.check_config import check_only

SIZE = "rel_pos_size"
"""The key of config.json with the rows of the table."""


class ErnieGramArchitecture(BertLike):
    """The architecture of `kind: ernie_gram`."""

    kind = "ernie_gram"
    families = {
        "ernie_gram": Family(
            class_prefix="ErnieGram",
            tensor_prefix="ernie_gram",
            paddle_tokenizer="ErnieTokenizer",
            paddle_only=True,
            paddle_eps=1e-5,
        )
    }
    tables = BertLike.without("task")
    task_table = "segment"
    tied = tied_output(MASKED_LM)
    heads = ("cls", "classifier", "qa_outputs")
    masked_lm = ("cls.predictions.",)
    run_keys = {**BertLike.run_keys, SIZE: None}

    def names(self, kind: str, config: EncoderConfig, layout: str = "") -> Names:
        further: Names = {}
        if ErnieGram.options_of(config).relative_positions != "none":
            further["backbone.relative_bias.weight"] = ("embeddings.rel_pos_embeddings.weight",)
        further["backbone.pooler.dense"] = ("pooler.dense",)
        return self.all_names(config, further, MASKED_LM)

    def read_config(self, about: Mapping[str, Any], where: str) -> EncoderConfig:
        check_only(about, {SIZE: (GRAM_BUCKETS, 0, None)}, where)
        kept = "kept" if about.get(SIZE) else "none"
        return self.read_usual(about, where, options={"relative_positions": kept})

    def config_json(self, config: EncoderConfig, kind: str) -> dict[str, Any]:
        there = ErnieGram.options_of(config).relative_positions != "none"
        return {**super().config_json(config, kind), **({SIZE: GRAM_BUCKETS} if there else {})}

    def family_of(self, config: EncoderConfig) -> str:
        options: ErnieGramOptions = ErnieGram.options_of(config)
        same = options.relative_positions != "added" and options.token_types == "added"
        return self.kind if same and not config.position_offset else ""

    def no_family(self, config: EncoderConfig) -> str:
        options: ErnieGramOptions = ErnieGram.options_of(config)
        return (
            "PaddleNLP's ErnieGram adds token types and never relative positions, but this encoder "
            f"has relative_positions {options.relative_positions} and token_types "
            f"{options.token_types}: its outputs would differ there; --to palm_ds keeps them, "
            "--family ernie_gram writes the tables anyway"
        )

    def check_family(self, kind: str, config: EncoderConfig) -> str:
        """Named, it is written whatever it computes there."""
        return "" if kind in self.families else super().check_family(kind, config)
