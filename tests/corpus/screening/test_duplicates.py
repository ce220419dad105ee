"""Clusters of copies: the same for any division into work units, with bounded memory."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.corpus.screening import duplicates
from palm_ds.corpus.screening.duplicates import (
    Clusters,
    Fingerprints,
    UnitFingerprints,
    bands,
    exact_hash,
    find_clusters,
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
    assert found.shape == (1, duplicates.SIGNATURE)
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


def documents(count: int) -> tuple[list[str], np.ndarray]:
    """Texts of 60 words, every third one a copy of an earlier one with 0, 2 or 30 words changed;
    and which original each has (its own number if it should be kept)."""
    rng = np.random.default_rng(5)
    texts, originals = [], []
    for number in range(count):
        words = [f"w{n}" for n in rng.integers(0, 9000, 60)]
        original = number
        if number % 3 == 2:
            other = int(rng.integers(0, number))
            changed = int(rng.choice([0, 2, 30]))
            copy = texts[other].split()
            # a block, so that few shingles change
            copy[10 : 10 + changed] = words[10 : 10 + changed]
            words = copy
            original = originals[other] if changed < 30 else number
        texts.append(" ".join(words))
        originals.append(original)
    return texts, np.array(originals)


def units_of(texts: list[str], cuts: list[int]) -> list[UnitFingerprints]:
    prints = Fingerprints()
    edges = [0, *cuts, len(texts)]
    units = []
    for start, end in zip(edges, edges[1:], strict=False):
        terms = [prints.terms(text) for text in texts[start:end]]
        exact = np.array([duplicates.exact_hash(each) for each in terms], np.uint64)
        found = duplicates.signatures([duplicates.shingles(each) for each in terms])
        keys = np.concatenate([exact[None], duplicates.bands(found)])
        order = np.argsort(keys, axis=1, kind="stable")
        units.append(
            UnitFingerprints(
                start=start,
                keys=np.take_along_axis(keys, order, axis=1),
                order=order.astype(np.uint32),
                exact=exact,
                signatures=found,
            )
        )
    return units


@pytest.mark.parametrize("cuts", [[], [100], [1, 2, 50, 50, 299]])
@pytest.mark.parametrize("most", [1 << 22, 64])
def test_copies_are_found_in_any_units(
    cuts: list[int], most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplicates, "_MAX_KEYS", most)
    monkeypatch.setattr(duplicates, "_MAX_PAIRS", 7)
    texts, originals = documents(300)
    clusters = find_clusters(units_of(texts, cuts), 0.75, tmp_path / "c.npy")
    assert np.array_equal(clusters.first(np.arange(300)), originals)


def test_links_join_whole_clusters(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    clusters = Clusters(tmp_path / "c.npy", 500)
    one, other = rng.integers(0, 500, (2, 420))
    for part in range(0, 420, 60):
        clusters.link(one[part : part + 60], other[part : part + 60])
    label = np.arange(500)
    for _ in range(500):  # the slow way
        low = np.minimum(label[one], label[other])
        np.minimum.at(label, one, low)
        np.minimum.at(label, other, low)
    assert np.array_equal(clusters.first(np.arange(500)), label)
