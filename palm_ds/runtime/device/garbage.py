"""Python's cyclic garbage collector, at chosen steps only.

By itself it runs whenever enough objects were made: on each process at another moment, while all
the others wait, and over every object of torch and of the corpus. A training step leaves hardly
any cycles behind (a test holds it), so collecting every 50 steps, on all processes in the same one,
costs no memory.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator

_EVERY = 50  # steps


def collecting_between(steps: Iterable[int]) -> Iterator[int]:
    """The steps; cycles are collected before some of them and at no other time. What exists at the
    first step is passed over until the last, unless the program has frozen objects itself: only
    all objects can be unfrozen."""
    was_enabled, freezes = gc.isenabled(), not gc.get_freeze_count()
    gc.collect()
    if freezes:
        gc.freeze()
    gc.disable()
    try:
        for step in steps:
            if step % _EVERY == 0:
                gc.collect()
            yield step
    finally:
        if freezes:
            gc.unfreeze()
        if was_enabled:
            gc.enable()
