"""Fingerprints of texts."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.corpus.screening import fingerprints
from palm_ds.corpus.screening.fingerprints import (
    Fingerprints,
    bands,
    exact_hash,
    shingles,
    signatures,
)


def test_case_marks_and_spaces_make_no_difference() -> None:
    prints = Fingerprints()
    same = ["The cat's hat: 3 hats!", "the  cat s\nhat 3 hats", "ＴＨＥ cat's hat 3 hats"]
    other = ["the cat s hat 4 hats", "the cats hat 3 hats", "cat the s hat 3 hats"]
    hashes = [exact_hash(prints.terms(text)) for text in [*same, *other]]
    assert len(set(hashes[:3])) == 1 and len(set(hashes)) == 4
    assert len(prints.terms("我爱北京, Beijing 2008")) == 6
    assert len(prints.terms("?!")) == 1


def test_fingerprints_are_the_same_everywhere() -> None:
    """Values that other machines and versions must give too, or corpora differ."""
    terms = Fingerprints().terms("one two three four five six seven")
    assert exact_hash(terms) == 8876881062347071263
    found = signatures([shingles(terms)])
    assert found.shape == (1, fingerprints.SIGNATURE)
    assert found[0, :3].tolist() == [3670589548, 3259272337, 997711515]
    assert int(bands(found)[0, 0]) == 1151201498255814936


def test_the_share_of_equal_values_estimates_the_share_of_common_shingles() -> None:
    rng = np.random.default_rng(0)
    one = rng.integers(0, 1 << 40, 3000).astype(np.uint64)
    for keep in (0.5, 0.8, 0.95):
        other = one.copy()
        changed = rng.random(len(one)) > keep
        other[changed] = rng.integers(0, 1 << 40, int(changed.sum()))
        true = len(np.intersect1d(one, other)) / len(np.union1d(one, other))
        first, second = signatures([one, other])
        assert abs((first == second).mean() - true) < 0.12


def test_short_texts_have_one_shingle() -> None:
    prints = Fingerprints()
    assert len(shingles(prints.terms("one two"))) == 1
    assert len(shingles(prints.terms("one two three four five six"))) == 2


def test_without_rensa_one_line_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(
        UserError, match=r"--dedup: near copies need the package rensa \(pip install"
    ):
        signatures([])
