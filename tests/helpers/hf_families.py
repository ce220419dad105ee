"""Small models of transformers, by family, with random norms and biases, or nothing would show that
one is missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

CLASSIFIERS = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
)


@dataclass(frozen=True, kw_only=True)
class HfFamily:
    """A family of transformers, and what differs in its small models."""

    name: str
    """The start of its classes' names."""
    sizes: Mapping[str, Any] = field(default_factory=lambda: SIZES)
    values: Mapping[str, Any] = field(default_factory=dict)
    """More values of config.json."""
    shapes: tuple[Mapping[str, Any], ...] = ()
    """Heads of published sizes, with few of them and few layers."""
    wide: tuple[Mapping[str, Any], ...] = ()
    """Published sizes of vectors, too."""
    endings: tuple[str, ...] = ("Model", "ForMaskedLM", *CLASSIFIERS)
    stem: str = "encoder.layer.0"
    """Its first layer."""
    query: str = "attention.self.query"
    contract: str = "output.dense"
    """Two matrices of a layer."""
    own_graph: bool = False
    """Whether its layers compute what BERT's do not, which an exporter may get wrong."""
    layers: str = "num_hidden_layers"
    """The number of its layers, in config.json."""
    own_layers: int = 3
    """Those with weights of their own."""
    forms: tuple[str, ...] = ("plain", "sdpa", "tiles")
    """The forms of attention that it runs in on a CPU."""
    keeps_pooler: bool = False
    """Whether a masked-LM folder keeps the pooler that sentence tasks trained, as published."""
    segments: bool = False
    """Whether it reads token types."""

    def build(self, ending: str = "Model", **values: Any) -> Any:
        """A model of this class, in evaluation mode."""
        torch.manual_seed(3)
        made = getattr(transformers, f"{self.name}Config")
        labels = {} if ending in ("ForQuestionAnswering", "ForPreTraining") else {"num_labels": 3}
        config = made(**{**self.sizes, **self.values, **labels, **values})
        config._attn_implementation = "eager"
        model = getattr(transformers, f"{self.name}{ending}")(config).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name.lower() and name.endswith("weight"):
                nn.init.normal_(parameter, 1.0, 0.3)
            elif name.endswith("bias"):
                nn.init.normal_(parameter, 0.0, 0.3)
            else:
                nn.init.normal_(parameter, 0.0, parameter.shape[-1] ** -0.5)
        return model

    def save(self, folder: Path, ending: str = "Model", **values: Any) -> Path:
        """Saves such a model."""
        self.build(ending, **values).save_pretrained(folder)
        return folder


SIZES: Mapping[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 72,
    "max_position_embeddings": 520,
    "pad_token_id": 0,
}
NARROW: Mapping[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 2,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
}
BASE: Mapping[str, Any] = {
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
ELECTRA = HfFamily(
    name="Electra",
    values={"embedding_size": 20},
    endings=("Model", "ForMaskedLM", "ForPreTraining", *CLASSIFIERS),
    shapes=({**NARROW, "embedding_size": 64}, {**NARROW, "embedding_size": 128}),
    wide=(
        {
            "hidden_size": 256,
            "embedding_size": 128,
            "num_attention_heads": 4,
            "intermediate_size": 1024,
        },
        {**BASE, "embedding_size": 768},
    ),
    segments=True,
)
DISTILBERT = HfFamily(
    name="DistilBert",
    sizes={
        "vocab_size": 64,
        "dim": 48,
        "n_layers": 3,
        "n_heads": 4,
        "hidden_dim": 72,
        "max_position_embeddings": 520,
        "pad_token_id": 0,
    },
    shapes=({"dim": 128, "n_heads": 2, "hidden_dim": 512, "n_layers": 2},),
    wide=({"dim": 768, "n_heads": 12, "hidden_dim": 3072},),
    layers="n_layers",
    stem="transformer.layer.0",
    query="attention.q_lin",
    contract="ffn.lin2",
)
MPNET = HfFamily(
    name="MPNet",
    values={"pad_token_id": 1},
    shapes=(NARROW,),
    wide=(BASE,),
    own_graph=True,
    query="attention.attn.q",
    forms=("plain", "sdpa"),
)
DEBERTA = HfFamily(
    name="DebertaV2",
    values={
        "relative_attention": True,
        "position_biased_input": False,
        "pos_att_type": ["p2c", "c2p"],
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_buckets": 16,
        "max_relative_positions": 32,
        "legacy": False,
    },
    shapes=(
        {**NARROW, "position_buckets": 256, "max_relative_positions": -1},
        {"conv_kernel_size": 3, "conv_act": "gelu", "position_buckets": -1},
    ),
    wide=(
        {**BASE, "position_buckets": 256, "max_relative_positions": -1},
        {
            "hidden_size": 384,
            "num_attention_heads": 6,
            "intermediate_size": 1536,
            "position_buckets": 256,
            "max_relative_positions": -1,
        },
    ),
    own_graph=True,
    query="attention.self.query_proj",
    forms=("plain", "sdpa"),
)
ALBERT = HfFamily(
    name="Albert",
    values={"embedding_size": 20},
    endings=("Model", "ForMaskedLM", "ForPreTraining", *CLASSIFIERS),
    shapes=(
        {**NARROW, "embedding_size": 64},
        {"embedding_size": 48, "num_hidden_groups": 2, "inner_group_num": 2},
    ),
    wide=({**BASE, "embedding_size": 128},),
    stem="encoder.albert_layer_groups.0.albert_layers.0",
    query="attention.query",
    contract="ffn_output",
    own_layers=1,
    keeps_pooler=True,
    segments=True,
)
HF_FAMILIES = {x.name: x for x in (ELECTRA, DISTILBERT, MPNET, DEBERTA, ALBERT)}
