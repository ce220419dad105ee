"""`palm-ds ablate`"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from palm_ds.cli.command import CONTINUES, Command
from palm_ds.cli.options import (
    add_ds_config,
    add_recipe,
    check_overrides,
    list_of_names,
    local_path,
)
from palm_ds.cli.runs import add_launcher, alone_in, command_of, show_table, without_onnx
from palm_ds.cli.shipped import find_ds_config, find_recipe
from palm_ds.train.sweeps.subprocesses import launcher_of

if TYPE_CHECKING:
    from palm_ds.train.sweeps.ablation import Variant


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser, "a YAML file, or a shipped one; its task groups are scheduled")
    add_ds_config(parser)
    add = parser.add_argument
    add(
        "--out",
        required=True,
        type=local_path,
        metavar="DIR",
        help="folder for all runs and the table",
    )
    add(
        "--schedules",
        default="sequential,joint,continual",
        metavar="A,B",
        help="which of sequential, joint, continual, alternate to run (the first three)",
    )
    always = "run each schedule a second time, with TASK in every task group"
    add("--always", default="", metavar="TASK", help=always)
    add("--steps", default="", metavar="N", help="steps of each task group (as in the recipe)")
    add_launcher(parser)


def run(args: argparse.Namespace) -> int:
    check_overrides(args.overrides)
    launcher = launcher_of(args.launcher)
    recipe, ds_config = find_recipe(args.recipe), find_ds_config(args.deepspeed_config)
    from palm_ds.runtime.deepspeed.ds_config import read_ds_config
    from palm_ds.train.sweeps.ablation import Ablation, compare, run_all, variants

    ablation = Ablation(
        recipe=Path(recipe),
        ds_config=read_ds_config(ds_config),
        out=Path(args.out),
        overrides=args.overrides,
        schedules=list_of_names(args.schedules),
        always=args.always,
        steps=args.steps,
    )
    schedules = variants(ablation)

    def command(variant: Variant) -> list[str]:
        option = ("--deepspeed_config", ds_config)
        rest = ["--run_dir", variant.run.folder, *without_onnx(variant.values)]
        rest += ["--quiet"] if args.json or args.quiet else []  # its output is this command's
        return command_of(launcher, "pretrain", variant.file, *option, *rest)

    with alone_in(ablation.out):
        run_all(schedules, command)
    table = compare(ablation, schedules)
    show_table(args, table, ablation.out / "ablation.json", "ablation.json")
    return 0


COMMAND = Command(
    name="ablate",
    summary="Train one recipe under several schedules with equal budgets, and compare the results.",
    usage="RECIPE --deepspeed_config FILE --out DIR [options] [a.b=c ...]",
    examples="""
palm-ds ablate RECIPE.yaml --deepspeed_config cpu.json --out runs/ablation
palm-ds ablate RECIPE.yaml --deepspeed_config FILE --out DIR optimizer.lr=1e-4 \\
    --launcher "deepspeed --num_gpus 8" --schedules continual,alternate \\
    --always knowledge_masking --steps 2000
""",
    notes="Each run is a `palm-ds pretrain` in its own process. Run it again to continue.",
    interrupted=CONTINUES,
    add_arguments=add_arguments,
    run=run,
)

if __name__ == "__main__":
    COMMAND.start()
