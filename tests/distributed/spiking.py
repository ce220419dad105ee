"""launch/pretrain.py with a learning rate a thousand times too large in step PALM_TEST_BAD_STEP,
and a SIGKILL to every process before step PALM_TEST_KILLED_STEP."""

import os
import runpy
import signal
import sys
from typing import Any

from palm_ds.engine import Engine

engine_step = Engine.step


def step(engine: Engine, batches: Any, lr: float, number: int, *more: Any) -> Any:
    if number == int(os.environ.get("PALM_TEST_KILLED_STEP", -1)):
        os.kill(os.getpid(), signal.SIGKILL)
    if number == int(os.environ.get("PALM_TEST_BAD_STEP", -1)):
        lr *= 1000
    return engine_step(engine, batches, lr, number, *more)


Engine.step = step  # type: ignore[method-assign]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
