"""Small models of transformers' ModernBERT with random norms and biases, or nothing would show that
one is missing, and folders of them with a byte-level tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from torch import nn
from transformers import ModernBertConfig, PreTrainedTokenizerFast

SPECIALS = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 72,
    "max_position_embeddings": 320,
    "local_attention": 8,
    "attn_implementation": "eager",
}
IDS = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "cls_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 2,
}


def modernbert(ending: str = "Model", **values: Any) -> Any:
    """A model of this class, in evaluation mode."""
    torch.manual_seed(3)
    made: Any = ModernBertConfig  # it takes older keys, too
    config = made(**{**SIZES, **IDS, **values})
    model = getattr(transformers, f"ModernBert{ending}")(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, 1.0, 0.3)
        elif name.endswith("bias"):
            nn.init.normal_(parameter)
        else:
            nn.init.normal_(parameter, 0.0, parameter.shape[-1] ** -0.5)
    return model


def tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer as ModernBERT has it: special tokens last, no space in front."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(texts, BpeTrainer(vocab_size=500, initial_alphabet=alphabet))
    made.add_special_tokens(
        [AddedToken(x, lstrip=x == "[MASK]", normalized=False, special=True) for x in SPECIALS]
    )
    ids = [(x, made.token_to_id(x)) for x in ("[CLS]", "[SEP]")]
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=ids
    )
    names = ("unk_token", "cls_token", "sep_token", "pad_token", "mask_token")
    order = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        model_input_names=["input_ids", "attention_mask"],
        **dict(zip(names, order, strict=True)),
    )


def mmbert_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """As mmBERT has it: pieces with a mark in place of a space, bytes for unknown characters, and
    special tokens by other names."""
    names = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    pieces = [*names, *(f"<0x{number:02X}>" for number in range(256))]
    trainer = BpeTrainer(vocab_size=500, special_tokens=pieces, max_token_length=12)
    made.train_from_iterator([x.replace(" ", "▁") for x in texts], trainer)
    state = json.loads(made.to_str()) | {"added_tokens": []}  # bytes are pieces like any other
    made = Tokenizer.from_str(json.dumps(state))
    made.add_special_tokens([AddedToken(x, normalized=False, special=True) for x in names])
    ids = [(x, made.token_to_id(x)) for x in ("<bos>", "<eos>")]
    made.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", pair="<bos> $A <eos> $B <eos>", special_tokens=ids
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="<unk>",
        bos_token="<bos>",
        cls_token="<bos>",
        eos_token="<eos>",
        sep_token="<eos>",
        pad_token="<pad>",
        mask_token="<mask>",
    )


def folder_with_tokenizer(folder: Path, texts: list[str], **values: Any) -> Path:
    """A masked-LM folder with a tokenizer for these texts; the table has rows beyond it."""
    words = tokenizer(texts)
    ids = {
        "pad_token_id": words.pad_token_id,
        "bos_token_id": words.cls_token_id,
        "cls_token_id": words.cls_token_id,
        "eos_token_id": words.sep_token_id,
        "sep_token_id": words.sep_token_id,
    }
    size = -(-len(words) // 64) * 64
    modernbert("ForMaskedLM", **{"vocab_size": size, **ids, **values}).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder
