"""The size of a micro-batch that is chosen for a card."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.runtime.deepspeed.ds_config import DSConfig, make_ds_config
from palm_ds.train.plan.memory import plan_memory
from palm_ds.train.plan.work import ModelSize, StepWork
from palm_ds.train.setup.micro_batch import choose_micro_batch, fit_micro_batch

GB = 10**9
BASE = EncoderConfig.from_dict({"preset": "ernie-2.0-base", "vocab_size": 30522})
SIZE = ModelSize(
    config=BASE,
    parameters=110_000_000,
    trained=110_000_000,
    largest=23_440_896,
    largest_layer=7_087_872,
)


def work(rows: int, length: int = 512) -> StepWork:
    tokens = rows * length
    return StepWork(rows=rows, length=length, tokens=tokens, squares=0, labels=tokens / 4)


def config(**more: Any) -> DSConfig:
    return make_ds_config({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, **more})


@pytest.mark.parametrize(
    ("rows", "length", "world", "wanted"),
    [
        (512, 512, 8, (64, 1)),
        (1024, 512, 1, (64, 16)),
        (512, 128, 1, (256, 2)),
        (36 * 8, 512, 8, (36, 1)),
        (67 * 8, 512, 8, (1, 67)),  # a prime
        (512, 8192, 1, (8, 64)),  # never fewer rows than without a GPU
    ],
)
def test_up_to_32768_tokens_on_a_large_card(
    rows: int, length: int, world: int, wanted: tuple[int, int]
) -> None:
    found = fit_micro_batch(config(), SIZE, work(rows, length), world, 80 * GB)
    assert found.micro_batching(rows, world) == wanted


def test_half_of_a_small_card_stays_free() -> None:
    step = work(1024)
    found = fit_micro_batch(config(), SIZE, step, 1, 16 * GB)
    rows, _ = found.micro_batching(1024, 1)
    assert 8 < rows < 64
    assert plan_memory(SIZE, step, found, world=1).total <= 8 * GB
    larger = config(train_micro_batch_size_per_gpu=2 * rows)
    assert plan_memory(SIZE, step, larger, world=1).total > 8 * GB


def test_what_the_file_says_is_kept() -> None:
    given = config(train_micro_batch_size_per_gpu=4)
    assert fit_micro_batch(given, SIZE, work(512), 1, 80 * GB) is given


def test_the_rows_of_a_step_are_the_same_on_every_card() -> None:
    found = fit_micro_batch(config(), SIZE, work(1024), 1, 80 * GB)
    assert found.most_micro_rows > 8
    assert [found.round_up_rows(rows, 2) for rows in range(1, 200)] == [
        config().round_up_rows(rows, 2) for rows in range(1, 200)
    ]


def test_rows_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(UserError, match="divided evenly among 3 processes"):
        fit_micro_batch(config(), SIZE, work(512), 3, 80 * GB)


class _OnCards:
    """Two processes, on cards of different sizes."""

    device = torch.device("cuda", 0)
    world = 2

    def gather(self, value: int) -> list[int]:
        return [value, 16 * GB]


def test_the_smallest_card_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    large = SimpleNamespace(total_memory=80 * GB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: large)
    monkeypatch.setattr("palm_ds.train.setup.micro_batch.size_of", lambda model: SIZE)
    monkeypatch.setattr("palm_ds.train.setup.micro_batch.vocab_tasks", lambda model: ["words"])
    model: Any = SimpleNamespace(backbone=SimpleNamespace(config=BASE))
    cards: Any = _OnCards()
    found = choose_micro_batch(config(), model, cards, rows=1024, length=512)
    assert found == fit_micro_batch(config(), SIZE, work(1024), 2, 16 * GB)
    on_cpu: Any = SimpleNamespace(device=torch.device("cpu"))
    assert choose_micro_batch(config(), model, on_cpu, rows=1024, length=512) == config()
