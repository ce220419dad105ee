"""`palm-ds augment`"""

from __future__ import annotations

import argparse

from palm_ds.cli.command import CONTINUES, Command
from palm_ds.cli.inference_options import progress
from palm_ds.cli.options import local_path
from palm_ds.cli.output import summarize
from palm_ds.common.messages import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("input", nargs="+", metavar="TABLE", help="files of rows")
    add("--output", required=True, type=local_path, metavar="FILE", help="the .jsonl file to write")
    add("--copies", type=int, default=10, metavar="N", help="copies made of each row (10)")
    unknown = "share of words replaced by the unknown token (0.1)"
    add("--unknown", type=float, default=0.1, metavar="P", help=unknown)
    same = "share of words replaced by another word of their class (0.1)"
    add("--same_class", type=float, default=0.1, metavar="P", help=same)
    guess = "share of words replaced by a prediction of --model (0)"
    add("--guess", type=float, default=0.0, metavar="P", help=guess)
    add("--model", default="", metavar="FOLDER", help="a model with a masked-LM head, for --guess")
    piece = "share of copies cut to a random piece of their text (0.25)"
    add("--piece", type=float, default=0.25, metavar="P", help=piece)
    add("--seed", type=int, default=1, metavar="N", help="random seed (1)")
    add("--keep_labels", action="store_true", help="give copies the label of their row")
    columns = "names of columns, as `columns` in a recipe's `read`"
    add("--columns", nargs="+", default=[], metavar="ROLE=NAME", help=columns)


def run(args: argparse.Namespace) -> int:
    from palm_ds.data.reader import TableSettings, open_table
    from palm_ds.data.reader.options import columns_of
    from palm_ds.inference.distillation.augment import AugmentSettings, augment, guesser_of
    from palm_ds.inference.trained_model import TrainedModel

    settings = AugmentSettings(
        copies=args.copies,
        unknown=args.unknown,
        same_class=args.same_class,
        guess=args.guess,
        piece=args.piece,
        seed=args.seed,
        keep_labels=args.keep_labels,
    )
    read = TableSettings(columns=columns_of(args.columns), missing_labels="keep")
    table = open_table(args.input, read)
    filler = TrainedModel.open(args.model).filler() if args.model else None
    guesser, model = (guesser_of(filler), filler.folder) if filler else (None, None)
    with progress("augment", not args.quiet) as done:
        rows = augment(table, args.output, settings, guesser, model=model, done=done)
    record = {"rows": rows, "from_rows": len(table), "output": args.output}
    summarize(args, record, f"{counted(rows, 'row')} from {len(table):,}; written to {args.output}")
    return 0


COMMAND = Command(
    name="augment",
    summary="Make more rows from those of a table, for a teacher to label.",
    usage="TABLE... --output FILE [options]",
    examples="""
palm-ds augment train.tsv --output more.jsonl
palm-ds augment train.tsv --output more.jsonl --copies 20 --guess 0.1 --model runs/pretrained
""",
    notes="""
The rows themselves come first, each before its copies; `source_row` and `copy` tell which is which.
Copies have no label, unless they keep it: read them with `read: {missing_labels: keep}`. Columns
other than the texts and the label are not written. Classes of words are parts of speech in Chinese,
endings such as -ing and -ed elsewhere.""",
    add_arguments=add_arguments,
    run=run,
    interrupted=CONTINUES,
)

if __name__ == "__main__":
    COMMAND.start()
