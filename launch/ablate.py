"""Train one recipe under several schedules with equal budgets, and compare what they reach.

    python launch/ablate.py RECIPE.yaml --deepspeed_config ds_configs/cpu.json --out runs/ablation
    python launch/ablate.py RECIPE.yaml --deepspeed_config FILE --out DIR optimizer.lr=1e-4 \\
        --launcher "deepspeed --num_gpus 8" --schedules continual,alternate \\
        --always knowledge_masking --steps 2000

Each run is a launch/pretrain.py of its own. The same command goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from palm_ds.children import interrupt, launcher_of
from palm_ds.errors import exit_on_user_error

PRETRAIN = Path(__file__).resolve().with_name("pretrain.py")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", help="its blends and their steps are what is scheduled")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="other values for its keys")
    parser.add_argument(
        "--deepspeed_config", required=True, metavar="FILE", help="how the machine computes it"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="of all runs and the table")
    parser.add_argument(
        "--schedules",
        default="sequential,joint,continual",
        help="some of sequential, joint, continual, alternate; default: %(default)s",
    )
    parser.add_argument(
        "--always", default="", metavar="TASK", help="each once more with TASK in every blend"
    )
    parser.add_argument(
        "--steps", default="", metavar="N", help="of each blend; default: what the recipe gives it"
    )
    parser.add_argument(
        "--launcher", default="", help='"deepspeed --num_gpus 2", "torchrun ..."; default: python'
    )
    return parser.parse_intermixed_args()


def main() -> int:
    args = arguments()
    with exit_on_user_error():
        launcher = launcher_of(args.launcher)
        from palm_ds.ablate import Ablation, Variant, compare, run_all, variants
        from palm_ds.machine import read_machine

        ablation = Ablation(
            recipe=Path(args.recipe),
            machine=read_machine(args.deepspeed_config),
            out=Path(args.out),
            overrides=args.overrides,
            schedules=[name.strip() for name in args.schedules.split(",")],
            always=args.always,
            steps=args.steps,
        )
        found = variants(ablation)

        def command(variant: Variant) -> list[str]:
            machine = ["--deepspeed_config", args.deepspeed_config]
            folder = ["--run_dir", str(variant.run.folder)]
            return [*launcher, str(PRETRAIN), str(variant.file), *machine, *folder]

        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, interrupt)
        try:
            run_all(found, command, say)
        except KeyboardInterrupt:
            say("stopped; the same command goes on from here")
            return 130
        say(compare(ablation, found))
        say(f"also in {ablation.out / 'ablation.md'} and ablation.json")
        return 0
    return 2


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
