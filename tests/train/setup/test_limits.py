from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.runtime.deepspeed.ds_config import DSConfig, make_ds_config
from palm_ds.runtime.device.memory import host_memory
from palm_ds.runtime.processes.process_group import SINGLE_PROCESS
from palm_ds.train.plan.memory import plan_memory
from palm_ds.train.plan.work import ModelSize, StepWork
from palm_ds.train.recipe.recipe import Recipe, make_recipe
from palm_ds.train.recipe.sections import SaveSettings
from palm_ds.train.setup import limits
from palm_ds.train.setup.limits import (
    check_memory,
    check_space,
    check_space_together,
    choose_micro_batch,
    fit_micro_batch,
)
from palm_ds.train.setup.run_folder import RunSpec

RECIPE = {
    "backbone": {"preset": "tiny", "max_positions": 64},
    "length": 64,
    "batch": "8 rows",
    "sources": {"text": {"corpus": "somewhere"}},
    "tasks": {"knowledge_masking": {"source": "text"}},
    "stages": [{"knowledge_masking": 3}],
}


def check(world: int = 1, **changes: Any) -> None:
    backbone = {**RECIPE["backbone"], **changes.pop("backbone", {})}  # type: ignore[dict-item]
    recipe = make_recipe({**RECIPE, "backbone": backbone, **changes})
    check_memory(recipe, 30_000, world=world, memory=16 * 10**9)


@pytest.mark.parametrize(
    ("backbone", "shown"),
    [
        ({"hidden_size": 100_000, "num_heads": 1}, "hidden_size 100,000, num_layers 2"),
        ({"num_layers": 10**6}, "num_layers 1,000,000"),
        ({"vocab_size": 10**12}, "vocab_size 1,000,000,000,000"),
        ({"max_positions": 10**9}, "max_positions 1,000,000,000"),
    ],
)
def test_a_model_beyond_memory(backbone: dict[str, Any], shown: str) -> None:
    with pytest.raises(UserError) as error:
        check(backbone=backbone)
    message = str(error.value)
    assert message.startswith("backbone: ") and shown in message
    assert re.search(r"[GT]B in fp32, and 16 GB can be used here$", message)


def test_a_step_beyond_memory() -> None:
    with pytest.raises(UserError, match="batch: 640,000,000 tokens of a step for each of 1 proc"):
        check(batch="10_000_000 rows")
    check(batch="10_000_000 rows", world=4)


def test_a_usual_run_passes() -> None:
    check()
    assert 1e8 < host_memory() < 1e15


def run_of(
    folder: Path,
    *,
    keep: int = 2,
    every: int = 1000,
    steps: int = 9_999,
    ema: float = 0.0,
    best: str = "",
    best_kept: int = 0,
    onnx: tuple[str, ...] = (),
    heads: tuple[str, ...] = (),
) -> RunSpec:
    recipe = SimpleNamespace(
        export_onnx=onnx,
        export_heads=bool(heads),
        built_tasks=dict.fromkeys(heads),
        lora=None,
        save=SaveSettings(keep=keep, every=every, best=best_kept),
        curriculum=SimpleNamespace(steps=steps),
        optimizer=SimpleNamespace(ema=ema),
        evaluate=SimpleNamespace(best=best),
    )
    return RunSpec(recipe=cast(Recipe, recipe), ds_config=cast(DSConfig, None), folder=folder)


def size_of(parameters: int, trained: int | None = None) -> ModelSize:
    trained = parameters if trained is None else trained
    return ModelSize(
        config=EncoderConfig(), parameters=parameters, trained=trained, largest=1, largest_layer=1
    )


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    space = {"bytes": 0.0}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=space["bytes"]))
    return space


def test_checkpoints_and_both_copies_of_the_weights(tmp_path: Path, free: dict[str, float]) -> None:
    run, million = run_of(tmp_path / "new" / "run"), size_of(1_000_000)
    free["bytes"] = 3 * 12e6 + 2 * 4e6
    check_space(run, million)
    free["bytes"] -= 1
    with pytest.raises(UserError, match=r"44 MB free, but this run writes 44 MB: 3 checkp"):
        check_space(run, million)
    free["bytes"] = 3 * 16e6 + 3 * 4e6 - 1
    with pytest.raises(UserError, match="3 copies of the weights"):
        check_space(run_of(tmp_path, ema=0.9, best="mean"), million)
    with pytest.raises(UserError, match="4 copies of the weights"):
        check_space(run_of(tmp_path, ema=0.9, best="mean", onnx=("fp32",)), million)
    with pytest.raises(UserError, match="5 copies of the weights"):
        check_space(run_of(tmp_path, ema=0.9, best="mean", heads=("mood", "size")), million)


def test_checkpoints_that_stay_for_good_need_space(tmp_path: Path, free: dict[str, float]) -> None:
    free["bytes"] = 5 * 12e6 + 2 * 4e6
    check_space(run_of(tmp_path, steps=20_000), size_of(1_000_000))
    with pytest.raises(UserError, match="6 checkpoints .* or set save.keep_every to 0"):
        check_space(run_of(tmp_path, steps=30_000), size_of(1_000_000))
    with pytest.raises(UserError, match="6 checkpoints"):  # 3 of them close to the newest
        check_space(run_of(tmp_path, keep=3, every=5), size_of(1_000_000))
    with pytest.raises(UserError, match="6 checkpoints"):
        check_space(run_of(tmp_path, best_kept=3), size_of(1_000_000))


def test_frozen_weights_have_no_moments(tmp_path: Path, free: dict[str, float]) -> None:
    free["bytes"] = 3 * (4e6 + 2 * 4e4) + 2 * 4e6
    check_space(run_of(tmp_path), size_of(1_000_000, trained=10_000))
    free["bytes"] -= 1
    with pytest.raises(UserError, match="3 checkpoints of 4.08 MB"):
        check_space(run_of(tmp_path), size_of(1_000_000, trained=10_000))


def test_a_resumed_run_needs_what_it_will_add(tmp_path: Path, free: dict[str, float]) -> None:
    """A new checkpoint is as large as the last one."""
    for step in (1, 2):
        (tmp_path / "checkpoints" / f"step_0000000{step}").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_00000002" / "x").write_bytes(bytes(500))
    (tmp_path / "weights").mkdir()
    free["bytes"] = 500 + 400
    check_space(run_of(tmp_path), size_of(100))
    free["bytes"] -= 1
    with pytest.raises(UserError, match="1 checkpoint of"):
        check_space(run_of(tmp_path), size_of(100))


def test_a_run_that_has_begun_continues_on_a_full_disk(
    tmp_path: Path,
    free: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A restart was refused as a mistake where the run itself would have waited for space."""
    monkeypatch.setattr(limits, "size_of", lambda model: size_of(1_000_000))

    def check(*, dry_run: bool) -> None:
        nothing: Any = None
        group: Any = SINGLE_PROCESS
        check_space_together(run_of(tmp_path), nothing, group, dry_run=dry_run)

    with pytest.raises(UserError, match="the disk has 0 B free"):
        check(dry_run=False)
    (tmp_path / "checkpoints" / "step_00000001").mkdir(parents=True)
    with pytest.raises(UserError, match="the disk has 0 B free"):
        check(dry_run=True)
    check(dry_run=False)
    assert caplog.messages[0].endswith("; training continues, and saves wait for space")


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
    monkeypatch.setattr("palm_ds.train.setup.limits.size_of", lambda model: SIZE)
    monkeypatch.setattr("palm_ds.train.setup.limits.vocab_tasks", lambda model: ["words"])
    model: Any = SimpleNamespace(backbone=SimpleNamespace(config=BASE))
    cards: Any = _OnCards()
    found = choose_micro_batch(config(), model, cards, rows=1024, length=512)
    assert found == fit_micro_batch(config(), SIZE, work(1024), 2, 16 * GB)
    on_cpu: Any = SimpleNamespace(device=torch.device("cpu"))
    assert choose_micro_batch(config(), model, on_cpu, rows=1024, length=512) == config()
