"""onnx/ of a Hugging Face folder, which must not fail for lack of a graph.

`to_onnx.add_onnx` writes a graph that was requested, or raises an error. At the end of a run, and
by default in a conversion, the folder gets the graph, or the user the reason why there is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palm_ds.common.errors import UserError
from palm_ds.common.messages import byte_size
from palm_ds.model.pooling import SPLADE
from palm_ds.runtime.device.memory import free_host_memory
from palm_ds.weights.convert.to_onnx import OnnxFile, add_onnx, check_installed
from palm_ds.weights.formats.huggingface.sentence_transformers import modules_of
from palm_ds.weights.formats.onnx.description import FOLDER
from palm_ds.weights.formats.onnx.graph import NO_SPARSE
from palm_ds.weights.formats.open import open_checkpoint

MEMORY = 5
"""Bytes of memory that exporting and comparing take for each byte of weights; 4.0 were measured."""
_FP32 = 4


@dataclass(frozen=True, kw_only=True)
class AddedOnnx:
    """The files of onnx/, or why there are none."""

    files: tuple[OnnxFile, ...] = ()
    why: str = ""

    def record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        files = {file.name: file.record() for file in self.files}
        return {"files": files, "why_none": self.why or None}

    def lines(self, folder: Path) -> list[str]:
        """A line for each file of the Hugging Face folder, or one about why there is none."""
        if self.why:
            return [f"no {folder / FOLDER}: {self.why}"]
        return [f"ONNX: {folder / FOLDER / file.name}, {_summary(file)}" for file in self.files]


def try_onnx(
    folder: Path, precisions: Sequence[str] | None = None, *, verify: bool = True
) -> AddedOnnx:
    """Write onnx/ into a Hugging Face folder; whatever fails leaves the folder as it was.
    `precisions`: None: fp32, unless the model is too large for one file or for the memory."""
    if why := why_no_onnx(folder, precisions):
        return AddedOnnx(why=why)
    try:
        return AddedOnnx(files=add_onnx(folder, precisions or (), verify=verify))
    except UserError as error:
        why = str(error)
    except Exception as error:  # torch's exporter and ONNX Runtime raise errors of many types
        why = f"{type(error).__name__}: {error}"
    return AddedOnnx(why=why.strip().splitlines()[0].removeprefix(f"{folder}: "))


def why_no_onnx(folder: Path, precisions: Sequence[str] | None) -> str:
    """Reason why a graph cannot be tried; empty: it can."""
    try:
        check_installed("onnx/")
        if modules_of(open_checkpoint(folder)).pooling == SPLADE:
            return NO_SPARSE
    except UserError as error:
        return str(error)
    return _too_large(folder) if precisions is None else ""


def _summary(file: OnnxFile) -> str:
    size = byte_size(file.bytes)
    return f"{size}; largest difference {file.parity.worst.largest:.1e}" if file.parity else size


def _too_large(folder: Path) -> str:
    from palm_ds.weights.formats.onnx.write import MOST_BYTES

    entries = open_checkpoint(folder).entries.values()
    size = _FP32 * sum(math.prod(entry.shape) for entry in entries)
    needed, free = MEMORY * size, free_host_memory()
    if size > MOST_BYTES:
        return f"weights of {byte_size(size)} need several files, written only on request"
    if needed > free:
        return f"it may take {byte_size(needed)} of memory, and {byte_size(free)} are free"
    return ""
