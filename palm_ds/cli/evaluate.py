"""`palm-ds evaluate`"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from palm_ds.cli.command import Command
from palm_ds.cli.inference_options import (
    add_inference_arguments,
    add_report_arguments,
    check_written,
    progress,
    report_lines,
    start_processes,
)
from palm_ds.cli.options import local_path
from palm_ds.cli.output import console_of, show
from palm_ds.common.errors import UserError
from palm_ds.common.files import make_folder
from palm_ds.common.json_files import write_json
from palm_ds.common.messages import nan_to_null

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from palm_ds.inference.score_files import FileScores
    from palm_ds.train.evaluate.minimal_pairs import PairScores


_OF_PREDICTIONS = (
    "kind",
    "columns",
    "simplify",
    "no_header",
    "positive",
    "separator",
    "scheme",
    "style",
)
"""Options that minimal pairs have no use for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_task_arguments(parser)
    _add_pair_arguments(parser)
    add_report_arguments(parser)
    add_inference_arguments(parser)
    parser.add_argument(
        "--json",
        nargs="?",
        const=True,
        default=False,
        type=local_path,
        metavar="FILE",
        help="print the scores as JSON, or write them to this file too",
    )


def _add_task_arguments(parser: argparse.ArgumentParser) -> None:
    """Of predictions, the rows that they are for, and the task that predicted."""
    add = parser.add_argument
    add(
        "--kind",
        default="",
        help="classification, tagging, ... or module.Class (the task that predicted)",
    )
    add("--gold", nargs="+", default=[], metavar="FILE", help="files of rows with labels")
    add("--predictions", default="", metavar="FILE", help="predictions for these rows")
    columns = "names of columns in the gold files"
    add("--columns", nargs="+", default=[], metavar="ROLE=NAME", help=columns)
    add("--format", default="auto", metavar="F", help="format of the gold files (by their names)")
    simplify = "convert the gold files' Chinese to simplified characters"
    add("--simplify", action="store_true", help=simplify)
    add(
        "--no_header",
        action="store_true",
        help="the gold files have no header; columns are numbers from 0",
    )
    add("--positive", default="", metavar="CLASS", help="classification: positive class for F1")
    add("--separator", default="", metavar="S", help="multi_label: separator of classes (,)")
    add(
        "--scheme",
        default="",
        metavar="S",
        help="tagging: BIO, IOB1, ...; none: tags are not chunks (detected)",
    )
    add("--style", default="", metavar="S", help="reading: squad1, squad2 or cmrc (detected)")
    add(
        "--task",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="other settings of the task; with --pairs: TASK alone, the task that reads them",
    )


def _add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """Of a model on minimal pairs."""
    add = parser.add_argument
    add(
        "--pairs",
        nargs="+",
        default=[],
        metavar="FILE",
        help="instead of --gold: minimal pairs, JSON lines as BLiMP's or text as Zorro's",
    )
    add(
        "--model",
        default="",
        metavar="MODEL",
        help="with --pairs: a run folder, or a checkpoint of any format, with a masked-LM head",
    )
    add(
        "--score",
        default="unmasked",
        choices=("unmasked", "masked"),
        help="with --pairs: the mean loss of a sentence as it is (unmasked), or the sum over its "
        "tokens, each masked in turn",
    )


def run(args: argparse.Namespace) -> int:
    _check_given(args)
    if args.pairs:
        _score_pairs(args)
    else:
        scores = _prediction_scores(args)
        reports = {"": scores.report} if scores.report else {}
        title = f"Scores of {args.predictions}"
        lines = report_lines(args, title, {"": scores.metrics}, reports)
        printed = scores.record() if args.report else scores.metrics
        _show(args, scores.record(), printed, _table(scores.metrics), *lines)
        for note in scores.notes:
            console_of(args).print(f"note: {note}")
    return 0


def _check_given(args: argparse.Namespace) -> None:
    """Raises UserError unless there are predictions and labels, or minimal pairs and a model."""
    predictions = {"--gold": args.gold, "--predictions": args.predictions}
    pairs = {"--pairs": args.pairs, "--model": args.model}
    if args.pairs and (args.report or args.html):
        raise UserError("--report and --html: minimal pairs have no classes; remove them")
    given = [name for name in _OF_PREDICTIONS if getattr(args, name)]
    given += ["format"] if args.format != "auto" else []
    if args.pairs and given:
        raise UserError(f"--{given[0]}: is not for --pairs; remove it")
    if args.score != "unmasked" and not args.pairs:
        raise UserError("--score: needs --pairs")
    for name in ("json", "html"):
        file = getattr(args, name)
        if isinstance(file, Path):
            check_written(name, file, [*args.gold, args.predictions, *args.pairs])
    given = [name for name, value in {**predictions, **pairs}.items() if value]
    if given not in ([*predictions], [*pairs]):
        raise UserError(
            f"{' '.join(given) or 'nothing'} given: give --gold and --predictions, or --pairs and "
            "--model"
        )


def _prediction_scores(args: argparse.Namespace) -> FileScores:
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
    return score_files(args.gold, args.predictions, options, read)


def _score_pairs(args: argparse.Namespace) -> None:
    from palm_ds.inference.held_out_loss import score_minimal_pairs
    from palm_ds.inference.trained_model import TrainedModel

    group, device = start_processes(args.device)
    model = TrainedModel.open(
        args.model, device=device, precision=args.precision, batch_tokens=args.batch_tokens
    )
    with progress("pairs", group.rank == 0 and not args.quiet) as done:
        scores = score_minimal_pairs(
            model, args.pairs, args.score, task=" ".join(args.task), group=group, done=done
        )
    if group.rank == 0:
        record = {"model": args.model, "score": args.score, **scores.record()}
        _show(args, record, record, _pair_table(scores))


def _show(
    args: argparse.Namespace,
    written: Mapping[str, object],
    printed: Mapping[str, object],
    *lines: RenderableType,
) -> None:
    if isinstance(args.json, Path):
        make_folder(args.json.parent)
        write_json(args.json, nan_to_null(written))
    show(args, printed, *lines)


def _pair_table(scores: PairScores) -> Table:
    from rich.table import Table

    table = Table("paradigm", "pairs", "accuracy")
    for name, paradigm in scores.paradigms.items():
        table.add_row(name, f"{paradigm.pairs:,}", f"{paradigm.accuracy:.2%}")
    table.add_section()
    table.add_row("mean", f"{scores.pairs:,}", f"{scores.mean:.2%}")
    return table


def _table(scores: Mapping[str, float]) -> Table:
    from rich.table import Table

    table = Table("metric", "score")
    for name, value in scores.items():
        table.add_row(name, f"{value:.4f}")
    return table


COMMAND = Command(
    name="evaluate",
    summary="Score predictions against labels, without a model; or a model on minimal pairs.",
    usage="--gold FILE... --predictions FILE [options] | --pairs FILE... --model MODEL",
    examples="""
palm-ds evaluate --gold dev.tsv --predictions DIR/sst2.predictions.json
palm-ds evaluate --kind classification --gold dev.tsv --predictions other.tsv
palm-ds evaluate --kind reading --style squad2 --gold dev-v2.0.json \\
    --predictions DIR/squad.predictions.json
palm-ds evaluate --gold dev.tsv --predictions DIR/sst2.predictions.json --html scores.html
palm-ds evaluate --kind tagging --gold FILE --predictions FILE     # one CoNLL file: its last
    # column is predicted, the one before it is the label
palm-ds evaluate --pairs blimp/data/*.jsonl --model runs/mine
palm-ds evaluate --pairs zorro/sentences/babyberta/*.txt --model runs/mine/hf --score masked
""",
    notes="""
Predictions are files of `palm-ds predict`, SQuAD's object of answers, CoNLL, or one per line in the
order of the rows. Files of `palm-ds predict` are scored by the task that wrote them.

Minimal pairs: JSON lines with sentence_good and sentence_bad, or text whose odd lines are bad and
whose even lines are good. A pair is right if the good sentence has the lower loss; a tie counts
half. Each file is a paradigm, and the mean is over paradigms. A model that reads from left to right
gives a sentence the summed loss of its tokens.""",
    piped=True,
    add_arguments=add_arguments,
    run=run,
)

if __name__ == "__main__":
    COMMAND.start()
