import atexit
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from palm_ds.common.errors import TemporaryError, UserError
from palm_ds.train.loop.prefetch import prefetched


class Stream:
    """Rows of which some cannot be built."""

    longest = 8

    def __init__(self, error: Exception):
        self.error = error

    def length_at(self, step: int) -> int:
        return 8

    def rows_at(self, step: int) -> int:
        return 1

    def batches(self, step: int, *_: int) -> list[int]:
        if step:
            raise self.error
        return [step]


@pytest.fixture(autouse=True)
def no_handler_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would stay."""
    handling = torch.utils.data._utils.signal_handling
    monkeypatch.setattr(handling, "_set_SIGCHLD_handler", lambda: None)


def built(error: Exception, workers: int) -> Iterator[Any]:
    ds_config = SimpleNamespace(micro_batching=lambda rows, world, shorter: (1, 1))
    engine: Any = SimpleNamespace(rank=0, world=1, device=torch.device("cpu"), ds_config=ds_config)
    stream: Any = Stream(error)
    return prefetched(stream, engine, range(2), workers)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("error", [UserError("tasks.mine: odd"), TemporaryError("no network", 42)])
def test_what_a_worker_cannot_build_is_the_line_of_its_error(
    error: Exception, workers: int
) -> None:
    """torch would put the traceback of the worker into the message."""
    batches_of = built(error, workers)
    assert next(batches_of) == [0]
    with pytest.raises(type(error)) as caught:
        next(batches_of)
    del batches_of  # ends its worker
    assert str(caught.value) == str(error) and vars(caught.value) == vars(error)


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux")
def test_workers_share_the_memory_of_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on Python 3.14, which would pickle the stream for each of them."""
    context = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", context)  # type: ignore[attr-defined]
    batches_of = built(UserError(), 1)  # has a lambda, which cannot be pickled
    assert next(batches_of) == [0]
    del batches_of


def test_workers_end_with_a_program_that_still_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash keeps them in its traceback: the program hung after it."""
    ends: list[Any] = []
    monkeypatch.setattr(atexit, "register", lambda end, *of: ends.append(partial(end, *of)))
    batches_of = built(UserError(), 1)
    assert next(batches_of) == [0]
    (worker,) = multiprocessing.active_children()
    assert worker.pid
    os.kill(worker.pid, signal.SIGTERM)  # a launcher's: the training process still needs it
    worker.join(0.2)
    assert worker.is_alive()
    for end in ends:
        end()
    worker.join(30)
    assert not worker.is_alive()
    del batches_of
