"""How two servers that do not install here read a model's folder, written after their sources.

text-embeddings-inference: router/src/lib.rs, bert.rs and modernbert.rs of
backends/candle/src/models. A key that is read here with [...] is one that it cannot do without.
vLLM: vllm/transformers_utils/config.py (`get_pooling_config` and
`get_sentence_transformer_tokenizer_config`), as of 2026 and as of 2024; registry.py, bert.py,
roberta.py and modernbert.py of vllm/model_executor/models, as of December 2025.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

TEI_TYPES = ("bert", "roberta", "xlm-roberta", "camembert", "modernbert")
"""The model types of TEI that palm_ds writes; it has no ernie."""
_VLLM_TEXT_POOLINGS = ("CLS", "LAST", "MEAN")


_VLLM_EMBEDS = (
    *("BertModel", "RobertaModel", "RobertaForMaskedLM", "XLMRobertaModel", "ModernBertModel"),
)
_VLLM_CLASSIFIES = (
    *("BertForSequenceClassification", "BertForTokenClassification"),
    *("ModernBertForSequenceClassification", "ModernBertForTokenClassification"),
    *("RobertaForSequenceClassification", "XLMRobertaForSequenceClassification"),
)


@dataclass(frozen=True)
class TeiModel:
    kind: str
    """embedding, classifier or reranker."""
    pooling: str
    max_input_length: int
    labels: int


def load(path: Path) -> Any:
    return json.loads(path.read_text())


def as_tei(folder: Path) -> TeiModel:
    """Raises KeyError, AssertionError or FileNotFoundError where TEI would not start."""
    config = load(folder / "config.json")
    assert config["model_type"] in TEI_TYPES, config["model_type"]
    assert (folder / "tokenizer.json").is_file()
    modern = config["model_type"] == "modernbert"
    (_check_modernbert if modern else _check_bert)(config, folder)
    from_zero = config["model_type"] in ("bert", "modernbert")
    offset = 0 if from_zero else config["pad_token_id"] + 1
    settings = folder / "sentence_bert_config.json"
    length = config["max_position_embeddings"] - offset
    if settings.is_file():
        length = load(settings)["max_seq_length"]
    if any(name.endswith("Classification") for name in config["architectures"]):
        labels = len(config["id2label"])
        assert labels == len(config["label2id"])
        return TeiModel("classifier" if labels > 1 else "reranker", "", length, labels)
    pooling = load(folder / "1_Pooling/config.json")
    names = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
    flags = {name: pooling[f"pooling_mode_{name}"] for name in names}
    assert all(type(flag) is bool for flag in flags.values())
    assert flags["cls_token"] or flags["mean_tokens"], "pooling config is not supported"
    return TeiModel("embedding", "cls" if flags["cls_token"] else "mean", length, 0)


def _check_bert(config: dict[str, Any], folder: Path) -> None:
    """The config's types, and the tables that it looks up in model.safetensors."""
    whole = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    whole += ("intermediate_size", "max_position_embeddings", "type_vocab_size", "pad_token_id")
    assert all(type(config[key]) is int for key in whole)
    fractions = ("hidden_dropout_prob", "initializer_range", "layer_norm_eps")
    assert all(type(config[key]) is float for key in fractions)
    assert config["hidden_act"] in ("gelu", "gelu_new", "relu", "silu", "swiglu")
    with safe_open(folder / "model.safetensors", "pt") as file:
        own = "embeddings.LayerNorm.weight" in file.keys()  # noqa: SIM118
        prefix = "" if own else "bert." if config["model_type"] == "bert" else "roberta."
        for table, rows in (
            ("word_embeddings", "vocab_size"),
            ("position_embeddings", "max_position_embeddings"),
            ("token_type_embeddings", "type_vocab_size"),
        ):
            found = file.get_slice(f"{prefix}embeddings.{table}.weight").get_shape()
            assert found == [config[rows], config["hidden_size"]]


def _check_modernbert(config: dict[str, Any], folder: Path) -> None:
    """The same of a ModernBERT."""
    whole = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    whole += ("num_attention_heads", "max_position_embeddings", "local_attention")
    whole += ("global_attn_every_n_layers",)
    roles = ("pad", "bos", "cls", "eos", "sep")
    assert all(type(config[key]) is int for key in (*whole, *(f"{x}_token_id" for x in roles)))
    fractions = ("initializer_range", "initializer_cutoff_factor", "norm_eps", "attention_dropout")
    fractions += ("global_rope_theta", "local_rope_theta")
    assert all(type(config[key]) is float for key in fractions)
    assert all(type(config[key]) is bool for key in ("norm_bias", "attention_bias"))
    assert {config["hidden_activation"], config["classifier_activation"]} <= {"gelu", "relu"}
    with safe_open(folder / "model.safetensors", "pt") as file:
        own = "final_norm.weight" in file.keys()  # noqa: SIM118
        table = f"{'' if own else 'model.'}embeddings.tok_embeddings.weight"
        shape = file.get_slice(table).get_shape()
        assert shape == [config["vocab_size"], config["hidden_size"]]


def vllm_class(folder: Path) -> str:
    """embed or classify: what vLLM's class for this folder does. Raises AssertionError if its
    registry has none, or if that class would not find its weights under their names."""
    (named,) = load(folder / "config.json")["architectures"]
    assert named in (*_VLLM_EMBEDS, *_VLLM_CLASSIFIES), f"{named} is not supported"
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
    if named == "BertModel":  # puts `model.` before every name, whatever it starts with
        assert "embeddings.word_embeddings.weight" in names
    elif named == "ModernBertModel":
        assert "embeddings.tok_embeddings.weight" in names
        assert "layer_norm_eps" in load(folder / "config.json")  # transformers knows norm_eps
    elif named in _VLLM_EMBEDS:  # removes `roberta.`, and ignores the masked-LM head
        assert names & {f"{x}embeddings.word_embeddings.weight" for x in ("", "roberta.")}
        assert all(name.startswith(("roberta.", "lm_head.")) for name in names) or not any(
            name.startswith("roberta.") for name in names
        )
    return "embed" if named in _VLLM_EMBEDS else "classify"


def as_vllm(folder: Path) -> tuple[str, bool, int]:
    """(pooling, whether vectors are normalized, maximum length)"""
    types = {each["type"]: each for each in load(folder / "modules.json")}
    module = types["sentence_transformers.models.Pooling"]
    pooling = ""
    for key, value in load(folder / module["path"] / "config.json").items():
        named = value if key == "pooling_mode" and isinstance(value, str) else key
        if (named is value or value is True) and _vllm_name(named) in _VLLM_TEXT_POOLINGS:
            pooling = _vllm_name(named)
    about = load(folder / "sentence_bert_config.json")
    assert {"max_seq_length", "do_lower_case"} <= about.keys()
    return pooling, "sentence_transformers.models.Normalize" in types, about["max_seq_length"]


def as_old_vllm(folder: Path) -> str:
    """Its pooling: that of the first entry which is true."""
    settings = load(folder / "1_Pooling/config.json")
    return _vllm_name(next(key for key, value in settings.items() if value is True))


def _vllm_name(key: str) -> str:
    return key.replace("pooling_mode_", "").split("_")[0].replace("lasttoken", "last").upper()
