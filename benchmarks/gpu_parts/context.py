"""What every section gets: the device, the sizes, the time that is left, and where results go."""

from __future__ import annotations

import gc
import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from palm_ds.runtime.device.memory import peak_flops

Row = dict[str, Any]
MOST_LINES = 20


@dataclass
class Context:
    """The surroundings of one section."""

    results: Path
    """A file of JSON lines; each row is written as soon as it is known."""
    seconds: float
    toy: bool = False
    began: float = field(default_factory=time.monotonic)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.toy or not torch.cuda.is_available() else "cuda")

    @property
    def precision(self) -> str:
        """bf16, or fp16 on cards without it; fp32 on a CPU."""
        if self.device.type == "cpu":
            return "fp32"
        return "bf16" if torch.cuda.get_device_capability(self.device) >= (8, 0) else "fp16"

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.began)

    def peak(self, precision: str) -> float | None:
        found = peak_flops(self.device, precision)
        return None if math.isnan(found) else found

    def add(self, **row: Any) -> None:
        with self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def measure(self, call: Callable[[], Row], *, needs: float = 0.0, **names: Any) -> Row:
        """One measurement: what `call` returns becomes a row with these names, and so does an
        error. A measurement that `needs` more seconds than are left is named and left out."""
        if self.left < needs:
            found: Row = {"left_out": f"{max(self.left, 0):.0f} s left, needs {needs:.0f}"}
            self.add(**names, **found)
            return found
        began, lines = time.monotonic(), _Lines()
        logging.getLogger("palm_ds").addHandler(lines)
        try:
            found = call()
        except Exception as error:  # the next measurement may still work
            found = {"error": one_line(error)}
        finally:
            logging.getLogger("palm_ds").removeHandler(lines)
        found |= {"log": lines.found[:MOST_LINES]} if lines.found else {}
        free(self.device)
        self.add(**names, **found, seconds=round(time.monotonic() - began, 1))
        return found


class _Lines(logging.Handler):
    """Keeps what palm_ds logs: which kernels were chosen and why, what was compiled again."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage()[:300])


def one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text[:300]}"


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """How long a call takes, its work on the device included."""
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - began
