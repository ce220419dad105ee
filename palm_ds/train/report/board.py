"""TensorBoard's events, which a full disk ends without ending the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def open_board(folder: Path, start: int, say: Callable[[str], None]) -> Any:
    """A TensorBoard writer that hides the events of repeated steps, or None."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        say("TensorBoard is not installed: metrics.jsonl is the only record of the run")
        return None
    board = SummaryWriter(str(folder), purge_step=start + 1 if start else None, flush_secs=10)
    _tolerate(board, say)
    return board


class _TolerantRecords:
    """Writes records until one cannot be written; TensorBoard's thread would die of it, with a
    traceback, and the training thread with it."""

    def __init__(self, records: Any, say: Callable[[str], None]):
        self._records, self._say, self._broken = records, say, False

    def write(self, data: bytes) -> None:
        self._try(lambda: self._records.write(data))

    def flush(self) -> None:
        self._try(self._records.flush)

    def close(self) -> None:
        self._try(self._records.close)

    def _try(self, action: Callable[[], None]) -> None:
        if self._broken:
            return
        try:
            action()
        except OSError as error:
            self._broken = True
            self._say(f"TensorBoard's events end here: {error.strerror}; metrics.jsonl has them")


def _tolerate(board: Any, say: Callable[[str], None]) -> None:
    """Wrap the records of a writer, as far as this version of TensorBoard has them there."""
    writer: Any = getattr(board.file_writer.event_writer, "_async_writer", None)
    if worker := getattr(writer, "_worker", None):
        records = _TolerantRecords(worker._record_writer, say)
        writer._writer = worker._record_writer = records
