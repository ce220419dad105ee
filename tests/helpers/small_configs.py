"""Encoders of a few numbers that checkpoints are tested with, and vocabularies of letters."""

from __future__ import annotations

from dataclasses import replace

from palm_ds.model.config.config import EncoderConfig
from palm_ds.text.tokenizer import Tokenizer, wordpiece

TINY = EncoderConfig(
    vocab_size=11,
    hidden_size=8,
    num_layers=2,
    num_heads=2,
    intermediate_size=12,
    max_positions=10,
    token_types=3,
    task_types=4,
)
SMALL = EncoderConfig(
    vocab_size=32,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    intermediate_size=24,
    max_positions=20,
    task_types=3,
    layer_norm_eps=1e-5,
)


def bert_of(config: EncoderConfig) -> EncoderConfig:
    """The same without task embedding, as BERT is, with another activation."""
    return replace(config, task_types=0, token_types=2, activation="relu")


def roberta_of(config: EncoderConfig) -> EncoderConfig:
    """The same with RoBERTa's positions, which begin after the padding's."""
    return replace(config, task_types=0, token_types=1, max_positions=22, position_offset=2, pad=1)


def letters(end: str) -> Tokenizer:
    """A vocabulary of BERT's special tokens and the letters from a to `end`."""
    words = [chr(code) for code in range(ord("a"), ord(end) + 1)]
    return wordpiece(["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", *words], lower=True)


ERNIE_DOC = {
    "kind": "ernie_doc",
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "max_positions": 32,
    "options": {"memory_length": 12},
    "dropout": 0.1,
    "attention_dropout": 0.1,
}
"""`backbone` of a recipe: windows of 32 tokens with memories of 12."""
