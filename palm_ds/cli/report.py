"""`palm-ds report`"""

from __future__ import annotations

import argparse

from palm_ds.cli.command import Command
from palm_ds.cli.output import summarize


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dir", nargs="+", metavar="RUN", help="run folders; each gets its own report"
    )


def run(args: argparse.Namespace) -> int:
    from palm_ds.train.report.html_report import write_report

    for folder in args.run_dir:
        written = write_report(folder)
        summarize(args, {"run": folder, "report": written}, str(written))
    return 0


COMMAND = Command(
    name="report",
    summary="Write report.html of a run folder: curves, scores, speed.",
    usage="RUN [RUN ...]",
    examples="palm-ds report runs/mine",
    notes="Works at any time: while the run trains, after it was killed, or when it is finished.",
    add_arguments=add_arguments,
    run=run,
)

if __name__ == "__main__":
    COMMAND.start()
