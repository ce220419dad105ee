import numpy as np
import pytest

from palm_ds.common.rng import derive_key, keyed_generator, keyed_uniform, permutation_at


def test_key_is_stable_and_depends_on_every_part():
    assert derive_key(1, "a") == derive_key(1, "a")
    different = [derive_key(1, "a"), derive_key(1, "b"), derive_key(2, "a"), derive_key("1", "a")]
    assert len(set(different)) == 4


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 65, 1000, 4097])
def test_permutation_at_is_a_permutation(size):
    out = permutation_at(derive_key("p", size), size, np.arange(size))
    assert sorted(out) == list(range(size))


def test_permutations_differ_by_key_and_spread():
    index = np.arange(10_000)
    a = permutation_at(derive_key("a"), len(index), index)
    b = permutation_at(derive_key("b"), len(index), index)
    assert (a == b).mean() < 0.01
    assert abs(np.corrcoef(index, a)[0, 1]) < 0.05


def test_uniform_is_a_function_of_n_alone():
    whole = keyed_uniform(7, np.arange(1000), 3)
    part = keyed_uniform(7, np.arange(500, 510), 3)
    assert np.array_equal(whole[500:510], part)
    assert abs(whole.mean() - 0.5) < 0.03
    assert abs(np.corrcoef(whole.T)[0, 1]) < 0.1


def test_generator_streams_do_not_overlap():
    first, second = keyed_generator(3, 0).random(100_000), keyed_generator(3, 1).random(100_000)
    assert len(np.intersect1d(first, second)) == 0
    assert np.array_equal(first, keyed_generator(3, 0).random(100_000))
