"""Predict the rows of files with a trained model: every task in one pass where they read alike.

    python launch/predict.py RUN --input new.tsv --output DIR
    torchrun --nproc_per_node 4 launch/predict.py RUN --input new.tsv --output DIR --tasks ner,topic
    python launch/predict.py RUN/weights --input new.jsonl --output DIR --columns text_a=review

Also under deepspeed; the files are the same for any number of processes. Rows need no labels; where
they have some, scores are shown and written. docs/finetuning.md says what is in DIR.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palm_ds.errors import exit_on_user_error

if TYPE_CHECKING:
    from palm_ds.predicting import Report


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a --run_dir of launch/finetune.py, or its weights/")
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help="the rows")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="is made")
    parser.add_argument("--tasks", default="", metavar="A,B", help="by default all")
    parser.add_argument(
        "--columns",
        nargs="+",
        default=[],
        metavar="ROLE=NAME",
        help="which column is what, where it is not as in training; ROLE= : there is none",
    )
    parser.add_argument("--format", default="", help="of the files, where not as in training")
    parser.add_argument("--tsv", action="store_true", help="write TASK.tsv too (index, prediction)")
    parser.add_argument("--precision", default="fp32", help="fp32 (default), bf16 or fp16")
    parser.add_argument("--batch_tokens", type=int, default=0, metavar="N", help="of a batch")
    parser.add_argument("--device", default="", help="cpu, cuda, cuda:1; by default a GPU")
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = arguments()
    with exit_on_user_error():
        from palm_ds.outputs import check_output
        from palm_ds.predicting import Job, predict_files
        from palm_ds.predictor import open_predictor
        from palm_ds.reader.options import columns_of

        columns = columns_of(args.columns)
        check_output(args.output)
        group, device = processes(args.device)
        predictor = open_predictor(
            args.model,
            tasks=[name.strip() for name in args.tasks.split(",") if name.strip()],
            precision=args.precision,
            batch_tokens=args.batch_tokens,
            device=device,
        )
        job = Job(
            inputs=args.input,
            output=args.output,
            columns=columns,
            format=args.format,
            tsv=args.tsv,
        )
        with progress(group.rank == 0) as done:
            report = predict_files(predictor, job, group, done)
        if report:
            show(report, args.output, group.world)
        return 0
    return 2


def processes(device: str) -> tuple[Any, Any]:
    """Those of the run, and what this one computes on; DeepSpeed joins them where there are
    several."""
    import torch

    from palm_ds.checkpoint import ALONE

    if int(os.environ.get("WORLD_SIZE", os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))) > 1:
        from palm_ds.machine import Machine
        from palm_ds.processes import start

        found = start(Machine(path="", sections={}, stage=0, precision="fp32"))
        return found, torch.device(device) if device else found.device
    usual = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
    return ALONE, torch.device(device or ("cuda" if usual else "cpu"))


@contextmanager
def progress(shown: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar with rows and rows a second, on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Speed(ProgressColumn):
        def render(self, task: Any) -> Text:
            return Text(f"{task.finished_speed or task.speed or 0:,.0f} rows/s")

    console = Console(stderr=True)
    texts = TextColumn("{task.completed:,}/{task.total:,} rows")
    bar = Progress(BarColumn(), texts, Speed(), TimeRemainingColumn(), console=console)
    if not shown or not console.is_terminal:
        yield lambda rows, of: None
        return
    with bar:
        number = bar.add_task("predict", total=None)
        yield lambda rows, of: bar.update(number, completed=rows, total=of)


def show(report: Report, output: Path, world: int) -> None:
    """Scores, notes, what was cut, and the final line."""
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True, highlight=False)
    if report.scores:
        table = Table("task", "metric", "score")
        for task, metrics in report.scores.items():
            for name, value in metrics.items():
                table.add_row(task, name, f"{value:.4f}")
        console.print(table)
    for note in report.notes:
        console.print(f"note: {note}", markup=False)
    for task, rows in report.cut.items():
        if rows:
            console.print(f"note: {task}: {rows:,} rows are longer than it reads", markup=False)
    speed = report.rows / max(report.seconds, 1e-9)
    console.print(
        f"{report.rows:,} rows, {report.passes} pass(es), {world} process(es), "
        f"{report.seconds:.1f} s, {speed:,.0f} rows/s; written to {output}",
        markup=False,
    )


if __name__ == "__main__":
    code = main()
    from palm_ds.processes import leave

    leave(code)
