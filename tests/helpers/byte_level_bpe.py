"""A folder with a small vocab.json and merges.txt, as fairseq and PaddleNLP have them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import ByteLevelBPETokenizer

SPECIALS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
TEXTS = [
    "Hello worlds! return the list of names, café naïve don't stop 42 times.",
    "中文 文本 a b c  double  space 😀",
    "open a <mask> file</s>",
    " in front",
    "",
]


def bpe_folder(
    folder: Path, settings: Mapping[str, Any] | None, texts: Sequence[str] = TEXTS
) -> Path:
    """`settings`: the content of tokenizer_config.json; None: no such file."""
    made = ByteLevelBPETokenizer()
    made.train_from_iterator([*texts] * 10, vocab_size=320, special_tokens=SPECIALS)
    folder.mkdir(parents=True, exist_ok=True)
    made.save_model(str(folder))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
