"""launch/pretrain.py with a learning rate PALM_TEST_BAD_FACTOR (1000) times as large in step
PALM_TEST_BAD_STEP, a SIGKILL to every process before step PALM_TEST_KILLED_STEP, a SIGTERM in step
PALM_TEST_STOPPED_STEP, slow forward passes of rank PALM_TEST_SLOW_RANK, and a line in the file
PALM_TEST_ROWS for each row of each step: the step and a hash of the row."""

import hashlib
import os
import runpy
import signal
import sys
import time
from typing import Any

from palm_ds.engine import Engine
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.multi_task_model import Model

engine_step = Engine.step


def step(engine: Engine, batches: Any, lr: float, number: int, *more: Any) -> Any:
    if number == int(os.environ.get("PALM_TEST_KILLED_STEP", -1)):
        os.kill(os.getpid(), signal.SIGKILL)
    if number == int(os.environ.get("PALM_TEST_STOPPED_STEP", -1)):
        os.kill(os.getpid(), signal.SIGTERM)
    if "PALM_TEST_ROWS" in os.environ:
        write_rows(batches, number)
    if number == int(os.environ.get("PALM_TEST_BAD_STEP", -1)):
        lr *= float(os.environ.get("PALM_TEST_BAD_FACTOR", 1000))
    return engine_step(engine, batches, lr, number, *more)


def write_rows(batches: list[Batch], number: int) -> None:
    """One short write a row, so that processes share the file."""
    with open(os.environ["PALM_TEST_ROWS"], "ab", buffering=0) as file:
        for batch in batches:
            for row in batch.input_ids.numpy():
                file.write(f"{number} {hashlib.sha256(row.tobytes()).hexdigest()}\n".encode())


def slow_forward(model: Model, *batch: Any) -> Any:
    time.sleep(0.1)
    return forward(model, *batch)


forward = Model.forward
if os.environ.get("PALM_TEST_SLOW_RANK") == os.environ.get("RANK"):
    Model.forward = slow_forward  # type: ignore[method-assign]
Engine.step = step  # type: ignore[method-assign]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
