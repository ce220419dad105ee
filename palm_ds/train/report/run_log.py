"""Reports a run's progress: to metrics.jsonl (metrics_file.py), TensorBoard and the screen."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from palm_ds.common.messages import leave_closed_terminal, nan_to_null
from palm_ds.data.stream.stages import Curriculum
from palm_ds.train.report import metrics_file
from palm_ds.train.report.forgetting import stage_ends, tables
from palm_ds.train.report.score_tables import metrics_text, number, score_tables, share
from palm_ds.train.report.trackers import RunTrackers, TrackSettings


class RunLog:
    """Rank 0's log of a run. Records are plain numbers; nothing here touches a device.

    `start` is the number of steps completed before (0: a new run). On a terminal, a live display is
    shown below the other output; elsewhere each record is one line.
    """

    def __init__(
        self,
        folder: str | Path,
        tasks: Sequence[str],
        *,
        total_steps: int,
        start: int = 0,
        console: Console | None = None,
        track: TrackSettings | None = None,
        config: Mapping[str, Any] | None = None,
    ):
        """`track`: the experiment trackers to report to, and `config`, the resolved recipe, for
        them."""
        self._tasks, self._total, self._first = tuple(tasks), total_steps, start
        self._step = start
        self._console = console or _console()
        path = Path(folder) / metrics_file.FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        self._before = metrics_file.truncate_after(path, start)
        self._file = metrics_file.AppendFile(path, self._show)
        self._began = time.monotonic()
        self._board = metrics_file.open_board(Path(folder) / "tensorboard", start, self._show)
        self._trackers = RunTrackers(
            track or TrackSettings(), Path(folder), config or {}, self._show
        )
        self.listener: Callable[[str, Mapping[str, Any]], None] | None = None
        """Called with (kind, record) of each line of metrics.jsonl."""
        self._finished = False
        self._held_out: Mapping[str, Mapping[str, Any]] = {}
        self._last: Mapping[str, Any] = {}
        """The record of the last step."""
        self._live: Live | None = None
        if self._console.is_terminal:
            # No refresh thread: the display is drawn when there is a new record.
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            with self._showing():
                self._live.start()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def elapsed(self) -> float:
        """Running time in seconds, including restarts."""
        return self._before + time.monotonic() - self._began

    def step(self, record: Mapping[str, Any]) -> None:
        """Log the record of one step (keys as in metrics_file.py)."""
        self._step = record["step"]
        self._write("step", record)
        self._send(_named(record), record["step"])
        self._last = record
        if self._live:
            self._update_display()
        else:
            self._show(self._line(record, self._seconds_left()))

    def evaluation(
        self,
        step: int,
        scores: Mapping[str, Mapping[str, Any]],
        *,
        stage: int,
        started: Collection[str],
    ) -> None:
        """Log the held-out scores of every task, as recorded by `TaskScore.record`; those of the
        tasks that have `started` are shown."""
        values = {"step": step, "stage": stage, "started": list(started), "scores": scores}
        if step and step == self._first:  # made again, as no checkpoint has it
            metrics_file.truncate_after(self._file.path, step, evaluated=False)
        self._write("evaluation", values)
        self._held_out = {
            title: score
            for title, score in scores.items()
            if metrics_file.task_of(title) in started
        }
        numbers = {
            f"{name}/{task}/held_out": value
            for task, score in scores.items()
            for name, value in [*score.items(), *score.get("metrics", {}).items()]
        }
        self._send(numbers, step, evaluation=True)
        title, width = f"held out, step {step:,}", self._console.width
        self._print(*score_tables(self._held_out, title, width))
        self._update_display()

    def forgetting(self, curriculum: Curriculum) -> None:
        """Show the scores of every task after every stage, if more than one stage has ended."""
        ends = stage_ends(metrics_file.read_metrics(self._file.path, steps=False), curriculum)
        self._print(*tables(ends, self._tasks, self._console.width))

    def event(self, kind: str, message: str = "", **fields: object) -> None:
        """Log an event: `message` is shown, all fields are written to metrics.jsonl."""
        shown = {"message": message} if message else {}
        self._finished = self._finished or kind == "end"
        self._write("event", {"event": kind, "step": self._step, **shown, **fields})
        if message:
            self._show(message)

    def close(self) -> None:
        """Close the files; the last state of the display stays on the screen. May be called
        twice."""
        if self._live:
            with self._showing():
                self._live.stop()
            self._live = None
        if self._board:
            self._board.close()
            self._board = None
        self._trackers.close(finished=self._finished)
        self._file.close()

    def _show(self, line: str | Text) -> None:
        with self._showing():
            self._console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _print(self, *tables: RenderableType) -> None:
        with self._showing():
            for table in tables:
                self._console.print(table)

    @contextmanager
    def _showing(self) -> Iterator[None]:
        """Leave out what the output does not take: it may be a file on a full disk, or a terminal
        that was closed."""
        try:
            yield
        except OSError:
            leave_closed_terminal()

    def _write(self, kind: str, record: Mapping[str, Any]) -> None:
        if self.listener:
            self.listener(kind, record)
        whole = {"kind": kind, **record}
        whole.setdefault("elapsed", round(self.elapsed, 3))
        self._file.append(json.dumps(nan_to_null(whole), ensure_ascii=False, allow_nan=False))

    def _send(self, numbers: Mapping[str, object], step: int, *, evaluation: bool = False) -> None:
        """To TensorBoard and the trackers."""
        for name, value in numbers.items():
            if self._board and isinstance(value, (int, float)):
                self._board.add_scalar(name, value, step)
        self._trackers.log(numbers, step, evaluation=evaluation)

    def _seconds_left(self) -> float:
        done = max(self._step - self._first, 1)
        return (time.monotonic() - self._began) / done * (self._total - self._step)

    def _line(self, record: Mapping[str, Any], left: float) -> Text:
        losses = record.get("loss", {})
        parts = [f"step {record['step']:>{len(str(self._total))}}/{self._total}"]
        parts += [f"{task} {losses[task]:.4f}" for task in self._with(losses) if task in losses]
        parts += _run_numbers(record)
        return Text("  ".join([*parts, f"{clock(left)} left"]))

    def _update_display(self) -> None:
        if self._live and self._last:
            display = self._display(self._last, self._seconds_left())
            with self._showing():
                self._live.update(display, refresh=True)

    def _display(self, record: Mapping[str, Any], left: float) -> RenderableType:
        done = Table.grid(padding=(0, 1))
        share = f"{100 * self._step / max(self._total, 1):.1f} %"
        done.add_row(
            f"step {self._step:,} of {self._total:,}",
            ProgressBar(total=max(self._total, 1), completed=self._step, width=30),
            f"{share}, {clock(left)} left",
        )
        numbers = Text("  ".join(_run_numbers(record)), style="dim")
        return Group(done, self._task_table(record), numbers)

    def _with(self, losses: Mapping[str, float]) -> list[str]:
        """The tasks, then the losses that are no task's own, such as those of a teacher."""
        return [*self._tasks, *(name for name in losses if name not in self._tasks)]

    def _task_table(self, record: Mapping[str, Any]) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2))
        table.add_column("task")
        for name in ("loss", "accuracy", "held-out loss", "held-out score"):
            table.add_column(name, justify="right")
        losses = record.get("loss", {})
        for task in [x for x in self._with(losses) if x in losses or x in self._held_out]:
            held_out = self._held_out.get(task, {})
            table.add_row(
                task,
                number(losses.get(task)),
                share(record.get("accuracy", {}).get(task)),
                number(held_out.get("loss")),
                metrics_text(held_out, most=1) or share(held_out.get("accuracy")),
            )
        return table


def _named(record: Mapping[str, Any]) -> dict[str, object]:
    """The numbers of a step's record by name: `loss/TASK`, `run/lr`."""
    named: dict[str, object] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            named |= {f"{name}/{task}": item for task, item in value.items()}
        elif name not in ("step", "elapsed"):
            named[f"run/{name}"] = value
    return named


def _console() -> Console:
    """The terminal; for a file or a pipe, wide enough for all tables. Without markup: names of
    tasks may have brackets."""
    console = _Screen(markup=False)
    return console if console.is_terminal else _Screen(markup=False, width=140)


class _Screen(Console):
    """A run continues when the reader of its output, such as `| tee`, has ended."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def _run_numbers(record: Mapping[str, Any]) -> list[str]:
    """The numbers of a step that do not belong to a task, as far as they are known."""
    forms = {
        "stage": lambda x: f"stage {x}",
        "lr": lambda x: f"lr {x:.2e}",
        "grad_norm": lambda x: f"norm {x:.2f}",
        "tokens_per_second": lambda x: f"{x:,.0f} tokens/s",
        "flops_per_second": lambda x: f"{_short(x)}FLOP/s",
        "mfu": lambda x: f"MFU {100 * x:.1f} %",
        "memory_allocated": lambda x: f"memory {_short(x)}B",
        "data_wait": lambda x: f"data wait {100 * x:.0f} %",
        "compiled": lambda x: f"compiled {x}" if x else "",
        "loss_scale": lambda x: f"scale {x:g}" if x != 1 else "",
        "skipped": lambda x: f"skipped {x}" if x else "",
    }
    shown = [form(record[name]) for name, form in forms.items() if record.get(name) is not None]
    return [text for text in shown if text]


def _short(value: float) -> str:
    """1234567 -> "1.23 M", to stand before a unit."""
    power = min(max(math.floor(math.log10(max(abs(value), 1)) / 3 + 1e-4), 0), 5)
    return f"{value / 1000**power:.3g} {' kMGTP'[power].strip()}"


def clock(seconds: float) -> str:
    """3725 -> "1:02:05"."""
    minutes, second = divmod(round(max(seconds, 0)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
