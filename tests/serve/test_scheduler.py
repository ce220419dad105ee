"""Which texts share a pass, whose turn it is, and what is dropped."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from palm_ds.serve.forward import Scores
from palm_ds.serve.model_set import ModelSet, Served, open_set
from palm_ds.serve.requests import embed_work
from palm_ds.serve.scheduler import BatchReport, Scheduler, Work, compute
from palm_ds.serve.served_model import ModelOptions, ServedModel
from tests.helpers.serving import opened


@pytest.fixture(scope="module")
def models(words_run: Path, tasks_run: Path) -> ModelSet:
    return opened(words=words_run, tasks=tasks_run)[0]


class Watched:
    """A scheduler that begins when it is let go, and what it computed."""

    def __init__(self) -> None:
        self.reports: list[BatchReport] = []
        self.scheduler = Scheduler(1, self.reports.append)

    def run(self, *works: Work) -> None:
        with self.scheduler._changed:
            for work in works:
                self.scheduler.submit(work)
        self.scheduler.close()


def work(model: ServedModel, *texts: str) -> Work:
    return embed_work(model, texts, model.embedder.settings)


def test_requests_share_a_pass_up_to_its_tokens(
    models: ModelSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("palm_ds.serve.scheduler._TURN", 60.0)  # however busy this machine is
    model, watched = models.models["words"], Watched()
    assert model.batch_tokens == 2048
    works = [work(model, *["good " * 60] * 5) for _ in range(12)]  # 60 texts of 62 tokens
    watched.run(*works)
    assert [(each.requests, each.texts) for each in watched.reports] == [(12, 33), (12, 27)]
    for each in works:
        vectors, tokens, cut = each.future.result(1)
        assert (vectors.shape, tokens, cut) == ((5, 16), [62] * 5, 0)
        assert np.abs(vectors - model.embedder.embed(["good " * 60])).max() < 1e-5


def test_a_short_request_does_not_wait_for_all_of_a_long_one(models: ModelSet) -> None:
    model, watched = models.models["words"], Watched()
    long, short = work(model, *["good " * 60] * 40), work(model, "so")
    ended: list[str] = []
    long.future.add_done_callback(lambda _: ended.append("long"))
    short.future.add_done_callback(lambda _: ended.append("short"))
    watched.run(long, short)
    assert ended == ["short", "long"]
    assert watched.reports[0].requests == 2


def test_a_slow_device_has_short_turns(models: ModelSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes shrink to what takes a turn, and grow again when the device is as fast as before."""
    model, watched = models.models["words"], Watched()
    speed = 1_000  # tokens a second
    clock = [0.0]

    def timed(*values: Any) -> list[Scores]:
        clock[0] += sum(len(work.examples[number]) for work, number in values[2]) / speed
        return compute(*values)

    monkeypatch.setattr("palm_ds.serve.scheduler.compute", timed)
    monkeypatch.setattr("palm_ds.serve.scheduler.time", SimpleNamespace(monotonic=lambda: clock[0]))
    scheduler = watched.scheduler
    scheduler.submit(work(model, *["good " * 14] * 150)).result(20)  # 16 tokens a text
    tokens = [each.tokens for each in watched.reports]
    assert tokens[0] == 2048 and max(tokens[1:]) <= 64
    speed = 1_000_000
    watched.reports.clear()
    scheduler.submit(work(model, *["good " * 14] * 200)).result(20)
    assert [each.tokens for each in watched.reports][:5] == [64, 128, 256, 512, 1024]
    scheduler.close()


def test_a_text_is_written_by_itself(models: ModelSet) -> None:
    """One each turn, between the passes of others."""
    model, watched, turns = models.models["words"], Watched(), list[int]()

    def write(replica: Any, number: int) -> str:
        turns.append(len(watched.reports))
        assert replica is model.replicas[0]
        return f"text {number}"

    texts = work(model, "so", "good", "so")
    texts.write, texts.finish = write, list
    short = work(model, "good", "bad")
    watched.run(texts, short)
    assert texts.future.result(1) == ["text 0", "text 1", "text 2"]
    assert short.future.result(1)[0].shape == (2, 16)
    assert [each.texts for each in watched.reports] == [1] * 5 and turns == [0, 2, 4]


def test_models_have_passes_of_their_own(models: ModelSet) -> None:
    watched = Watched()
    words, tasks = models.models["words"], models.models["tasks"]
    watched.run(work(words, "so"), work(tasks, "so"), work(words, "good"))
    assert [(each.model, each.texts) for each in watched.reports] == [("words", 2), ("tasks", 1)]


def test_a_long_request_does_not_keep_other_models_waiting(models: ModelSet) -> None:
    watched = Watched()
    words, tasks = models.models["words"], models.models["tasks"]
    watched.run(work(words, *["good " * 60] * 100), work(tasks, "so"), work(words, "so"))
    first = [(each.model, each.requests) for each in watched.reports][:3]
    assert first == [("words", 2), ("tasks", 1), ("words", 1)]


def test_cancelled_work_is_not_computed(models: ModelSet) -> None:
    model, watched = models.models["words"], Watched()
    gone, kept = work(model, "so"), work(model, "good")
    assert gone.future.cancel()
    watched.run(gone, kept)
    assert [each.texts for each in watched.reports] == [1]
    assert kept.future.result(1)[0].shape == (1, 16)


def test_a_failure_ends_the_requests_of_its_batch_only(
    models: ModelSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    from palm_ds.serve import scheduler as module

    model, compute, calls = models.models["words"], module.compute, []

    def once(*values: object) -> object:
        calls.append(values)
        if len(calls) == 1:
            raise RuntimeError("out of memory")
        return compute(*values)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "compute", once)
    watched = Watched()
    long, later = work(model, *["good " * 60] * 17), work(model, "so")
    with watched.scheduler._changed:
        watched.scheduler.submit(long)
    with pytest.raises(RuntimeError, match="out of memory"):
        long.future.result(5)
    watched.run(later)
    assert later.future.result(1)[0].shape == (1, 16)


def test_many_threads_submit_at_the_same_time(models: ModelSet) -> None:
    model, watched = models.models["words"], Watched()
    found: dict[int, np.ndarray] = {}

    def ask(number: int) -> None:
        done = watched.scheduler.submit(work(model, "good " * (1 + number % 7)))
        found[number] = done.result(20)[0][0]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    watched.scheduler.close()
    alone = model.embedder.embed(["good " * (1 + number) for number in range(7)])
    assert all(np.abs(found[n] - alone[n % 7]).max() < 1e-5 for n in range(60))
    assert sum(each.texts for each in watched.reports) == 60


def test_each_device_has_a_copy(words_run: Path) -> None:
    """Two of the same kind, as on a host with several GPUs."""
    two = ModelOptions(devices=[torch.device("cpu")] * 2)
    model = open_set(Served(models={"words": words_run}, options=two)).models["words"]
    scheduler = Scheduler(2)
    works = [work(model, "so good " * n, "bad") for n in range(1, 9)]
    for each in works:
        scheduler.submit(each)
    scheduler.close()
    for n, each in enumerate(works, 1):
        wanted = model.embedder.embed(["so good " * n, "bad"])
        assert np.abs(each.future.result(1)[0] - wanted).max() < 1e-5
    first, second = model.replicas
    assert first is not second
    pieces = [(works[0], 0)]
    alike = [compute(model, device, pieces)[0]["vectors:mean"] for device in range(2)]
    assert np.array_equal(*alike)
