"""Small tables and a vocabulary for them: input of fine-tuning, made quickly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from palm_ds.data.reader import TableSettings, open_table
from palm_ds.data.sources.table import TableSource, split_rows
from palm_ds.text.tokenizer import load_tokenizer

WORDS = tuple(f"w{i}" for i in range(40))
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def write_vocabulary(folder: Path) -> Path:
    path = folder / "vocab.txt"
    path.write_text("\n".join([*SPECIALS, *WORDS]) + "\n")
    return path


def sentence(rng: np.random.Generator, shortest: int = 1, longest: int = 20) -> str:
    return " ".join(rng.choice(WORDS, int(rng.integers(shortest, longest + 1))))


def write_table(path: Path, rows: Sequence[Sequence[Any]], *columns: str) -> Path:
    lines = ["\t".join(columns), *("\t".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_texts(path: Path, rows: int, *, classes: int = 2, pairs: bool = False) -> Path:
    """Rows of one text, or of two, with a learnable class: the first word gives it away."""
    rng = np.random.default_rng([rows, classes, pairs])
    made = []
    for _ in range(rows):
        first = sentence(rng)
        label = WORDS.index(first.split()[0]) % classes
        made.append([first, *([sentence(rng)] if pairs else []), f"c{label}"])
    return write_table(path, made, "text_a", *(["text_b"] if pairs else []), "label")


def open_source(path: Path, vocabulary: Path, **settings: Any) -> TableSource:
    """All rows of a file."""
    table = open_table(str(path), TableSettings(**settings))
    return split_rows(table, 0.0, load_tokenizer(vocabulary), path.stem)[0]
