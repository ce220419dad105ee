"""Pooling of a model's token vectors into one vector of a text, as files of sentence-transformers.

    modules.json                       encoder, Pooling, and Normalize if there is one; of sparse
                                       vectors the masked-LM model and SpladePooling
    1_Pooling/config.json              the pooling twice: the flags that text-embeddings-inference
                                       requires, and the name that sentence-transformers 6 writes
    sentence_bert_config.json          maximum length
    config_sentence_transformers.json  prompts, similarity

The classes have the names of sentence-transformers 2 to 5, which all versions and vLLM know; those
of a SparseEncoder are of 5.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from palm_ds.common.json_files import write_json
from palm_ds.model.pooling import SPLADE, TextPooling

UNTRAINED = "palm_ds_untrained"
"""The key of config_sentence_transformers.json that says, if true, that the encoder was not trained
to give such vectors: a usual pooling, for programs that need one."""
FLAGS = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
"""{pooling in sentence-transformers 6: its flag in earlier versions}"""
_PREFIX, _SPARSE = "sentence_transformers.models.", "sentence_transformers.sparse_encoder.models."


SPLADE_SETTINGS = {
    "pooling_strategy": "max",
    "activation_function": "relu",
    "word_embedding_dimension": None,
}
"""Those of a SpladePooling that is SPLADE v2's; the dimension is the vocabulary's."""


def pooling_files(pooling: TextPooling, hidden_size: int, max_length: int) -> dict[str, Any]:
    """{path: JSON content} for an encoder that reads up to `max_length` tokens."""
    sparse = pooling.pooling == SPLADE
    kinds = ["MLMTransformer", "SpladePooling"] if sparse else ["Transformer", "Pooling"]
    kinds += ["Normalize"] if pooling.normalize else []
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{kind}" if i else "",
            "type": f"{_PREFIX if kind == 'Normalize' or not sparse else _SPARSE}{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    length = min(pooling.max_length or max_length, max_length)
    return {
        "modules.json": modules,
        f"{modules[1]['path']}/config.json": SPLADE_SETTINGS
        if sparse
        else in_both_dialects(
            {"word_embedding_dimension": hidden_size, "pooling_mode": pooling.pooling}
        ),
        "sentence_bert_config.json": {"max_seq_length": length, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "model_type": "SparseEncoder" if sparse else "SentenceTransformer",
            "prompts": dict(pooling.prompts),
            "default_prompt_name": None,
            "similarity_fn_name": pooling.similarity,
            **({} if pooling.trained else {UNTRAINED: True}),
        },
    }


def write_pooling(pooling: TextPooling, folder: Path, *, hidden_size: int, max_length: int) -> None:
    """Write the files into a folder."""
    for name, content in pooling_files(pooling, hidden_size, max_length).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_json(folder / name, content)


def in_both_dialects(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a Pooling with a flag for each kind and with `pooling_mode`. `include_prompt`
    comes last: older versions of vLLM take the first entry that is true for the pooling."""
    kinds = _kinds(settings)
    size = settings.get("word_embedding_dimension", settings.get("embedding_dimension"))
    known = {"word_embedding_dimension", "embedding_dimension", "pooling_mode", "include_prompt"}
    return {
        **({"word_embedding_dimension": size} if size is not None else {}),
        **{flag: kind in kinds for kind, flag in FLAGS.items()},
        **{k: value for k, value in settings.items() if k not in known and k not in FLAGS.values()},
        "pooling_mode": kinds[0] if len(kinds) == 1 else kinds,
        "include_prompt": settings.get("include_prompt", True),
    }


def _kinds(settings: Mapping[str, Any]) -> list[str]:
    """The poolings whose results are concatenated, in sentence-transformers' order."""
    named = settings.get("pooling_mode")
    if isinstance(named, str):
        return [named]
    if isinstance(named, list):
        return [str(kind) for kind in named]
    return [kind for kind, flag in FLAGS.items() if settings.get(flag) is True] or ["mean"]
