"""Small transformers of every kind, with options that make their layers differ from BERT's."""

from __future__ import annotations

from typing import Any

from palm_ds.model.config.config import EncoderConfig

TRANSFORMERS: dict[str, dict[str, Any]] = {
    "bert": {"task_types": 0},
    "modernbert": {"options": {"window": 3, "text_pooling": "mean"}},
    "eurobert": {"options": {"kv_heads": 2}},
    "neobert": {},
    "gte": {},
    "nomic_bert": {},
    "jina_embeddings_v3": {},
    "electra": {"options": {"embedding_size": 24}},
    "albert": {"options": {"embedding_size": 24}},
    "distilbert": {},
    "mpnet": {},
    "deberta_v2": {"options": {"buckets": 8, "longest": 16, "convolution": 3}},
}
"""{kind: values that small_transformer's do not have}"""
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "intermediate_size": 48,
    "max_positions": 64,
    "init_range": 0.2,
}


def small_transformer(kind: str, **values: Any) -> EncoderConfig:
    """Its hyperparameters; those given here replace others."""
    return EncoderConfig.from_dict({"kind": kind, **SIZES, **TRANSFORMERS[kind], **values})
