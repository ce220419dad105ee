"""Sparse vectors are SciPy's, in memory and in files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import scipy.sparse

from palm_ds.common.sparse_vectors import SparseVectors, load_sparse, products


def test_the_arrays_are_scipys(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    one, other = (rng.random((n, 40), np.float32) * (rng.random((n, 40)) < 0.2) for n in (9, 13))
    one[4] = 0
    vectors, others = SparseVectors.of(one), SparseVectors.of(other)
    theirs = scipy.sparse.csr_array(one)
    assert vectors.shape == theirs.shape and vectors.active.sum() == theirs.nnz
    for name in ("data", "indices", "indptr"):
        np.testing.assert_array_equal(getattr(vectors, name), getattr(theirs, name))
    np.testing.assert_array_equal(vectors.toarray(), one)
    np.testing.assert_allclose(products(vectors, others), one @ other.T, rtol=1e-5)
    SparseVectors.join([vectors, others]).save(tmp_path / "both.npz")
    read = scipy.sparse.load_npz(tmp_path / "both.npz")
    np.testing.assert_array_equal(read.toarray(), np.concatenate([one, other]))
    again = load_sparse(tmp_path / "both.npz").take([3, 10])
    np.testing.assert_array_equal(again.toarray(), [one[3], other[1]])
