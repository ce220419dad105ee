"""`palm-ds evaluate`"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from palm_ds.cli.command import Command
from palm_ds.cli.output import show
from palm_ds.common.json_files import nan_to_null, write_json

if TYPE_CHECKING:
    from rich.table import Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--kind",
        default="",
        help="classification, tagging, ... or module.Class (the task that predicted)",
    )
    add("--gold", nargs="+", required=True, metavar="FILE", help="files of rows with labels")
    add("--predictions", required=True, metavar="FILE", help="what was predicted for these rows")
    add("--columns", nargs="+", default=[], metavar="ROLE=NAME", help="columns of the gold files")
    add("--format", default="auto", metavar="F", help="format of the gold files (by their names)")
    add("--simplify", action="store_true", help="simplify the gold files' Chinese")
    add(
        "--no_header",
        action="store_true",
        help="the gold files have no header; columns are numbers from 0",
    )
    add("--positive", default="", metavar="CLASS", help="classification: the class of the F1")
    add("--separator", default="", metavar="S", help="multi_label: what is between classes (,)")
    add(
        "--scheme",
        default="",
        metavar="S",
        help="tagging: BIO, IOB1, ...; none: no chunks (detected)",
    )
    add("--style", default="", metavar="S", help="reading: squad1, squad2 or cmrc (by the data)")
    add("--task", nargs="+", default=[], metavar="KEY=VALUE", help="other settings of the task")
    add(
        "--json",
        nargs="?",
        const=True,
        default=False,
        metavar="FILE",
        help="print the scores as JSON, or write them to this file too",
    )


def run(args: argparse.Namespace) -> int:
    from palm_ds.data.reader import TableSettings
    from palm_ds.data.reader.options import columns_of
    from palm_ds.inference.score_files import ScoringOptions, score_files, settings_of

    named = {"positive": args.positive, "separator": args.separator, "scheme": args.scheme}
    given = {**named, "score": args.style, **settings_of(args.task)}
    settings = {key: value for key, value in given.items() if value != ""}
    options = ScoringOptions(kind=args.kind, settings=settings)
    read = TableSettings(
        columns=columns_of(args.columns),
        format=args.format,
        header=not args.no_header,
        simplify=args.simplify,
        lost_answers="keep",
    )
    scores = score_files(args.gold, args.predictions, options, read)
    if isinstance(args.json, str):
        write_json(args.json, nan_to_null(scores))
    show(args, scores, _table(scores))
    return 0


def _table(scores: Mapping[str, float]) -> Table:
    from rich.table import Table

    table = Table("metric", "score")
    for name, value in scores.items():
        table.add_row(name, f"{value:.4f}")
    return table


COMMAND = Command(
    name="evaluate",
    summary="Score a file of predictions against a file of labels; no model is needed.",
    usage="--gold FILE... --predictions FILE [--kind KIND] [options]",
    examples="""
palm-ds evaluate --gold dev.tsv --predictions DIR/sst2.predictions.json
palm-ds evaluate --kind classification --gold dev.tsv --predictions other.tsv
palm-ds evaluate --kind reading --style squad2 --gold dev-v2.0.json \\
    --predictions DIR/squad.predictions.json
palm-ds evaluate --kind tagging --gold FILE --predictions FILE     # one CoNLL file: its last
    # column is predicted, the one before it is the label
""",
    notes="""
Predictions are files of `palm-ds predict`, SQuAD's object of answers, CoNLL, or one per line in the
order of the rows. Files of `palm-ds predict` are scored by the task that wrote them.""",
    piped=True,
    add_arguments=add_arguments,
    run=run,
)

if __name__ == "__main__":
    COMMAND.start()
