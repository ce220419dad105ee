"""What stored scores belong to."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from palm_ds.corpus.writer import write_corpus
from palm_ds.train.recipe.recipe import make_recipe
from palm_ds.train.setup.sources import open_data
from palm_ds.train.teachers.stored_scores import stream_fingerprint
from tests.helpers.small_tables import TINY
from tests.helpers.text_tables import small_tokenizer


def print_of(folder: Path, seed: int) -> str:
    """With a corpus whose documents have as many tokens whatever the seed."""
    rng, marks = np.random.default_rng(seed), np.eye(1, 20, dtype=np.uint8)[0]
    units = dict.fromkeys(("sentence", "word", "phrase", "entity"), marks)
    texts = [(f"doc{n}", rng.integers(5, 10, 20), units) for n in range(4)]
    write_corpus(folder, texts, small_tokenizer())
    recipe = make_recipe(
        {
            "backbone": TINY,
            "length": 32,
            "batch": "2 rows",
            "sources": {"text": {"corpus": str(folder)}},
            "tasks": {"words": {"kind": "knowledge_masking", "source": "text", "units": ["token"]}},
            "stages": [{"words": 1}],
        }
    )
    found = stream_fingerprint(recipe, open_data(recipe))
    shutil.rmtree(folder)
    return found


def test_steps_are_those_of_the_same_texts(tmp_path: Path) -> None:
    first, again, other = (print_of(tmp_path / "corpus", seed) for seed in (1, 1, 2))
    assert first == again != other
