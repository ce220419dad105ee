"""launch/pretrain.py on a small disk, which is full from step 12 on; after three waits somebody
frees it."""

import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any

from palm_ds.engine import Engine
from palm_ds.runtime.checkpoint import full_disk
from tests.helpers.small_disk import empty, fill

disk = Path(sys.argv[sys.argv.index("--run_dir") + 1]).parent
engine_step, sleep, waits = Engine.step, full_disk.time.sleep, []


def step(engine: Engine, batches: Any, lr: float, number: int, *more: Any) -> Any:
    if number == 12:
        fill(disk)
    return engine_step(engine, batches, lr, number, *more)


def wait(seconds: float) -> None:
    waits.append(seconds)
    if len(waits) == 3:
        empty(disk)
    sleep(seconds)


Engine.step = step  # type: ignore[method-assign]
full_disk.time.sleep = wait
full_disk.retried = partial(full_disk.retried, pause=0.05)  # type: ignore[assignment]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
