"""A run whose checkpoints and weights do not fit on the disk is refused at its start."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from palm_ds.common.errors import UserError
from palm_ds.model.config.config import EncoderConfig
from palm_ds.runtime.deepspeed.ds_config import DSConfig
from palm_ds.train.plan.work import ModelSize
from palm_ds.train.recipe.recipe import Recipe
from palm_ds.train.setup.run_folder import RunSpec
from palm_ds.train.setup.space_check import check_space


def run_of(
    folder: Path,
    *,
    keep: int = 2,
    every: int = 1000,
    steps: int = 9_999,
    ema: float = 0.0,
    best: str = "",
    onnx: tuple[str, ...] = (),
    heads: tuple[str, ...] = (),
) -> RunSpec:
    recipe = SimpleNamespace(
        export_onnx=onnx,
        export_heads=bool(heads),
        built_tasks=dict.fromkeys(heads),
        save=SimpleNamespace(keep=keep, every=every, keep_every=10_000),
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
    with pytest.raises(UserError, match=r"0.044 GB free, but this run writes 0.044 GB: 3 checkp"):
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


def test_frozen_weights_have_no_moments(tmp_path: Path, free: dict[str, float]) -> None:
    free["bytes"] = 3 * (4e6 + 2 * 4e4) + 2 * 4e6
    check_space(run_of(tmp_path), size_of(1_000_000, trained=10_000))
    free["bytes"] -= 1
    with pytest.raises(UserError, match="3 checkpoints of 0.00408 GB"):
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
