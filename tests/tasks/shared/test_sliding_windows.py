"""Windows and best spans compared with exhaustive loops and with BERT's own loop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from palm_ds.tasks.shared.sliding_windows import best_spans, cut, different, most_context


def windows_of_bert(length: int, size: int, stride: int) -> list[tuple[int, int]]:
    """run_squad.py's `doc_spans`, as [first, last)."""
    found, start = [], 0
    while start < length:
        many = min(length - start, size)
        found.append((start, start + many))
        if start + many == length:
            break
        start += min(many, stride)
    return found


def has_most_context(windows: list[tuple[int, int]], here: int, at: int) -> bool:
    """run_squad.py's `_check_is_max_context`."""
    best, best_score = None, None
    for number, (first, last) in enumerate(windows):
        if not first <= at < last:
            continue
        score = min(at - first, last - 1 - at) + 0.01 * (last - first)
        if best_score is None or score > best_score:
            best, best_score = number, score
    return best == here


@settings(max_examples=50, deadline=None)
@given(
    some.lists(some.tuples(some.integers(0, 70), some.integers(1, 30)), min_size=1, max_size=5),
    some.integers(1, 40),
)
def test_windows_equal_berts_and_cover_every_token(texts, stride) -> None:
    lengths, sizes = np.array(texts).T
    made = cut(lengths, sizes, stride)
    for number, (length, size) in enumerate(texts):
        mine = np.flatnonzero(made.text == number)
        windows = list(zip(made.first[mine].tolist(), made.last[mine].tolist(), strict=True))
        assert windows == (windows_of_bert(length, size, stride) or [(0, 0)])
        assert {at for first, last in windows for at in range(first, last)} == set(range(length))
        assert set(made.size[mine]) == {size}
        for here, (first, last) in enumerate(windows if length else []):
            step = int(made.step[mine[here]])
            found = most_context(first, last, size=size, step=step, length=length)
            slow = [has_most_context(windows, here, at) for at in range(first, last)]
            assert found.tolist() == slow


@settings(max_examples=50, deadline=None)
@given(some.integers(0, 12), some.integers(1, 15), some.integers(1, 90), some.randoms())
def test_best_spans_equal_an_exhaustive_search(tokens, longest, most, random) -> None:
    start, end = ([random.randint(-3, 3) for _ in range(tokens)] for _ in range(2))
    allowed = [random.random() < 0.7 for _ in range(tokens)]
    every = [
        (-start[i] - end[j], i, j)
        for i in range(tokens)
        for j in range(i, min(i + longest, tokens))
        if allowed[i]
    ]
    found = best_spans(
        np.array(start, float),
        np.array(end, float),
        longest=longest,
        most=most,
        allowed=np.array(allowed, bool),
    )
    assert found.tolist() == [[i, j] for _, i, j in sorted(every)[:most]]


@pytest.mark.parametrize(
    ("texts", "most", "places"),
    [
        (["a", "b", "a", "c"], 9, [0, 1, 3]),
        (["a", "", "b"], 9, [0, 2]),
        (["a", "a", "b", "c"], 2, [0, 2]),
        ([], 3, []),
    ],
)
def test_different_texts(texts, most, places) -> None:
    assert different(texts, most) == places
