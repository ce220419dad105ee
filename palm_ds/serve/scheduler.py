"""Shares forward passes among requests: dynamic batching.

    request ──Work: its examples──> queue of its model ──> a batch when a device is free ──> scores
                                    request by request,       at most N tokens
                                    one text at a time

There is no waiting for a batch to fill: while a device computes, requests gather; when it is free,
it takes one text of each waiting request in turn, until the batch is full. A batch holds what the
device computes in about `_TURN`; a text that a model writes is a batch of its own. Models that have
requests take turns. So a short request waits for two short turns, and at most two of each other
busy model, never for all texts of a long one, and without load it is answered immediately. One
thread for each device runs the model; another turns scores into answers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from palm_ds.data.tasks.example import Example
from palm_ds.model.multi_task_model import Model
from palm_ds.serve.forward import EVERY_TOKEN, Asked, scores_of
from palm_ds.serve.served_model import ServedModel

log = logging.getLogger(__name__)
_TURN = 0.05
"""Seconds of a forward pass, at about which batches are as large as they may be."""
_SMALLEST = 64
"""Tokens of a batch, however slow the model is; a longer text is a batch of its own."""


@dataclass(eq=False, kw_only=True)
class Work:
    """Work that a request asks of one model."""

    model: ServedModel
    examples: Sequence[Example]
    """With labels where the heads' scores are wanted."""
    task_id: int
    layers: tuple[int, ...] = ()
    """Layers below the last whose states are wanted, too."""
    pooling: str = EVERY_TOKEN
    """How these are pooled."""
    write: Callable[[Model, int], Any] | None = None
    """Instead of scores of a forward pass: what a model writes for an example, by its number."""
    finish: Callable[[Sequence[Any]], Any]
    """From the scores of each example, or what was written, to the answer."""
    future: Future[Any] = field(default_factory=Future)
    scores: list[Any] = field(default_factory=list)
    taken: int = 0
    left: int = 0


Piece = tuple[Work, int]
"""A piece of work: one of its examples."""


@dataclass(frozen=True, kw_only=True)
class BatchReport:
    """Report on a forward pass."""

    model: str
    texts: int
    tokens: int
    requests: int
    seconds: float


class Scheduler:
    """The queues of all models and the threads that empty them."""

    def __init__(
        self, devices: int = 1, observe: Callable[[BatchReport], None] = lambda report: None
    ) -> None:
        self._observe = observe
        self._changed = threading.Condition()
        self._queues: dict[int, deque[Work]] = {}
        """By the identity of the model: a reloaded one has a queue of its own. The first
        has the next turn."""
        self._room: dict[str, int] = {}
        """Tokens of the next batch of a model, by its name: a reloaded one is about as fast."""
        self._open = True
        self._finisher = ThreadPoolExecutor(1, thread_name_prefix="finish")
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"device-{number}", daemon=True)
            for number in range(devices)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Work) -> Future[Any]:
        """Queue some work; its future gets the answer. Cancelling the future removes it."""
        work.scores = [{}] * len(work.examples)
        work.left = len(work.examples)
        if not work.examples:
            self._finisher.submit(_finish, work)
            return work.future
        with self._changed:
            assert self._open, "closed"
            self._queues.setdefault(id(work.model), deque()).append(work)
            self._changed.notify()
        return work.future

    def close(self) -> None:
        """Finish what is queued and end the threads."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._finisher.shutdown()

    # ---- the threads ----

    def _run(self, device: int) -> None:
        while pieces := self._next():
            model = pieces[0][0].model
            started = time.monotonic()
            try:
                results = compute(model, device, pieces)
            except (
                Exception
            ) as error:  # whatever a device raises ends these requests, not the server
                log.exception("a forward pass of %s failed", model.name)
                with self._changed:
                    for work in dict.fromkeys(work for work, _ in pieces):
                        _fail(work, error)
                continue
            report = _report(pieces, time.monotonic() - started)
            self._observe(report)
            if not pieces[0][0].write:
                self._resize(model, report)
            for work in self._note(pieces, results):
                self._finisher.submit(_finish, work)

    def _resize(self, model: ServedModel, report: BatchReport) -> None:
        """Choose the tokens of the model's next batch: fewer after a pass that took too long,
        twice as many after a full one that took less than half a turn."""
        with self._changed:
            room = self._room.get(model.name, model.batch_tokens)
            if report.seconds > _TURN and report.tokens > _SMALLEST:
                room = max(int(report.tokens * _TURN / report.seconds), _SMALLEST)
            elif report.seconds < _TURN / 2 and report.tokens > room // 2:
                room = 2 * room
            self._room[model.name] = min(room, model.batch_tokens)

    def _note(self, pieces: Sequence[Piece], results: Sequence[Any]) -> list[Work]:
        """Note the scores of pieces; returns the works that are complete now."""
        done: list[Work] = []
        with self._changed:
            for (work, number), scores in zip(pieces, results, strict=True):
                work.scores[number] = scores
                work.left -= 1
                if not work.left:
                    done.append(work)
        return done

    def _next(self) -> list[Piece]:
        """The pieces of the next batch, waiting for some; none: the scheduler is closed."""
        with self._changed:
            while True:
                self._drop_cancelled()
                if self._queues:
                    key = next(iter(self._queues))
                    queue = self._queues.pop(key)
                    pieces = self._taken(queue)
                    if queue:
                        self._queues[key] = queue  # behind those of other models
                    if self._queues:
                        self._changed.notify()
                    return pieces
                if not self._open:
                    return []
                self._changed.wait()

    def _taken(self, queue: deque[Work]) -> list[Piece]:
        """One example of each request in turn, up to the tokens of a batch, or one text to be
        written; removes finished ones."""
        pieces: list[Piece] = []
        model = queue[0].model
        room = self._room.get(model.name, model.batch_tokens)
        while queue:
            work = queue[0]
            length = len(work.examples[work.taken])
            if pieces and (length > room or work.write or pieces[0][0].write):
                break
            pieces.append((work, work.taken))
            room -= length
            work.taken += 1
            if work.taken == len(work.examples):
                queue.popleft()
            else:
                queue.rotate(-1)
        return pieces

    def _drop_cancelled(self) -> None:
        for key, queue in list(self._queues.items()):
            if any(work.future.done() for work in queue):
                queue = self._queues[key] = deque(
                    request for request in queue if not request.future.done()
                )
            if not queue:
                del self._queues[key]


def compute(model: ServedModel, device: int, pieces: Sequence[Piece]) -> list[Any]:
    """The scores of each piece, or what is written for it."""
    replica = model.replicas[device]
    if pieces[0][0].write:
        return [work.write(replica, number) for work, number in pieces if work.write]
    return scores_of(
        replica,
        [
            Asked(work.examples[number], work.task_id, work.layers, work.pooling)
            for work, number in pieces
        ],
        pad=model.tokenizer.vocabulary.pad,
        device=model.devices[device],
    )


def _finish(work: Work) -> None:
    """Set the answer, unless nobody waits for it any more or another batch of it failed."""
    if work.future.done() or not work.future.set_running_or_notify_cancel():
        return
    try:
        work.future.set_result(work.finish(work.scores))
    except Exception as error:  # for the request that waits
        work.future.set_exception(error)


def _fail(work: Work, error: Exception) -> None:
    if not work.future.done() and work.future.set_running_or_notify_cancel():
        work.future.set_exception(error)


def _report(pieces: Sequence[Piece], seconds: float) -> BatchReport:
    works = {id(work) for work, _ in pieces}
    return BatchReport(
        model=pieces[0][0].model.name,
        texts=len(pieces),
        tokens=sum(len(work.examples[number]) for work, number in pieces),
        requests=len(works),
        seconds=seconds,
    )
