import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from palm_ds.data.stream.packing import pack, padded_length, rows_to_predict


@given(st.lists(st.integers(1, 50), max_size=200))
def test_every_example_once_and_no_row_too_long(lengths):
    rows = pack(np.array(lengths, np.int64), 50)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 50 for row in rows)


def slowly(lengths: list[int], max_length: int) -> list[list[int]]:
    """Best fit decreasing, as in the textbook."""
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        free = {r: max_length - sum(lengths[i] for i in row) for r, row in enumerate(rows)}
        fitting = {r: space for r, space in free.items() if space >= lengths[index]}
        if fitting:
            rows[min(fitting, key=fitting.__getitem__)].append(index)
        else:
            rows.append([index])
    return rows


@given(st.lists(st.integers(1, 50), min_size=1, max_size=100))
def test_rows_are_filled_as_in_the_textbook(lengths):
    def filled(rows: list[list[int]]) -> list[int]:  # rows of one fill are interchangeable
        return sorted(sum(lengths[i] for i in row) for row in rows)

    assert filled(pack(np.array(lengths), 50)) == filled(slowly(lengths, 50))


def test_packing_is_best_fit():
    """3 goes where it fills the row: with 7, not with 6."""
    assert [sorted(row) for row in pack(np.array([6, 7, 3, 2]), 10)] == [[1, 2], [0, 3]]


def test_too_long_examples_are_refused():
    with pytest.raises(ValueError, match="do not fit"):
        pack(np.array([11]), 10)


def test_rows_of_predictions():
    lengths = np.array([3, 9, 3, 60, 9])
    assert [row.tolist() for row in rows_to_predict(lengths, "tiles")] == [[3, 1, 4, 0, 2]]
    rows = [row.tolist() for row in rows_to_predict(lengths, "sdpa")]
    assert sorted(sum(rows, [])) == [0, 1, 2, 3, 4] and len(rows) == 2
    assert padded_length(83, torch.device("cpu")) == 83
    assert padded_length(83, torch.device("cuda")) == 88
