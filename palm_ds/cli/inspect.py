"""`palm-ds inspect`"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from palm_ds.cli.command import Command
from palm_ds.cli.options import add_recipe, check_overrides
from palm_ds.cli.output import show
from palm_ds.common.errors import UserError

if TYPE_CHECKING:
    from palm_ds.inference.inspect_stream import View


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    add = parser.add_argument
    add("--step", type=int, metavar="N", help="training step, counted from 1 (1)")
    add("--rows", type=int, default=2, metavar="K", help="number of rows to show (2)")
    add("--held_out", action="store_true", help="show held-out rows instead, K of each task group")


def run(args: argparse.Namespace) -> int:
    if args.held_out and args.step is not None:
        raise UserError("--held_out: shows the same rows at every step; remove --step")
    check_overrides(args.overrides)
    from palm_ds.cli.shipped import find_recipe
    from palm_ds.inference.inspect_stream import as_record, open_held_out, open_step, sequences
    from palm_ds.train.recipe.recipe import read_recipe

    recipe = read_recipe(find_recipe(args.recipe), args.overrides)
    if args.held_out:
        view = open_held_out(recipe, rows=args.rows)
    else:
        view = open_step(recipe, 1 if args.step is None else args.step, rows=args.rows)
    if args.json:
        for seen in sequences(view, view.shown):
            show(args, as_record(view, seen))
    else:
        _show(view)
    return 0


def _show(view: View) -> None:
    """In color on a terminal; elsewhere lines are not wrapped."""
    from rich.console import Console

    from palm_ds.inference.inspect_stream import as_text, summary

    console = Console(highlight=False, markup=False)  # names of classes may have brackets
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=160)
    for row in view.shown:
        console.print(as_text(view, row), soft_wrap=not console.is_terminal)
    for part in summary(view):
        console.print(part)
        console.print()


COMMAND = Command(
    name="inspect",
    summary="Show the packed rows of a training step, with masks and labels, without training.",
    usage="RECIPE [options] [a.b=c ...]",
    examples="""
palm-ds inspect RECIPE.yaml --step 500 --rows 3
palm-ds inspect RECIPE.yaml length=128 --held_out
palm-ds inspect RECIPE.yaml --rows 0
palm-ds inspect RECIPE.yaml --json          # one object per sequence
""",
    notes="""
Brackets show the original of a masked or replaced token; (=) marks a token that is predicted but
unchanged. A late step takes a while, because all steps before it are packed first.""",
    piped=True,
    add_arguments=add_arguments,
    run=run,
)

if __name__ == "__main__":
    COMMAND.start()
