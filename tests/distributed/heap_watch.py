"""`launch/pretrain.py` that notes, each second, how many bytes of its heap are in use.

A process can own more memory while it uses no more: the C library keeps what was freed in pieces.
Only the process itself can tell the two apart (mallinfo2, glibc)."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from pathlib import Path

from palm_ds.cli.pretrain import COMMAND

FOLDER = "PALM_TEST_HEAP_FOLDER"
_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS.split()]


def heap_in_use() -> float:
    """MB of the C library's main heap that are in use."""
    mallinfo2 = ctypes.CDLL("libc.so.6").mallinfo2
    mallinfo2.restype = _Mallinfo2
    return mallinfo2().uordblks / 2**20


def note(path: Path) -> None:
    with path.open("a", buffering=1) as file:
        while True:
            time.sleep(1)
            file.write(f"{heap_in_use():.3f}\n")


if __name__ == "__main__":
    log = Path(os.environ[FOLDER]) / f"heap-{os.environ['RANK']}.txt"
    threading.Thread(target=note, args=[log], daemon=True).start()
    COMMAND.start()
