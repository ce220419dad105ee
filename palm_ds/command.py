"""The command line that pretraining and fine-tuning share."""

from __future__ import annotations

import argparse
from pathlib import Path

from palm_ds.errors import UserError, exit_on_user_error


def arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", help="what is learned: a YAML file (docs/recipe.md)")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="other values for its keys")
    parser.add_argument(
        "--deepspeed_config", required=True, metavar="FILE", help="how the machine computes it"
    )
    parser.add_argument("--run_dir", help="where everything is written; default runs/RECIPE")
    parser.add_argument("--init_from", metavar="DIR", help="start from these weights")
    parser.add_argument(
        "--extend",
        metavar="RUN",
        help="start from this run's weights, optimizer state and place in the data: the recipe has "
        "a task or a corpus more",
    )
    parser.add_argument("--dry_run", action="store_true", help="check everything, train nothing")
    parser.add_argument(
        "--print_config", action="store_true", help="show all that is decided; stop"
    )
    parser.add_argument(
        "--local_rank", type=int, default=-1, help="given by the launcher; not used"
    )
    return parser.parse_intermixed_args()


def main(description: str | None = None) -> int:
    """Train a recipe as the command line says; the exit code."""
    args = arguments(description)
    with exit_on_user_error():
        wrong = [text for text in args.overrides if "=" not in text]
        if wrong:
            raise UserError(f"override {wrong[0]!r}: expected key=value")
        from palm_ds.folder import Run, describe
        from palm_ds.machine import read_machine
        from palm_ds.run import read_recipe
        from palm_ds.train import train

        overrides = list(args.overrides)
        if args.init_from:
            overrides.append(f"init_from={args.init_from}")
        if args.extend:
            overrides.append(f"extend={args.extend}")
        recipe = read_recipe(args.recipe, overrides)
        folder = Path(args.run_dir or Path("runs") / Path(args.recipe).stem)
        run = Run(recipe=recipe, machine=read_machine(args.deepspeed_config), folder=folder)
        if args.print_config:
            describe(run)
            return 0
        return train(run, dry_run=args.dry_run)
    return 2
