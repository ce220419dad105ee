"""Sizes of published encoders, by name.

backbone: {preset: ernie-2.0-base}
"""

from __future__ import annotations

from typing import Any

from palm_ds.model.config.encoder_kinds import defaults_of_kind

_LARGE = dict(hidden_size=1024, num_layers=24, num_heads=16)
_ROBERTA_BASE = dict(
    max_positions=514, position_offset=2, pad=1, token_types=1, task_types=0, layer_norm_eps=1e-5
)

_NO_DROPOUT = dict(dropout=0.0, attention_dropout=0.0)
_UNIMO_TEXT = dict(kind="unimo", activation="relu", token_types=4, position_offset=0, pad=0)


def _modern(
    hidden_size: int, num_layers: int, num_heads: int, intermediate_size: int, **more: Any
) -> dict[str, Any]:
    """Sizes of a ModernBERT, whose other values are the defaults of its kind."""
    return dict(
        kind="modernbert",
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        intermediate_size=intermediate_size,
        **more,
    )


def _euro(hidden_size: int, num_layers: int, num_heads: int, inner: int, kv: int) -> dict[str, Any]:
    """Sizes of a EuroBERT."""
    return dict(
        kind="eurobert",
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        intermediate_size=inner,
        **({} if kv == num_heads else {"options": {"kv_heads": kv}}),
    )


def _ernie_3(
    hidden_size: int, num_layers: int, task_types: int = 16, num_heads: int = 12
) -> dict[str, Any]:
    """Sizes of an ERNIE 3.0, of which small ones are distilled."""
    return dict(
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        max_positions=2048,
        task_types=task_types,
        layer_norm_eps=1e-5,
    )


_MODERN_BASE = _modern(768, 22, 12, 1152)
_MODERN_LARGE = _modern(1024, 28, 16, 2624)
_ALL_160K = {"local_rotary_base": 160_000.0}
PRESETS: dict[str, dict[str, Any]] = {
    # Published sizes; the vocabulary comes from the tokenizer. ERNIE's are from the configs of its
    # `repro` branch and its released archives, and PaddleNLP has the same. ERNIE 1.0 is Chinese;
    # ERNIE 2.0 uses relu in Chinese; tiny has the two token types of 1.0 and no task embedding.
    "ernie-1.0-base": dict(
        activation="relu", max_positions=513, token_types=2, task_types=0, layer_norm_eps=1e-5
    ),
    "ernie-2.0-base": dict(layer_norm_eps=1e-5),
    "ernie-2.0-large": dict(**_LARGE, layer_norm_eps=1e-5),
    "ernie-2.0-base-zh": dict(activation="relu", max_positions=513, layer_norm_eps=1e-5),
    "ernie-2.0-large-zh": dict(**_LARGE, activation="relu", layer_norm_eps=1e-5),
    "ernie-tiny": dict(
        hidden_size=1024,
        num_layers=3,
        num_heads=16,
        activation="relu",
        max_positions=600,
        token_types=2,
        task_types=0,
        layer_norm_eps=1e-5,
    ),
    # PaddleNLP's sizes; those of `v2` have no task embedding. Another inner size than 4 times the
    # hidden size is in ernie-1.0-large-zh-cw alone.
    "ernie-1.0-base-zh-cw": dict(task_types=3, layer_norm_eps=1e-5),
    "ernie-1.0-large-zh-cw": dict(
        **_LARGE,
        intermediate_size=3072,
        activation="relu",
        token_types=2,
        task_types=0,
        layer_norm_eps=1e-5,
    ),
    "ernie-3.0-xbase-zh": _ernie_3(1024, 20, num_heads=16),
    "ernie-3.0-base-zh": _ernie_3(768, 12, 3),
    "ernie-3.0-medium-zh": _ernie_3(768, 6),
    "ernie-3.0-mini-zh": _ernie_3(384, 6),
    "ernie-3.0-micro-zh": _ernie_3(384, 4),
    "ernie-3.0-nano-zh": _ernie_3(312, 4),
    "ernie-3.0-tiny-base-v2-zh": _ernie_3(768, 12, 0),
    "ernie-3.0-tiny-medium-v2-zh": _ernie_3(768, 6, 0),
    "ernie-3.0-tiny-mini-v2-zh": _ernie_3(384, 6, 0),
    "ernie-3.0-tiny-micro-v2-zh": _ernie_3(384, 4, 0),
    "ernie-3.0-tiny-nano-v2-zh": _ernie_3(312, 4, 0),
    "ernie-3.0-tiny-pico-v2-zh": _ernie_3(128, 3, 0, num_heads=2),
    "ernie-gen-base": dict(max_positions=1024, task_types=0, layer_norm_eps=1e-5),
    "ernie-gen-large": dict(**_LARGE, max_positions=1024, task_types=0, layer_norm_eps=1e-5),
    # ERNIE-Gram. The Chinese one has no relative positions; its sizes are PaddleNLP's.
    "ernie-gram-base": dict(kind="ernie_gram"),
    "ernie-gram-large": dict(kind="ernie_gram", **_LARGE),
    "ernie-gram-zh": dict(token_types=2, task_types=0, layer_norm_eps=1e-5),
    # ERNIE-Doc: windows of 512 tokens, and 128 vectors of memory; the English ones drop nothing.
    "ernie-doc-base-en": dict(kind="ernie_doc", **_NO_DROPOUT),
    "ernie-doc-large-en": dict(kind="ernie_doc", **_LARGE, **_NO_DROPOUT),
    "ernie-doc-base-zh": dict(kind="ernie_doc"),
    "doc-tiny": dict(
        kind="ernie_doc",
        hidden_size=128,
        num_layers=2,
        num_heads=2,
        max_positions=128,
        options={"memory_length": 64},
        **_NO_DROPOUT,
    ),
    # ERNIE-M has XLM-RoBERTa's sizes. UNIMO reads texts here; UNIMO-text is Chinese, its sizes are
    # PaddleNLP's.
    "ernie-m-base": _ROBERTA_BASE,
    "ernie-m-large": dict(**_ROBERTA_BASE, **_LARGE),
    "unimo-base-en": dict(kind="unimo"),
    "unimo-large-en": dict(kind="unimo", **_LARGE),
    # Widths of streams of regions, which the files at hand do not state, are the kind's defaults.
    "ernie-vil-base-en": dict(kind="ernie_vil"),
    "ernie-vil-large-en": dict(kind="ernie_vil", **_LARGE),
    "unimo-text-1.0": dict(**_UNIMO_TEXT, max_positions=513),
    "unimo-text-1.0-large": dict(**_UNIMO_TEXT, **_LARGE, max_positions=512),
    "bert-base": dict(token_types=2, task_types=0),
    "bert-large": dict(**_LARGE, token_types=2, task_types=0),
    "roberta-base": _ROBERTA_BASE,
    "roberta-large": dict(**_ROBERTA_BASE, **_LARGE),
    # ModernBERT's, Ettin's and mmBERT's sizes; the positions are those that each promises.
    "modernbert-base": dict(**_MODERN_BASE, options={"text_pooling": "mean"}),
    "modernbert-large": dict(**_MODERN_LARGE, options={"text_pooling": "mean"}),
    "ettin-17m": _modern(256, 7, 4, 384, max_positions=7999),
    "ettin-32m": _modern(384, 10, 6, 576, max_positions=7999, options=_ALL_160K),
    "ettin-68m": _modern(512, 19, 8, 768, max_positions=7999, options=_ALL_160K),
    "ettin-150m": dict(**_MODERN_BASE, max_positions=7999, options=_ALL_160K),
    "ettin-400m": dict(**_MODERN_LARGE, max_positions=7999, options=_ALL_160K),
    "ettin-1b": _modern(1792, 28, 28, 3840, max_positions=7999, options=_ALL_160K),
    "mmbert-small": _modern(384, 22, 6, 1152, options=_ALL_160K),
    "mmbert-base": dict(**_MODERN_BASE, options=_ALL_160K),
    "eurobert-210m": _euro(768, 12, 12, 3072, 12),
    "eurobert-610m": _euro(1152, 26, 18, 4096, 6),
    "eurobert-2.1b": _euro(2304, 32, 18, 6144, 6),
    "neobert": dict(kind="neobert", hidden_size=768, num_layers=28, intermediate_size=2048),
    "gte-multilingual-base": dict(kind="gte", pad=1),
    "gte-base-en-v1.5": dict(kind="gte", options={"token_types": False}),
    "jina-embeddings-v3": dict(kind="jina_embeddings_v3", **_LARGE),
    "nomic-bert-2048": dict(kind="nomic_bert", hidden_size=768, num_layers=12, num_heads=12),
    "electra-small": dict(
        kind="electra",
        hidden_size=256,
        num_heads=4,
        intermediate_size=1024,
        options={"embedding_size": 128},
    ),
    "electra-base": dict(kind="electra"),
    "electra-large": dict(kind="electra", **_LARGE),
    "distilbert-base": dict(kind="distilbert"),
    "mpnet-base": dict(kind="mpnet"),
    # ALBERT's second version, and Chinese ones with a vocabulary of BERT's.
    "albert-base-v2": dict(kind="albert"),
    "albert-large-v2": dict(kind="albert", **_LARGE),
    "albert-xlarge-v2": dict(kind="albert", hidden_size=2048, num_layers=24, num_heads=16),
    "albert-xxlarge-v2": dict(kind="albert", hidden_size=4096, num_heads=64),
    "albert-chinese-tiny": dict(
        kind="albert", hidden_size=312, num_layers=4, num_heads=12, activation="gelu"
    ),
    "albert-chinese-small": dict(
        kind="albert", hidden_size=384, num_layers=6, num_heads=12, activation="gelu"
    ),
    "albert-chinese-base": dict(kind="albert", activation="relu"),
    "deberta-v3-xsmall": dict(kind="deberta_v2", hidden_size=384, num_heads=6),
    "deberta-v3-small": dict(kind="deberta_v2", num_layers=6),
    "deberta-v3-base": dict(kind="deberta_v2"),
    "deberta-v3-large": dict(kind="deberta_v2", **_LARGE),
    # ModernBERT's architecture in sizes for a CPU, with ERNIE 2.0's task embedding.
    "modern-tiny": _modern(128, 2, 2, 192, max_positions=1024, task_types=16),
    "modern-small": _modern(256, 4, 4, 384, max_positions=1024, task_types=16),
    # ERNIE 2.0's architecture in sizes for a CPU.
    "tiny": dict(hidden_size=128, num_layers=2, num_heads=2, layer_norm_eps=1e-5),
    "mini": dict(hidden_size=256, num_layers=2, num_heads=4, layer_norm_eps=1e-5),
    "small": dict(hidden_size=256, num_layers=4, num_heads=4, layer_norm_eps=1e-5),
    "medium": dict(hidden_size=512, num_layers=8, num_heads=8, layer_norm_eps=1e-5),
}


def preset_values(name: str) -> dict[str, Any]:
    """The hyperparameters of one of PRESETS, with the defaults of its kind."""
    return {**defaults_of_kind(PRESETS[name].get("kind")), **PRESETS[name]}
