"""Where a training step makes the host wait for the device, from the arrival of its batches to its
end."""

from __future__ import annotations

import gc
import io
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any
from unittest import mock

from deepspeed.accelerator import get_accelerator

from palm_ds.engine import Engine
from palm_ds.runtime.step.gradient_accumulation import MicroSteps
from tests.distributed.tiny import LR, OPTIMIZER, make_engine, share
from tests.helpers.waits import Waits


def cycles_of(engine: Engine) -> int:
    """Objects that some steps leave to the cyclic garbage collector."""
    gc.collect()
    gc.disable()
    for step in range(3, 5):
        engine.step(share(step, engine.rank, engine.world, 8), LR, step)
    gc.enable()
    return gc.collect()


def waits_of(
    stage: int, precision: str, *, fgm: bool, printed: io.StringIO
) -> tuple[list[str], int]:
    optimizer = replace(OPTIMIZER, fgm=1.0 if fgm else 0.0)
    engine = make_engine(stage, precision, 8, dropout=0.1, scale_power=4, optimizer=optimizer)
    train, waits = MicroSteps.run, Waits()

    def watched(*args: Any, **kwargs: Any) -> Any:
        noted = mock.patch.object(get_accelerator(), "synchronize", waits.synchronize)
        with waits, noted, redirect_stdout(printed):
            return train(*args, **kwargs)

    for step in range(3):  # the first ones allocate
        with mock.patch.object(MicroSteps, "run", watched if step == 2 else train):
            engine.step(share(step, engine.rank, engine.world, 8), LR, step)
    return sorted(waits.found), cycles_of(engine)


def all_waits(runs: list[str]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    printed = io.StringIO()
    for run in runs:
        stage, precision, *fgm = run.split(":")
        results[run] = waits_of(int(stage), precision, fgm=bool(fgm), printed=printed)
    return results | {"printed": printed.getvalue()}
