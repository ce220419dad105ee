"""`palm-ds fill-mask`"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from palm_ds.cli.command import Command
from palm_ds.cli.output import show
from palm_ds.common.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a run folder, or a checkpoint of any format")
    add("texts", nargs="*", metavar="TEXT", help="a text with one or more [MASK]")
    add("--top", type=int, default=5, metavar="N", help="predictions to show for each [MASK] (5)")
    add("--task", default="", help="use the task embedding of this task")
    add("--hide", default="", metavar="WORD", help="mask this word in the texts")


def run(args: argparse.Namespace) -> int:
    if args.top < 1:
        raise UserError(f"--top {args.top}: expected at least 1")
    from palm_ds.inference.fill_mask import as_record, as_text
    from palm_ds.inference.trained_model import TrainedModel

    filler = TrainedModel.open(args.model).filler(args.task)
    given = [("", text) for text in args.texts]
    for place, text in given or _lines():
        try:
            filled = filler.fill(text, top=args.top, hide=args.hide)
        except UserError as error:
            raise UserError(f"{place}{error}") from None
        show(args, as_record(filler, text, filled), as_text(filler, filled))
    return 0


def _lines() -> Iterator[tuple[str, str]]:
    """The non-empty lines of stdin, each with its place for messages."""
    if sys.stdin is None:
        raise UserError("no text: give one, as standard input is closed")
    if sys.stdin.isatty():
        print("type a text with [MASK] on each line; end with Ctrl-D", file=sys.stderr, flush=True)
    any_text = False
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            text = line.decode().strip()
        except UnicodeDecodeError:
            raise UserError(f"<stdin>:{number}: not UTF-8 text") from None
        if text:
            any_text = True
            yield f"<stdin>:{number}: ", text
    if not any_text:
        raise UserError("no text: give one, or lines on standard input")


COMMAND = Command(
    name="fill-mask",
    summary="Predict masked words with a run, a weights folder or a Hugging Face folder.",
    usage="MODEL [TEXT ...] [options]",
    examples="""
palm-ds fill-mask runs/mine "The capital of [MASK] is Paris."
palm-ds fill-mask runs/mine/hf --hide Paris "The capital of France is Paris."
palm-ds fill-mask runs/mine --json < texts.txt
""",
    notes="Without TEXT, lines are read from standard input. Each [MASK] is predicted by itself.",
    piped=True,
    add_arguments=add_arguments,
    run=run,
)

if __name__ == "__main__":
    COMMAND.start()
