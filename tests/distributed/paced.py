"""launch/pretrain.py with steps of a third of a second, so that a signal meets a run that runs."""

import runpy
import sys
import time
from typing import Any

from palm_ds.train.loop.loop import Loop

train_step = Loop.train_step


def paced(*arguments: Any, **options: Any) -> int | None:
    time.sleep(0.3)
    return train_step(*arguments, **options)


Loop.train_step = paced
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
