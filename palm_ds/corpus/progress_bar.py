"""Shows the progress of a preparation: a bar on a terminal, a log line now and then elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from palm_ds.corpus.executors import ProgressCallback

log = logging.getLogger(__name__)

_LINE_EVERY_SECONDS = 10.0
_MB = 1e6


@contextmanager
def show_progress(
    console: Console, total_bytes: int, done_bytes: int = 0
) -> Iterator[ProgressCallback]:
    """Yields a callback that shows progress and speed. The bar counts input bytes, of which
    `done_bytes` were processed by an earlier run; the speed counts bytes of text."""
    if console.is_terminal:
        with _bar(console, total_bytes, done_bytes) as watch:
            yield watch
    else:
        yield _lines(log.info, total_bytes, done_bytes)


@contextmanager
def _bar(console: Console, total: int, done: int) -> Iterator[ProgressCallback]:
    columns = (
        TextColumn("preparing"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    )
    began = time.monotonic()
    with Progress(*columns, console=console) as bars:
        task = bars.add_task("", total=total, completed=done, speed="")

        def watch(text_bytes: int, input_bytes: int) -> None:
            nonlocal began
            if not text_bytes:  # still training the tokenizer or mining phrases
                began = time.monotonic()
            speed = text_bytes / _MB / max(time.monotonic() - began, 1e-3)
            shown = f"{speed:.1f} MB/s" if text_bytes else ""
            bars.update(task, completed=done + input_bytes, speed=shown)

        yield watch


def _lines(show: Callable[[str], None], total: int, done: int) -> ProgressCallback:
    began = shown = time.monotonic()

    def watch(text_bytes: int, input_bytes: int) -> None:
        nonlocal began, shown
        now = time.monotonic()
        if not text_bytes:
            began = shown = now
        if now - shown >= _LINE_EVERY_SECONDS:
            shown = now
            part = 100 * (done + input_bytes) / max(total, 1)
            speed = text_bytes / _MB / (now - began)
            show(f"{part:.0f} % of {total / _MB:.1f} MB, {speed:.1f} MB/s")

    return watch
