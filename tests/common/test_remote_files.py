"""Attempts are repeated while another may succeed, with growing waits."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest

from palm_ds.common.errors import TemporaryError, UserError
from palm_ds.common.remote_files import Retries, RetryableError, retried, with_retries


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds waited for, none of which pass."""
    found: list[float] = []
    monkeypatch.setattr(time, "sleep", found.append)
    return found


class Attempts:
    """Fails with these errors in turn, then succeeds."""

    def __init__(self, *errors: Exception):
        self.errors: Iterator[Exception] = iter(errors)
        self.made = 0

    def __call__(self) -> str:
        self.made += 1
        for error in self.errors:
            raise error
        return "done"


def failure(error: RetryableError, times: int) -> Exception:
    return UserError(f"{error}, {times} times")


def test_waits_double_up_to_the_longest(waits: list[float], caplog: Any) -> None:
    attempts = Attempts(*(RetryableError("busy") for _ in range(5)), RetryableError("later", 9.0))
    retries = Retries(tries=7, wait=0.5, longest_wait=4.0)
    with caplog.at_level(logging.WARNING, "palm_ds"):
        assert retried(attempts, "here", retries, failure=failure) == "done"
    assert waits == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0] and attempts.made == 7
    assert caplog.messages[0] == "here: busy; again in 1 s" and len(caplog.messages) == 5


def test_it_gives_up_after_so_many_in_a_row(waits: list[float]) -> None:
    attempts = Attempts(*(RetryableError("busy") for _ in range(9)))
    with pytest.raises(UserError, match="^busy, 3 times$"):
        retried(attempts, "here", Retries(tries=3), failure=failure)
    assert attempts.made == 3 and waits == [1.0, 2.0]


def test_progress_begins_a_new_row(waits: list[float]) -> None:
    """Four attempts that fail, each two of which bring something."""
    attempts = Attempts(*(RetryableError("broke") for _ in range(4)))
    assert (
        retried(
            attempts,
            "here",
            Retries(tries=3),
            failure=failure,
            progress=lambda: attempts.made // 2,
        )
        == "done"
    )
    assert waits == [1.0, 1.0, 2.0, 1.0]


def test_a_host_out_of_reach_is_given_up_sooner_until_something_comes(waits: list[float]) -> None:
    away = [RetryableError("out of reach", tries=2) for _ in range(9)]
    with pytest.raises(UserError, match="out of reach, 2 times"):
        retried(Attempts(*away), "here", Retries(tries=5), failure=failure)
    attempts = Attempts(*away)
    with pytest.raises(UserError, match="out of reach, 5 times"):
        retried(
            attempts, "here", Retries(tries=5), failure=failure, progress=lambda: attempts.made > 0
        )


class _AnswerError(Exception):
    def __init__(self, status: int):
        super().__init__(f"status {status}")
        self.status, self.message = status, "no"


def test_file_systems_fail_for_now_or_for_good(waits: list[float]) -> None:
    quick = Retries(tries=2)
    assert (
        with_retries(
            "s3://b/x",
            Attempts(
                OSError("reset"),
            ),
            quick,
        )
        == "done"
    )
    for error, message in {
        FileNotFoundError(): "s3://b/x: no such file",
        PermissionError("mine"): "s3://b/x: access denied: mine",
        _AnswerError(404): "s3://b/x: the server's answer is 404 no",
    }.items():
        attempts = Attempts(error)
        with pytest.raises(UserError, match=f"^{message}$"):
            with_retries("s3://b/x", attempts, quick)
        assert attempts.made == 1
    with pytest.raises(TemporaryError, match="^s3://b/x: 503 no, 2 times; is the network up"):
        with_retries("s3://b/x", Attempts(_AnswerError(503), _AnswerError(503)), quick)
