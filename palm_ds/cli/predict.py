"""`palm-ds predict`"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from palm_ds.cli.command import FILES_CONTINUE, Command
from palm_ds.cli.inference_options import (
    add_inference_arguments,
    add_report_arguments,
    answer_pipe,
    check_written,
    is_piped,
    progress,
    report_lines,
    start_processes,
)
from palm_ds.cli.options import list_of_names, local_path
from palm_ds.cli.output import console_of, show
from palm_ds.common.errors import UserError
from palm_ds.common.messages import counted

if TYPE_CHECKING:
    from palm_ds.data.reader.options import ColumnKey
    from palm_ds.inference.predict_files import PredictionSummary
    from palm_ds.inference.predictor import Predictor
    from palm_ds.runtime.processes.process_group import ProcessGroup


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a run of `palm-ds finetune`, or one of its folders")
    rows = "files of rows, or - for standard input"
    add("--input", nargs="+", required=True, metavar="FILE", help=rows)
    add(
        "--output",
        default=None,
        type=local_path,
        metavar="DIR",
        help="folder for the predictions; earlier ones in it are replaced",
    )
    add(
        "--tasks",
        default="",
        metavar="A,B",
        help="predict these tasks (all whose columns are there)",
    )
    add(
        "--columns",
        nargs="+",
        default=[],
        metavar="ROLE=NAME",
        help="columns named otherwise than in training; `ROLE=`: no such column",
    )
    add("--format", default="", help="format of the files, if it differs from that in training")
    add(
        "--generate",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="generation settings, instead of the recipe's: beams=5 no_repeat_ngram=3",
    )
    add("--tsv", action="store_true", help="also write TASK.tsv (index, prediction)")
    add_report_arguments(parser)
    add_inference_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from palm_ds.data.reader.options import columns_of
    from palm_ds.inference.prediction_files import check_output
    from palm_ds.inference.score_files import settings_of
    from palm_ds.inference.trained_model import TrainedModel
    from palm_ds.runtime.processes.launchers import check_hostfile

    check_hostfile()
    columns, piped = columns_of(args.columns), is_piped(args)
    if args.tsv and piped:
        raise UserError("--tsv: predictions of a pipe are lines of JSON; remove it")
    if (args.report or args.html) and piped:
        raise UserError("--report and --html: predictions of a pipe are not scored; remove them")
    if not piped:
        check_output(args.output)
    if args.html:
        check_written("html", args.html, args.input)
    group, device = start_processes(args.device)
    opened = TrainedModel.open(
        args.model, device=device, precision=args.precision, batch_tokens=args.batch_tokens
    )
    predictor = opened.predictor(list_of_names(args.tasks))
    predictor = predictor.generating(settings_of(args.generate, "--generate"))
    if piped:
        from palm_ds.inference.piped_answers import PredictionAnswer

        answer = PredictionAnswer(predictor=predictor, columns=columns)
        return answer_pipe(answer, args.format)
    return _predict_files(args, predictor, columns, group)


def _predict_files(
    args: argparse.Namespace,
    predictor: Predictor,
    columns: dict[str, ColumnKey],
    group: ProcessGroup,
) -> int:
    from palm_ds.inference.predict_files import PredictionJob, predict_files

    job = PredictionJob(
        inputs=args.input,
        output=args.output,
        columns=columns,
        format=args.format,
        tsv=args.tsv,
    )
    with progress("predict", group.rank == 0 and not args.quiet) as done:
        report = predict_files(predictor, job, group, done)
    if report:
        _show(report, args, group.world)
    return 0


def _show(report: PredictionSummary, args: argparse.Namespace, world: int) -> None:
    """Print scores, notes, the numbers of truncated rows, and a summary."""
    from rich.table import Table

    console = console_of(args)
    table = Table("task", "metric", "score")
    for task, metrics in report.scores.items():
        for name, value in metrics.items():
            table.add_row(task, name, f"{value:.4f}")
    record = {"rows": report.rows, "seconds": report.seconds, "truncated": report.cut}
    record |= {
        "continued": report.continued,
        "output": args.output,
        "scores": report.scores,
        "notes": report.notes,
    }
    lines = report_lines(args, f"Scores of {args.model}", report.scores, report.reports)
    if args.report:
        record["reports"] = {name: each.record() for name, each in report.reports.items()}
    show(args, record, *([table] if report.scores else []), *lines)
    if report.continued:
        console.print(f"note: predicted by an earlier run: {counted(report.continued, 'row')}")
    for note in report.notes:
        console.print(f"note: {note}")
    for task, rows in report.cut.items():
        if rows:
            console.print(f"note: {task}: truncated: {counted(rows, 'row')}")
    predicted = report.rows - report.continued / report.passes
    speed = predicted / max(report.seconds, 1e-9)
    work = f"{counted(report.passes, 'pass')} by {counted(world, 'process')}"
    took = f"{report.seconds:.1f} s, {speed:,.0f} rows/s"
    rows = counted(report.rows, "row")
    console.print(f"{rows} in {work}, {took}; written to {args.output}")


COMMAND = Command(
    name="predict",
    summary="Predict rows of files with a trained model, for all of its tasks in one pass.",
    usage="MODEL --input FILE... --output DIR [options]   or: MODEL --input - [options]",
    examples="""
palm-ds predict runs/joint --input new.tsv --output predictions
palm-ds predict runs/joint --input new.tsv --output predictions --tasks ner,topic --tsv
palm-ds predict runs/joint/weights --input new.jsonl --output out --columns text_a=review
palm-ds predict runs/joint --input - --tasks topic < new.jsonl
palm-ds predict runs/titles --input new.jsonl --output out --generate beams=5 no_repeat_ngram=3
torchrun --nproc_per_node 4 --module palm_ds.cli.predict runs/joint --input new.tsv --output out
""",
    notes="""
Rows need no labels; if they have labels, scores are printed and written. The output files are the
same for any number of processes, also under deepspeed. A run that was interrupted continues with
the same command.

`--input -`: lines of JSON, TSV or text on the standard input; a line of JSON for each is printed as
soon as it is predicted.""",
    add_arguments=add_arguments,
    run=run,
    interrupted=FILES_CONTINUE,
)

if __name__ == "__main__":
    COMMAND.start()
