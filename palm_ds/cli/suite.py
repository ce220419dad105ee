"""`palm-ds suite`"""

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
    from palm_ds.train.sweeps.suite import Suite, SuiteRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("suite", metavar="SUITE", help="a YAML file with recipes and seeds")
    add("overrides", nargs="*", metavar="a.b=c", help="override keys of all recipes")
    add_runs(parser, "runs")


def run(args: argparse.Namespace) -> int:
    check_overrides(args.overrides)
    launcher = launcher_of(args.launcher)
    ds_config = find_ds_config(args.deepspeed_config)
    from palm_ds.runtime.deepspeed.ds_config import read_ds_config
    from palm_ds.train.sweeps.suite import read_suite, run_all, suite_runs
    from palm_ds.train.sweeps.suite_table import compare

    read_ds_config(ds_config)
    out = out_folder(args)
    runs = suite_runs(_with_shipped(read_suite(args.suite, args.overrides)), out)

    def command(member: SuiteRun) -> list[str]:
        option = ("--deepspeed_config", ds_config)
        rest = ("--run_dir", member.folder, *without_onnx(member.values))
        return command_of(launcher, "finetune", member.file, *option, *rest)

    failed: dict[str, str] = {}
    if not args.table:
        slots = slots_of(args.jobs, bool(args.launcher))
        with alone_in(out):
            failed = run_all(runs, command, slots)
    table = compare(runs, failed, out)
    show_table(args, table, out / "suite.json", "suite.json")
    return 1 if failed else 0


def _with_shipped(suite: Suite) -> Suite:
    """The suite, with the paths of the shipped recipes in it."""
    if isinstance(suite.recipes, dict):
        recipes = {name: find_recipe(text) for name, text in suite.recipes.items()}
    else:
        recipes = [find_recipe(text) for text in suite.recipes]
    template = find_recipe(suite.template) if suite.template else ""
    return replace(suite, recipes=recipes, template=template)


COMMAND = Command(
    name="suite",
    summary="Fine-tune on many data sets with several seeds; one table of medians and spread.",
    usage="SUITE --deepspeed_config FILE --out DIR [options] [a.b=c ...]",
    examples="""
palm-ds suite SUITE.yaml --deepspeed_config zero1_bf16.json --out runs/glue
palm-ds suite SUITE.yaml --deepspeed_config cpu.json --out DIR --jobs 2 optimizer.lr=3e-5
""",
    notes="""
SUITE, in its shortest form:  {seeds: 3, recipes: [finetune/rte.yaml, mine.yaml]}
Each run is a `palm-ds finetune` in its own process: one per device, or --jobs at a time on CPU. Run
it again to continue and to retry failed runs (exit code 1).""",
    interrupted=CONTINUES,
    add_arguments=add_arguments,
    run=run,
)

if __name__ == "__main__":
    COMMAND.start()
