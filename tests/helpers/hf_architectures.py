"""Small models of transformers' encoders with random norms and biases, or nothing would show that
one is missing."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer, WordPieceTrainer
from torch import nn
from transformers import PreTrainedTokenizerFast

from tests.helpers.neobert import NeoBERT

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 72,
    "max_position_embeddings": 320,
    "attn_implementation": "eager",
}
HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")


@dataclass(frozen=True, kw_only=True)
class Case:
    """An architecture."""

    prefix: str
    """`NomicBert` of `NomicBertModel`."""
    published: dict[str, Any]
    """A published shape; with fewer layers and tokens."""
    narrow: dict[str, Any]
    """Its heads, but few of them."""
    gate: tuple[str, ...]
    """Of layer 1 in a file of the base model: the halves of its gate, one tensor or two."""
    values: dict[str, Any] = field(default_factory=dict)
    """Of the small model."""
    refused: tuple[tuple[dict[str, Any], str], ...] = ()
    """Values of config.json and the error."""


CASES = {
    "nomic_bert": Case(
        prefix="NomicBert",
        published={"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
        narrow={"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 512},
        gate=("encoder.layers.1.mlp.fc11.weight", "encoder.layers.1.mlp.fc12.weight"),
        refused=(
            ({"hidden_act": "gelu"}, "hidden_act: must be 'silu' here, got"),
            ({"prenorm": True}, "prenorm: must be False here, got true"),
            ({"rotary_emb_fraction": 0.5}, "rotary_emb_fraction: must be 1.0 here"),
            ({"hidden_size": "48"}, "hidden_size: expected a whole number"),
            (
                {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1000.0}},
                "rope_parameters.rope_type: must be default here",
            ),
        ),
    ),
    "eurobert": Case(
        prefix="EuroBert",
        published={
            "hidden_size": 1152,
            "num_attention_heads": 18,
            "num_key_value_heads": 6,
            "intermediate_size": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 250_000.0},
        },
        narrow={
            "hidden_size": 192,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "intermediate_size": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 250_000.0},
        },
        gate=("layers.1.mlp.gate_proj.weight", "layers.1.mlp.up_proj.weight"),
        values={"num_key_value_heads": 2, "pad_token_id": 0},
        refused=(
            ({"mlp_bias": True}, "mlp_bias: must be false here, got true"),
            ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide num_attention_"),
            ({"num_key_value_heads": "2"}, "num_key_value_heads: expected a whole number from 1"),
            ({"head_dim": 16}, "head_dim: must be 12 here, got 16"),
            ({"classifier_pooling": "cls"}, "classifier_pooling: must be late, bos or mean, got"),
            ({"rope_scaling": {"factor": 2}}, "rope_scaling: must be null here"),
            ({"rope_parameters": {"rope_theta": "x"}}, "rope_parameters.rope_theta: expected a"),
            (
                {"rope_parameters": {"type": "linear", "factor": 2.0, "rope_theta": 1000.0}},
                "rope_parameters.rope_type: must be default here",
            ),
            (
                {"architectures": ["EuroBertForMaskedLM"], "tie_word_embeddings": True},
                "tie_word_embeddings: must be false here",
            ),
        ),
    ),
    "gte": Case(
        prefix="Gte",
        published={"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
        narrow={"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 512},
        gate=("encoder.layer.1.mlp.up_gate_proj.weight",),
        values={"pad_token_id": 0},
        refused=(
            ({"layer_norm_type": "rms_norm"}, "layer_norm_type: must be 'layer_norm' here, got"),
            ({"logn_attention_scale": True}, "logn_attention_scale: must be False here, got true"),
            ({"hidden_size": "48"}, "hidden_size: expected a whole number"),
            (
                {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1000.0}},
                "rope_parameters.rope_type: must be default here",
            ),
            (
                {"rope_parameters": {"rope_type": "linear", "factor": "x"}},
                "rope_parameters.factor: expected a number of at least 1, got .x",
            ),
        ),
    ),
    "jina_embeddings_v3": Case(
        prefix="JinaEmbeddingsV3",
        published={"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096},
        narrow={"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 512},
        gate=(),
        values={"pad_token_id": 0},
        refused=(
            ({"num_attention_heads": 0}, "num_attention_heads: expected a whole number from 1"),
            ({"rope_scaling": {"factor": 2}}, "rope_scaling: must be null here"),
        ),
    ),
}


def model_of(kind: str, ending: str = "Model", **values: Any) -> Any:
    """A model of this class, in evaluation mode."""
    case = CASES[kind]
    torch.manual_seed(3)
    config = getattr(transformers, f"{case.prefix}Config")(**{**SIZES, **case.values, **values})
    model = getattr(transformers, f"{case.prefix}{ending}")(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name.lower() and name.endswith("weight"):
            nn.init.normal_(parameter, 1.0, 0.3)
        elif name.endswith("bias"):
            nn.init.normal_(parameter)
        else:
            nn.init.normal_(parameter, 0.0, parameter.shape[-1] ** -0.5)
    return model


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def llama_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer as EuroBERT has it: bounds of a text under Llama's names, no unknown
    token, and its end for padding."""
    made = Tokenizer(models.BPE(ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(texts, BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    begin, end, mask = "<|begin_of_text|>", "<|end_of_text|>", "<|mask|>"
    made.add_special_tokens([AddedToken(x, special=True) for x in (begin, end, mask)])
    made.post_processor = TemplateProcessing(
        single=f"{begin} $A {end}",
        pair=f"{begin} $A {end} $B {end}",
        special_tokens=[(x, made.token_to_id(x)) for x in (begin, end)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=begin, eos_token=end, pad_token=end, mask_token=mask
    )


def wordpiece_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer as BERT has it."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.train_from_iterator(texts, WordPieceTrainer(vocab_size=400, special_tokens=specials))
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return PreTrainedTokenizerFast(tokenizer_object=made, **dict(zip(names, specials, strict=True)))


def folder_with_tokenizer(kind: str, folder: Path, texts: list[str], **values: Any) -> Path:
    """A masked-LM folder with a tokenizer for these texts; the table has rows beyond it."""
    words = TOKENIZERS[kind](texts)
    ids = {"vocab_size": -(-len(words) // 64) * 64, "pad_token_id": words.pad_token_id}
    if kind == "neobert":  # no class of transformers
        NeoBERT(**ids, **values).save(folder)
    else:
        model_of(kind, "ForMaskedLM", **ids, **values).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


TOKENIZERS = {
    "eurobert": llama_tokenizer,
    "neobert": wordpiece_tokenizer,
    "gte": wordpiece_tokenizer,
    "jina_embeddings_v3": wordpiece_tokenizer,
}
