"""MPNet: BERT's names but for attention, RoBERTa's masked-LM head and positions.

A text classifier has its own linear map in place of the pooler, as RoBERTa's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.kinds.bert import MPNet
from palm_ds.weights.formats.huggingface.architecture import Family, Names
from palm_ds.weights.formats.huggingface.bert_like import ROBERTA_MASKED_LM, BertLike, tied_output
from palm_ds.weights.formats.huggingface.check_config import check_only

_LAYER = {
    **BertLike.parts,
    "qkv": ("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    "project": "attention.attn.o",
    "attention_norm": "attention.LayerNorm",
}
_BUCKETS, _USUAL_BUCKETS = "relative_attention_num_buckets", 32
"""The key, and the number that transformers computes with, whatever the key says."""
_OFFSET, _PAD = 2, 1
"""The row of the first position, and the id that MPNet's code takes for padding everywhere: others
would have positions as tokens, and a word with this id none."""
_OWN_DENSE, _NO_POOLER = "own dense", "no pooler"
_CLASS_DEFAULTS = {"vocab_size": 30_527, "max_position_embeddings": 512, "layer_norm_eps": 1e-12}


class MPNetArchitecture(BertLike):
    """The architecture of `kind: mpnet`."""

    kind = "mpnet"
    families = {
        "mpnet": Family(class_prefix="MPNet", tensor_prefix="mpnet", masked_lm_activation="gelu")
    }
    tables = BertLike.without("segment", "task")
    parts = _LAYER
    task_table = "position"
    tied = tied_output(ROBERTA_MASKED_LM)
    heads = ("lm_head", "classifier", "qa_outputs")
    masked_lm = ("lm_head.",)
    buffers = ("embeddings.position_ids",)
    run_keys = {**BertLike.run_keys, _BUCKETS: None}

    def names(self, kind: str, config: EncoderConfig, layout: str = "") -> Names:
        further: Names = {
            "backbone.relative_bias.weight": ("encoder.relative_attention_bias.weight",)
        }
        own_dense = layout == _OWN_DENSE
        if layout != _NO_POOLER:
            pooler = "classifier.dense" if own_dense else "pooler.dense"
            further["backbone.pooler.dense"] = (pooler,)
        return self.all_names(config, further, ROBERTA_MASKED_LM, own_dense=own_dense)

    def layout_of(self, kind: str, ending: str) -> str:
        if ending == "ForSequenceClassification":
            return _OWN_DENSE
        return "" if ending in ("Model", "ForMultipleChoice") else _NO_POOLER

    def layout_in(self, names: Collection[str], architecture: str) -> str:
        return _OWN_DENSE if "classifier.out_proj.weight" in names else ""

    def read_config(self, about: Mapping[str, Any], where: str) -> EncoderConfig:
        check_only(about, {_BUCKETS: (_USUAL_BUCKETS,), "pad_token_id": (_PAD, None)}, where)
        values = {**_CLASS_DEFAULTS, **about}
        return self.read_usual(values, where, masked_lm_activation="gelu", position_offset=_OFFSET)

    def config_json(self, config: EncoderConfig, kind: str) -> dict[str, Any]:
        usual = super().config_json(config, kind)
        del usual["type_vocab_size"]
        return {**usual, _BUCKETS: _USUAL_BUCKETS}

    def family_of(self, config: EncoderConfig) -> str:
        usual = MPNet.options_of(config).relative_buckets == _USUAL_BUCKETS
        return (
            self.kind if usual and (config.position_offset, config.pad) == (_OFFSET, _PAD) else ""
        )

    def no_family(self, config: EncoderConfig) -> str:
        if (buckets := MPNet.options_of(config).relative_buckets) != _USUAL_BUCKETS:
            return (
                f"Hugging Face's MPNet always has {_USUAL_BUCKETS} relative_buckets, but this "
                f"encoder has {buckets}"
            )
        return (
            f"Hugging Face's MPNet counts positions from {_OFFSET} and has padding {_PAD}, but "
            f"this encoder has {config.position_offset} and {config.pad}"
        )
