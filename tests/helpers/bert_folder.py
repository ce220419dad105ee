"""A folder of transformers' BERT with random weights, as people have them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertTokenizerFast

from tests.helpers.small_corpus import SPECIALS


def write_bert(folder: Path, model: Any, words: Sequence[str], *, length: int) -> Path:
    """`model`: a class of transformers. Its weights are large enough for losses to differ."""
    (folder / "vocab.txt").write_text("\n".join([*SPECIALS, *words]))
    torch.manual_seed(2)
    config = BertConfig(
        vocab_size=len(SPECIALS) + len(words),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=length,
        initializer_range=0.3,
    )
    model(config).save_pretrained(folder)
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder
