"""A process that makes the others wait is named once, not for a moment's delay."""

from __future__ import annotations

from palm_ds.train.loop.slow_ranks import RankTime, SlowRanks


def times(*seconds: float, waited: float = 0.0) -> list[RankTime]:
    """The last process has also waited for data."""
    last = len(seconds) - 1
    return [
        RankTime(host=f"h{rank}", forward=each, waited=waited if rank == last else 0.0)
        for rank, each in enumerate(seconds)
    ]


def test_a_slow_process_is_named_once_per_episode() -> None:
    slow = SlowRanks()
    lines = [slow.add(times(1.0, 1.1, 2.0, 0.9), 5.0) for _ in range(30)]
    assert [len(each) for each in lines] == [0] * 4 + [1] + [0] * 25
    assert lines[4] == [
        "rank 2 on h2 is slow: its forward passes: 2.0 times the median of all processes, which "
        "wait for it 20 % of the time"
    ]
    assert slow.add(times(1.0, 1.0, 1.0, 1.0), 5.0) == []
    assert sum(len(slow.add(times(1.0, 1.1, 2.0, 0.9), 5.0)) for _ in range(9)) == 1


def test_of_two_the_slower_one() -> None:
    slow = SlowRanks()
    (line,) = [line for _ in range(5) for line in slow.add(times(3.0, 1.0), 5.0)]
    assert line.startswith("rank 0 on h0 is slow: its forward passes: 3.0 times")


def test_waiting_for_data_is_a_cause() -> None:
    slow = SlowRanks()
    (line,) = [line for _ in range(5) for line in slow.add(times(1.0, 1.0, waited=2.0), 5.0)]
    assert line.startswith("rank 1 on h1 is slow: waiting for data: 3.0 times")


def test_what_costs_no_time_is_not_said() -> None:
    slow = SlowRanks()
    assert not any(slow.add(times(0.01, 0.05), 5.0) for _ in range(20))
    assert not any(slow.add(times(0.0, 0.0), 5.0) for _ in range(20))
    assert not any(slow.add(times(1.0), 5.0) for _ in range(20))
    for _ in range(20):
        assert not any(slow.add(times(1.0, 3.0), 5.0) for _ in range(4))
        slow.add(times(1.0, 1.0), 5.0)
