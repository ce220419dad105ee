"""Counters and loss scales of DeepSpeed's own scalers. Steps with a model are in distributed/."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler

from palm_ds.runtime.deepspeed.ds_config import DSConfig, make_ds_config
from palm_ds.runtime.zero.zero_step import (
    read_counters,
    restore_counters,
    set_up_skipping,
)


def fp16(**settings: float) -> DSConfig:
    section = {"enabled": True, **settings}
    return make_ds_config({"zero_optimization": {"stage": 2}, "fp16": section})


def engine(fixed: float = 0.0, first: float = 8.0) -> Any:
    """With a loss scale that is `fixed`, or else begins with `first` and halves at once."""
    settings = dict(
        init_scale=first,
        scale_window=100,
        min_scale=1.0,
        delayed_shift=1,
        consecutive_hysteresis=False,
    )
    scaler = CreateLossScaler(torch.half, fixed, not fixed, settings)
    return SimpleNamespace(
        global_steps=3,
        global_samples=24,
        skipped_steps=1,
        micro_steps=0,
        gradient_accumulation_steps=lambda: 2,
        optimizer=SimpleNamespace(loss_scaler=scaler),
    )


def resumed(before: Any, after: Any) -> float:
    """The loss scale with which `after` continues what `before` has saved."""
    counters = json.loads(json.dumps(read_counters(before, fp16=True)))
    restore_counters(after, counters, fp16=True)
    assert (after.global_steps, after.skipped_steps, after.micro_steps) == (3, 1, 6)
    return after.optimizer.loss_scaler.cur_scale


def test_a_fixed_loss_scale_is_that_of_the_deepspeed_file() -> None:
    assert resumed(engine(fixed=128.0), engine(fixed=128.0)) == 128
    assert resumed(engine(fixed=128.0), engine(fixed=64.0)) == 64
    assert resumed(engine(first=32.0), engine(fixed=64.0)) == 64
    assert resumed(engine(fixed=128.0), engine(first=32.0)) == 32
    assert resumed(engine(first=16.0), engine(first=32.0)) == 16
    assert not fp16(loss_scale=128.0).lowers_scale(128.0)


def test_the_least_loss_scale_does_not_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 1)  # rank 0 logs
    zero = engine(first=8.0).optimizer
    set_up_skipping(zero, fp16())
    seen = []
    for _ in range(5):
        seen.append((zero.loss_scaler.cur_scale, fp16().lowers_scale(zero.loss_scaler.cur_scale)))
        zero.loss_scaler.update_scale(True)
    assert seen == [(8, True), (4, True), (2, True), (1, False), (1, False)]
    assert not fp16(min_loss_scale=4).lowers_scale(4) and not make_ds_config({}).lowers_scale(8)
