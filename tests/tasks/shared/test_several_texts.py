"""Texts of a row that share a row of the batch are cut longest first."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.tasks.shared.several_texts import tokenise
from tests.helpers.text_tables import source_of

ROWS = [["so " * 9, "good", ""], ["bad"], ["so " * 40, "so " * 30]]


def test_tokens_of_each_text(tmp_path: Path) -> None:
    source = source_of(tmp_path, [{"text_a": "x"}] * len(ROWS))
    texts = tokenise(ROWS, source, "texts")
    assert texts.counts.tolist() == [3, 1, 2] and list(texts.of(2)) == [4, 5]
    added, items = np.array([2, 2, 5]), np.array([0, 1, 2])
    assert texts.cut(items, added, source, 100, 100).tolist() == [
        [11, 3, 2],
        [3, 0, 0],
        [45, 35, 0],
    ]
    assert texts.cut(items, added, source, 20, 30)[2].tolist() == [15, 15, 0]
    assert texts.cut(items[:1], added[:1], source, 8, 100).tolist() == [[8, 3, 2]]
    with pytest.raises(UserError, match=r":3: 2 texts leave fewer than 8 tokens for each in"):
        texts.cut(items, added, source, 20, 15)
