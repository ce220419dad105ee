"""Progress is reported from this process, from worker processes, and in nested runs."""

from __future__ import annotations

import pytest

from palm_ds.corpus.executors import ProgressCallback, open_executor, report_progress


def work(size: int) -> int:
    report_progress(size, 2 * size)
    return size


def last_into(seen: dict[str, tuple[int, int]], name: str) -> ProgressCallback:
    def watch(text_bytes: int, input_bytes: int) -> None:
        seen[name] = (text_bytes, input_bytes)

    return watch


@pytest.mark.parametrize("workers", [1, 2])
def test_counts_are_summed(workers: int) -> None:
    seen: dict[str, tuple[int, int]] = {}
    with open_executor(workers=workers, mpi=False, watch=last_into(seen, "all")) as run:
        assert list(run(work, [1, 2, 3, 4])) == [1, 2, 3, 4]
    assert seen == {"all": (10, 20)}


def test_nested_runs_report_separately() -> None:
    seen: dict[str, tuple[int, int]] = {}
    with open_executor(workers=1, mpi=False, watch=last_into(seen, "outer")) as run:
        list(run(work, [1]))
        with open_executor(workers=1, mpi=False, watch=last_into(seen, "inner")) as inner:
            list(inner(work, [5]))
        list(run(work, [2]))
    assert seen == {"outer": (3, 6), "inner": (5, 10)}


def test_progress_without_a_callback_is_dropped() -> None:
    with open_executor(workers=1, mpi=False) as run:
        assert list(run(work, [1])) == [1]
