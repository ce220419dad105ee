"""BERT's names of tensors and keys of config.json, which many families took over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from palm_ds.model.config.config import EncoderConfig
from palm_ds.weights.formats.contents import TensorEntry
from palm_ds.weights.formats.foreign_config import FOREIGN_KEYS, read_encoder_config
from palm_ds.weights.formats.huggingface.architecture import (
    HEAD_CLASSES,
    POSITIONS,
    Architecture,
    Entries,
    Names,
    both_ends,
    head_names,
    usual_config_json,
)
from palm_ds.weights.formats.huggingface.check_config import check_foreign_values

EMBEDDINGS = {
    "word.weight": "embeddings.word_embeddings.weight",
    "position.weight": "embeddings.position_embeddings.weight",
    "segment.weight": "embeddings.token_type_embeddings.weight",
    "task.weight": "embeddings.task_type_embeddings.weight",
    "norm": "embeddings.LayerNorm",
}
LAYER = {
    "qkv": tuple(f"attention.self.{part}" for part in ("query", "key", "value")),
    "project": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "expand": "intermediate.dense",
    "contract": "output.dense",
    "output_norm": "output.LayerNorm",
}
MASKED_LM = {
    "dense": "cls.predictions.transform.dense",
    "norm": "cls.predictions.transform.LayerNorm",
    "bias": "cls.predictions.bias",
    "decoder": "cls.predictions.decoder.weight",
}
ROBERTA_MASKED_LM = {
    "dense": "lm_head.dense",
    "norm": "lm_head.layer_norm",
    "bias": "lm_head.bias",
    "decoder": "lm_head.decoder.weight",
}


def tied_output(masked_lm: Mapping[str, str]) -> dict[str, str]:
    """`Architecture.tied` of a masked-LM head whose parts have these names."""
    decoder = masked_lm["decoder"].removesuffix(".weight")
    return {f"{decoder}.weight": EMBEDDINGS["word.weight"], f"{decoder}.bias": masked_lm["bias"]}


class BertLike(Architecture):
    """An architecture with most names as BERT has them, and without a head for two sentences."""

    words = EMBEDDINGS["word.weight"]
    layer = "encoder.layer"
    tables: ClassVar[Mapping[str, str]] = EMBEDDINGS
    """{embedding or norm: its name in a file}"""
    parts: ClassVar[Mapping[str, str | tuple[str, ...]]] = LAYER
    """{part of a layer: its names in a layer of a file}"""
    classes = tuple(x for x in HEAD_CLASSES if x != "ForNextSentencePrediction")
    run_keys = {
        **dict.fromkeys(("layer_norm_eps", "initializer_range"), float),
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), float),
        "tie_word_embeddings": bool,
        **dict.fromkeys(("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")),
        **dict.fromkeys(("intermediate_size", "hidden_act", "max_position_embeddings")),
        **dict.fromkeys(("type_vocab_size", "pad_token_id")),
    }

    def __init_subclass__(cls) -> None:
        """LoRA changes these parts of a layer, unless the class says otherwise."""
        if "lora_modules" not in vars(cls):
            cls.lora_modules = {
                **dict(zip(("query", "key", "value"), cls.parts["qkv"], strict=True)),
                "attention_output": cls.parts["project"],
                "intermediate": cls.parts["expand"],
                "output": cls.parts["contract"],
            }

    @staticmethod
    def without(*tables: str) -> dict[str, str]:
        """BERT's `tables` but for these."""
        return {x: y for x, y in EMBEDDINGS.items() if x.removesuffix(".weight") not in tables}

    def body_names(self, config: EncoderConfig) -> Names:
        """`names` of embeddings and layers, without the ends of `both_ends`."""
        tables: Names = {f"backbone.{ours}": (hf,) for ours, hf in self.tables.items()}
        return tables | self.layer_names(config, self.parts)

    def all_names(
        self,
        config: EncoderConfig,
        further: Names,
        masked_lm: Mapping[str, str],
        *,
        own_dense: bool = False,
        heads: Names | None = None,
    ) -> Names:
        """`names`: of the body, `further` ones, of usual heads (`head_names`) and of `heads`."""
        usual = head_names(masked_lm, own_dense=own_dense)
        return both_ends({**self.body_names(config), **further, **usual, **(heads or {})})

    def read_usual(
        self, about: Mapping[str, Any], where: str, *, masked_lm_activation: str = "", **own: Any
    ) -> EncoderConfig:
        """The encoder that a config.json under BERT's keys describes, with its `own` values.
        Raises UserError, starting with `where`. `masked_lm_activation`: see `Family`."""
        check_foreign_values(about, where)
        known = {x: y for x, y in about.items() if x in FOREIGN_KEYS and x != "model_type"}
        activation = known.get("hidden_act", "gelu")
        if masked_lm_activation and activation != masked_lm_activation:
            own["head_activation"] = masked_lm_activation
        return read_encoder_config({**known, **own, "kind": self.kind}, where)

    def config_json(self, config: EncoderConfig, kind: str) -> dict[str, Any]:
        return usual_config_json(config)


def moved_positions(
    kept: Entries, config: EncoderConfig, offset: int
) -> tuple[Entries, EncoderConfig, dict[str, str]]:
    """`Architecture.reshape` of a family whose positions are counted from `offset`."""
    more = offset - config.position_offset
    if not more:
        return dict(kept), config, {}
    front = f"{more} rows of zeros in front, for positions that no token has"
    created = {POSITIONS: front} if more > 0 else {}
    longer = config.max_positions + more
    config = replace(config, max_positions=longer, position_offset=offset)
    return {**kept, POSITIONS: _moved(kept[POSITIONS], more)}, config, created


def _moved(positions: TensorEntry, more: int) -> TensorEntry:
    """Shifts the position rows by `more`: zeros in front, or without the first rows, which no token
    uses, if negative."""
    rows, width = positions.shape

    def read() -> torch.Tensor:
        table = positions.read()
        return torch.cat([table.new_zeros(more, width), table]) if more > 0 else table[-more:]

    how = f"{more} rows of zeros in front" if more > 0 else f"without its first {-more} rows"
    return TensorEntry(
        source_names=positions.source_names, shape=(rows + more, width), read=read, transform=how
    )
