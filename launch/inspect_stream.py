"""Show the packed rows of a training step as they will be eaten: nothing is trained.

    python launch/inspect_stream.py RECIPE.yaml --step 500 --rows 3
    python launch/inspect_stream.py RECIPE.yaml length=128 --held_out
    python launch/inspect_stream.py RECIPE.yaml --rows 0        # the summary of a whole step alone
    python launch/inspect_stream.py RECIPE.yaml --json          # one object a sequence

The original stands in brackets behind a hidden or replaced token, (=) behind one that is predicted
though it stands there. A late step of a long run takes a while: what comes before it is packed.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from typing import TYPE_CHECKING

from palm_ds.errors import UserError, exit_on_user_error

if TYPE_CHECKING:
    from palm_ds.inspect_stream import View


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", help="what is learned: a YAML file (docs/recipe.md)")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="other values for its keys")
    parser.add_argument("--step", type=int, metavar="N", help="a step, counted from 1 (1)")
    parser.add_argument("--rows", type=int, default=2, metavar="K", help="rows to show (2)")
    parser.add_argument(
        "--held_out", action="store_true", help="the rows of evaluations, K of each blend"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a sequence")
    return parser.parse_intermixed_args()


def main() -> int:
    args = arguments()
    with exit_on_user_error():
        if args.held_out and args.step is not None:
            raise UserError("--held_out: the same rows at every step; leave out --step")
        from palm_ds.inspect_stream import as_record, open_held_out, open_step, sequences
        from palm_ds.run import read_recipe

        recipe = read_recipe(args.recipe, args.overrides)
        if args.held_out:
            view = open_held_out(recipe, rows=args.rows)
        else:
            step = 1 if args.step is None else args.step
            view = open_step(recipe, step, rows=args.rows)
        if args.json:
            for seen in sequences(view, view.shown):
                print(json.dumps(as_record(view, seen), ensure_ascii=False))
        else:
            show(view)
    return 0


def show(view: View) -> None:
    """Colours on a terminal; elsewhere a line stays a line, however long."""
    from rich.console import Console

    from palm_ds.inspect_stream import as_text, summary

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    for row in view.shown:
        console.print(as_text(view, row), soft_wrap=not console.is_terminal)
    for part in summary(view):
        console.print(part)
        console.print()


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it quietly
    sys.exit(main())
