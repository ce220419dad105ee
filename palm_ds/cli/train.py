"""Shared by `palm-ds pretrain` and `palm-ds finetune`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from palm_ds.cli.command import hint_next, typed
from palm_ds.cli.options import add_ds_config, add_recipe, check_overrides, local_path
from palm_ds.cli.output import console_of, show, summarize
from palm_ds.common.errors import UserError

if TYPE_CHECKING:
    from palm_ds.runtime.deepspeed.ds_config import DSConfig
    from palm_ds.runtime.processes.signals import StopFlag
    from palm_ds.train.loop.profiler import ProfileSettings
    from palm_ds.train.recipe.recipe import Recipe

USAGE = "RECIPE --deepspeed_config FILE [options] [a.b=c ...]"
NOTES = """
If the run folder has a checkpoint, training continues from it. RECIPE and FILE may name shipped
files (`palm-ds recipes`)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    add_ds_config(parser, required=False)  # but to --print_config
    add = parser.add_argument
    add("--run_dir", type=local_path, metavar="DIR", help="folder for all output (runs/RECIPE)")
    add("--init_from", metavar="PATH", help="start from the weights of this run or checkpoint")
    add(
        "--extend",
        metavar="RUN",
        help="continue this run's weights, optimizer and data with an added task or corpus",
    )
    add(
        "--check",
        dest="dry_run",
        action="store_true",
        help="check everything and benchmark the hosts, without training",
    )
    add(
        "--plan",
        metavar="GPUS",
        help="check, and predict memory and step time on other hardware: '64 x H100, 400 Gb/s'",
    )
    add(
        "--profile",
        type=int,
        metavar="N",
        help="trace N steps, after a few warm-up steps, to profile/ in the run folder",
    )
    add("--profile_memory", action="store_true", help="with --profile: trace allocations too")
    all_ranks = "with --profile: trace every process, not only rank 0"
    add("--profile_all_ranks", action="store_true", help=all_ranks)
    add("--print_config", action="store_true", help="print every resolved setting and stop")
    add("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)  # from the launcher


def run(args: argparse.Namespace, following: Sequence[str]) -> int:
    """Train a recipe; returns the exit code. `following`: commands to suggest for the finished
    {run}. Raises UserError."""
    from palm_ds.runtime.processes import rank_status
    from palm_ds.runtime.processes.signals import stop_signals

    if "RANK" in os.environ:
        rank_status.report()  # `palm-ds run` knows of this process from now on
    with stop_signals(starting=True) as flag:
        return _train(args, following, flag)


def _train(args: argparse.Namespace, following: Sequence[str], flag: StopFlag) -> int:
    from palm_ds.cli.shipped import find_ds_config, find_recipe
    from palm_ds.runtime.processes.launchers import check_hostfile

    check_hostfile()
    check_overrides(args.overrides)
    recipe_file = find_recipe(args.recipe)
    if not (args.deepspeed_config or args.print_config):
        raise UserError("--deepspeed_config: name a DeepSpeed file; `palm-ds recipes` lists some")
    ds_file = find_ds_config(args.deepspeed_config) if args.deepspeed_config else ""

    from palm_ds.inference import trained_model
    from palm_ds.runtime.deepspeed.ds_config import read_ds_config
    from palm_ds.train.plan.cluster import parse_clusters
    from palm_ds.train.recipe.recipe import read_recipe
    from palm_ds.train.setup.run_folder import RunSpec
    from palm_ds.train.train import train

    plan_for = parse_clusters(args.plan) if args.plan is not None else []
    dry_run, profile = args.dry_run or bool(plan_for), _profile(args)
    recipe = read_recipe(recipe_file, _overrides(args))
    if args.print_config:
        return _show_config(recipe, read_ds_config(ds_file) if ds_file else None, args)
    folder = Path(args.run_dir or Path("runs") / Path(recipe_file).stem)
    run = RunSpec(recipe=recipe, ds_config=read_ds_config(ds_file), folder=folder)
    code = train(
        run,
        flag=flag,
        dry_run=dry_run,
        plan_for=plan_for,
        examples=trained_model.examples,
        profile=profile,
        console=console_of(args, width=140) if args.json or args.quiet else None,
    )
    if os.environ.get("RANK", "0") == "0":
        summarize(args, _record(folder, code, dry_run=dry_run))
    if not code and not dry_run and (folder / "weights").is_dir():
        hint_next(*(line.format(run=typed(folder)) for line in following))
    return code


def _show_config(recipe: Recipe, ds_config: DSConfig | None, args: argparse.Namespace) -> int:
    """The recipe, and what DeepSpeed gets if its file is given."""
    import yaml

    from palm_ds.train.setup.resolve import resolve
    from palm_ds.train.setup.run_folder import complete_config

    recipe = resolve(recipe)
    values = recipe.resolved()
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    config = complete_config(recipe, ds_config) if ds_config else None
    lines = [] if config is None else [json.dumps(config, indent=1)]
    show(args, {"recipe": values, "deepspeed": config}, text, recipe.plan_table(), *lines)
    return 0


def _record(folder: Path, code: int, *, dry_run: bool) -> dict[str, object]:
    """The state of a run after the command, with the scores of its last evaluation."""
    if dry_run:
        return {"run": folder, "checked": not code}
    from palm_ds.train.report.metrics_file import FILE, read_metrics

    metrics = read_metrics(folder / FILE)
    last = metrics.evaluations[-1]["scores"] if metrics.evaluations else {}
    names = ("loss", "accuracy", "metrics")
    scores = {task: {name: score.get(name) for name in names} for task, score in last.items()}
    step = metrics.steps[-1]["step"] if metrics.steps else 0
    return {"run": folder, "finished": not code, "step": step, "scores": scores}


def _overrides(args: argparse.Namespace) -> list[str]:
    """The overrides of the command line, and the options that are recipe keys."""
    given = {"init_from": args.init_from, "extend": args.extend}
    # quoted: YAML would read 2026-11-29 as a date, and a # as a comment
    quoted = {key: json.dumps(value, ensure_ascii=False) for key, value in given.items() if value}
    return [*args.overrides, *(f"{key}={value}" for key, value in quoted.items())]


def _profile(args: argparse.Namespace) -> ProfileSettings | None:
    """Settings of the profiler, if anything is traced. Raises UserError."""
    from palm_ds.train.loop.profiler import ProfileSettings

    memory, all_ranks = args.profile_memory, args.profile_all_ranks
    if args.profile is None:
        if memory or all_ranks:
            raise UserError("--profile_memory and --profile_all_ranks: need --profile N")
        return None
    return ProfileSettings(steps=args.profile, memory=memory, all_ranks=all_ranks)
