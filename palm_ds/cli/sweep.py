"""`palm-ds sweep`"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from palm_ds.cli.command import CONTINUES, Command
from palm_ds.cli.options import check_overrides
from palm_ds.cli.runs import (
    add_runs,
    alone_in,
    command_of,
    out_folder,
    show_table,
    slots_of,
    without_onnx,
)
from palm_ds.cli.shipped import find_ds_config, find_recipe
from palm_ds.train.sweeps.subprocesses import launcher_of

if TYPE_CHECKING:
    from palm_ds.train.sweeps.search import Trial


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("sweep", metavar="SWEEP", help="a YAML file with a recipe, a metric and a search space")
    add("overrides", nargs="*", metavar="a.b=c", help="override keys of the recipe in all trials")
    add_runs(parser, "trials")


def run(args: argparse.Namespace) -> int:
    check_overrides(args.overrides)
    launcher = launcher_of(args.launcher)
    ds_config = find_ds_config(args.deepspeed_config)
    from palm_ds.runtime.deepspeed.ds_config import read_ds_config
    from palm_ds.train.sweeps.search import BEST, Search, report
    from palm_ds.train.sweeps.search_space import read_sweep, search_space

    read_ds_config(ds_config)
    sweep, out = read_sweep(args.sweep, args.overrides), out_folder(args)
    space = search_space(replace(sweep, recipe=find_recipe(sweep.recipe)), args.sweep)
    tabular = any(source.reads == "table" for source in space.recipe.sources.values())

    def command(trial: Trial) -> list[str]:
        option = ("--deepspeed_config", ds_config)
        module = "finetune" if tabular else "pretrain"
        rest = ("--run_dir", trial.folder, *without_onnx(space.recipe_values(trial.chosen)))
        return command_of(launcher, module, trial.file, *option, *rest)

    search = Search(space, out)
    if not args.table:
        slots = slots_of(args.jobs, bool(args.launcher))
        with alone_in(out):
            search.run(command, slots)
    table, best = report(search), out / BEST
    others = f"sweep.json; the best recipe: {best}" if best.is_file() else "sweep.json"
    show_table(args, table, out / "sweep.json", others)
    return 1 if search.failed else 0


COMMAND = Command(
    name="sweep",
    summary="Search for the best values of a recipe's keys with Optuna.",
    usage="SWEEP --deepspeed_config FILE --out DIR [options] [a.b=c ...]",
    examples="""
palm-ds sweep SWEEP.yaml --deepspeed_config zero1_bf16.json --out runs/sweep
palm-ds sweep SWEEP.yaml --deepspeed_config cpu.json --out DIR --jobs 2 optimizer.clip=0
""",
    notes="""
SWEEP, in its shortest form:  {recipe: mine.yaml, space: {optimizer.lr: [2.0e-5, 5.0e-5]}}
Each trial is a `palm-ds finetune` (or pretrain) in its own process: one per device, or --jobs at a
time on CPU. Run it again to continue. Needs optuna: pip install 'palm_ds[sweep]'.""",
    interrupted=CONTINUES,
    add_arguments=add_arguments,
    run=run,
)

if __name__ == "__main__":
    COMMAND.start()
