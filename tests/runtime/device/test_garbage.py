from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest

from palm_ds.runtime.device.garbage import collecting_between


class Cycle:
    def __init__(self) -> None:
        self.own = self


def test_cycles_are_collected_every_50_steps_only() -> None:
    assert gc.isenabled()
    alive = []
    for step in collecting_between(range(30, 120)):
        assert not gc.isenabled()
        if step in (30, 60):
            cycle = weakref.ref(Cycle())
        alive.append(cycle() is not None)
    assert gc.isenabled()
    assert alive == [True] * 20 + [False] * 10 + [True] * 40 + [False] * 20


FREEZING = """
import gc
from palm_ds.runtime.device.garbage import collecting_between
gc.unfreeze()
for _ in collecting_between(range(2)):
    assert gc.get_freeze_count() > 1000
assert gc.get_freeze_count() == 0
gc.freeze()
before = gc.get_freeze_count()
for _ in collecting_between(range(2)):
    assert gc.get_freeze_count() <= before
assert gc.get_freeze_count() > 1000
"""


def test_what_exists_is_frozen_until_the_last_step_but_not_what_the_program_froze() -> None:
    subprocess.run([sys.executable, "-c", FREEZING], check=True, timeout=60)


def test_it_is_on_again_whatever_ends_the_loop() -> None:
    for step in collecting_between(range(9)):
        if step == 2:
            break
    assert gc.isenabled()
    with pytest.raises(KeyError):
        for _ in collecting_between(range(9)):
            raise KeyError
    assert gc.isenabled()
    gc.disable()
    list(collecting_between(range(2)))
    try:
        assert not gc.isenabled()  # as before
    finally:
        gc.enable()
