"""Finds where code asks for values of what would be tensors on a GPU: each makes the host wait
until the device has computed it. On a CPU nothing waits, but the operators are the same.

    with Waits() as waits:
        head(rows, targets)
    waits.found     # {"palm_ds.model.heads.crf._padding: bincount", ...}
"""

from __future__ import annotations

import sys
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

WAITS = {
    "aten._local_scalar_dense",  # item, tolist, float, int, bool
    "aten.equal",
    "aten.lift_fresh",  # torch.tensor(value, device=...) copies from memory that is not pinned
    "aten.masked_select",
    "aten.nonzero",  # also indexing with a mask
    "aten._unique2",
    "aten.repeat_interleave",  # without output_size
    "aten.bincount",
}
HOST = {"_flush_denormals"}
"""Functions that compute on the CPU alone."""


class Waits(TorchDispatchMode):
    """Collects the operators of a step that wait, each with the function that calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        if name in WAITS and not (name.endswith("repeat_interleave") and "output_size" in kwargs):
            where = caller()
            if where.rpartition(".")[2] not in HOST:
                self.found.add(f"{where}: {name.removeprefix('aten.')}")
        return func(*args, **(kwargs or {}))

    def synchronize(self, *_: Any) -> None:
        """Stands for `get_accelerator().synchronize`, which does nothing on a CPU."""
        self.found.add(f"{caller()}: synchronize")


def caller() -> str:
    """The innermost function of palm_ds or DeepSpeed on the stack, as module.function."""
    frame = sys._getframe(2)
    while frame:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(("palm_ds.", "deepspeed.")):
            return f"{module}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "?"
