"""Options shared by the commands that use a model: processes, device, progress, pipes."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from palm_ds.cli.options import local_path
from palm_ds.common.errors import UserError
from palm_ds.common.files import check_not_input
from palm_ds.common.messages import json_line, nan_to_null, progress_to_stderr
from palm_ds.runtime.processes.launch_env import launched_processes

if TYPE_CHECKING:
    import torch
    from rich.console import RenderableType
    from rich.progress import Task

    from palm_ds.data.tasks.interfaces import ScoreReport
    from palm_ds.inference.piped_answers import Answer
    from palm_ds.runtime.processes.process_group import ProcessGroup

PIPE = "-"
_PIPED_ROWS = 256
"""Of a batch at most."""
_PIPED_SECONDS = 0.02
"""In which more rows of a batch may come."""


def add_inference_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--precision", default="fp32", help="fp32, bf16 or fp16 (fp32)")
    add(
        "--batch_tokens",
        type=int,
        default=0,
        metavar="N",
        help="tokens per batch: more is faster, and takes more memory",
    )
    add("--device", default="", help="cpu, cuda, cuda:1 (a GPU if there is one)")
    add("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)  # from the launcher


def add_vector_arguments(parser: argparse.ArgumentParser) -> None:
    """How the vectors of texts are made, apart from their pooling."""
    add = parser.add_argument
    add("--dimensions", type=int, default=0, metavar="N", help="keep the first N dimensions (all)")
    most = "keep the N largest entries of a sparse vector (all)"
    add("--max_active_dims", type=int, default=0, metavar="N", help=most)
    add("--max_length", type=int, default=None, metavar="N", help="truncate texts to N tokens")
    add(
        "--prompt",
        default=None,
        metavar="TEXT",
        help="text put before every input (the model's own)",
    )
    add("--task", default="", help="use the task embedding of this task")


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--report",
        action="store_true",
        help="also print scores by class or type, confusions and calibration",
    )
    page = "write the scores and these tables to an HTML page"
    add("--html", type=local_path, metavar="FILE", help=page)


def check_written(option: str, file: Path, inputs: Sequence[str]) -> None:
    """Raises UserError if the file of an option cannot be written, or is one of the inputs."""
    if file.is_dir():
        raise UserError(f"--{option} {file}: is a folder; name a file in it")
    check_not_input(file, inputs)


def report_lines(
    args: argparse.Namespace,
    title: str,
    scores: Mapping[str, Mapping[str, float]],
    reports: Mapping[str, ScoreReport],
) -> list[RenderableType]:
    """The tables that `--report` asks for; writes the page of `--html`. {task: ...} both."""
    from palm_ds.train.report.html_page import write_scores
    from palm_ds.train.report.score_tables import detail_tables

    if not (args.report or args.html):
        return []
    tables = {task: report.tables() for task, report in reports.items()}
    if args.html:
        write_scores(args.html, title, {x: (own, tables.get(x, {})) for x, own in scores.items()})
    found = [detail_tables(task, own) for task, own in tables.items()]
    return [line for lines in found for line in lines] if args.report else []


def start_processes(device: str) -> tuple[ProcessGroup, torch.device]:
    """This process's group and device; several processes are joined by DeepSpeed."""
    import torch

    from palm_ds.runtime.processes.process_group import SINGLE_PROCESS
    from palm_ds.runtime.processes.processes import device_named, start

    if launched_processes() > 1:
        from palm_ds.runtime.deepspeed.ds_config import DSConfig

        processes = start(DSConfig(path="", sections={}, stage=0, precision="fp32"))
        return processes, device_named(device) if device else processes.device
    gpu = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
    return SINGLE_PROCESS, device_named(device or ("cuda" if gpu else "cpu"))


@contextmanager
def progress(what: str, shown: bool) -> Iterator[Callable[[int, int | None], None]]:
    """A progress bar on a terminal, with rows per second."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, TimeRemainingColumn
    from rich.text import Text

    class Rows(ProgressColumn):
        """Column of the rows done; their total is known only when the files have been read."""

        def render(self, task: Task) -> Text:
            of = "" if task.total is None else f"/{task.total:,.0f}"
            # rich knows none before the second of two reports within 30 s
            mean = task.completed / (task.elapsed or math.inf)
            speed = task.finished_speed or task.speed or mean
            return Text(f"{task.completed:,.0f}{of} rows  {speed:,.0f} rows/s")

    console = Console(stderr=True)
    bar = Progress(BarColumn(), Rows(), TimeRemainingColumn(), console=console)
    if not shown or not console.is_terminal:
        yield lambda rows, of: None
        return
    with bar:
        number = bar.add_task(what, total=None)
        yield lambda rows, of: bar.update(number, completed=rows, total=of)


def is_piped(args: argparse.Namespace) -> bool:
    """Whether rows are read from the standard input, `--input -`, and answered on the standard
    output; from then on messages are printed on standard error. Raises UserError for half of it,
    and with several processes."""
    output = str(args.output or PIPE)
    if PIPE not in args.input:
        if output == PIPE:
            raise UserError("--output: missing; only answers to `--input -` go to standard output")
        return False
    if len(args.input) > 1 or output != PIPE:
        others = " ".join(name for name in args.input if name != PIPE)
        more = f"--output {output}" if output != PIPE else others or "another -"
        raise UserError(
            f"--input -: reads standard input alone and answers on standard output; remove {more}"
        )
    if sys.stdin is None:
        raise UserError("--input -: standard input is closed")
    if launched_processes() > 1:
        raise UserError("--input -: is read by one process; start it without a launcher")
    progress_to_stderr()
    return True


def answer_pipe(answer: Answer, format: str) -> int:
    """Print a line of JSON for each row of the standard input. Raises UserError for one that cannot
    be read, after the answers to those before it."""
    from palm_ds.data.reader.piped_rows import Pipe, format_of, row_batches
    from palm_ds.inference.piped_answers import answers

    with Pipe(sys.stdin.fileno()) as pipe:
        read = answer.read
        found = format_of(pipe, format, as_in_training=read.format)
        batches = row_batches(pipe, found, read, most=_PIPED_ROWS, seconds=_PIPED_SECONDS)
        for records in answers(batches, answer):
            print(*(json_line(nan_to_null(each)) for each in records), sep="\n", flush=True)
    return 0
