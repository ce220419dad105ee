"""Clusters of copies: the same for any division into work units, with bounded memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from palm_ds.corpus.screening import duplicates, fingerprints
from palm_ds.corpus.screening.duplicates import Clusters, UnitFingerprints, find_clusters
from palm_ds.corpus.screening.fingerprints import Fingerprints


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
        exact = np.array([fingerprints.exact_hash(each) for each in terms], np.uint64)
        found = fingerprints.signatures([fingerprints.shingles(each) for each in terms])
        keys = np.concatenate([exact[None], fingerprints.bands(found)])
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
