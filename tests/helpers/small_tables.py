"""Small tables of two classes that a small encoder learns, and the encoder to learn them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

WORDS = 40
TINY = {"preset": "tiny", "max_positions": 64}


def write_tables(folder: Path, *, train: int = 48, dev: int = 24) -> Path:
    """vocab.txt, train.tsv, dev.tsv: texts of low words are `no`, of high words `yes`."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(WORDS))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    rng = random.Random(0)
    for name, many in (("train", train), ("dev", dev)):
        lines = [f"{row['label']}\t{row['text_a']}" for row in rows(rng, many)]
        (folder / f"{name}.tsv").write_text("\n".join(["label\ttext_a", *lines]) + "\n")
    return folder


def rows(rng: random.Random, many: int) -> list[dict[str, Any]]:
    """Rows of both classes, alternating."""
    half = WORDS // 2
    found = []
    for number in range(many):
        words = [
            f"w{rng.randrange(half) + half * (number % 2)}" for _ in range(rng.randrange(2, 9))
        ]
        found.append({"label": ("no", "yes")[number % 2], "text_a": " ".join(words)})
    return found
