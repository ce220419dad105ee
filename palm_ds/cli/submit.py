"""`palm-ds submit`"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palm_ds.cli.command import Command, Ended
from palm_ds.cli.options import check_overrides, local_path
from palm_ds.cli.output import console_of, show, summarize
from palm_ds.common.errors import UserError
from palm_ds.common.messages import print_error

if TYPE_CHECKING:
    from palm_ds.runtime.schedulers.job import ClusterJob, ClusterScheduler

DETACHED = 130  # as a program that was interrupted; the job continues
_IN_CONFIG_MAP = "recipe.yaml", "ds_config.json"
_OF_SUBMISSION = (
    *("deepspeed_config", "run_dir", "nodes", "gpus", "name", "image", "claim"),
    *("print_only", "detach"),
)
"""Options that are of no use for a job that was submitted."""
_MISSING = {
    "RECIPE": "name the recipe to train",
    "--deepspeed_config": "name the DeepSpeed file (`palm-ds recipes` lists the shipped ones)",
    "--run_dir": "name the folder for all output, where the job runs",
    "--image": "name the image that the pods run (the Dockerfile makes it)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    recipe = "a YAML file, or the name of a shipped one"
    add("recipe", nargs="?", metavar="RECIPE", help=recipe)
    overrides = "override keys of the recipe: optimizer.lr=1e-4"
    add("overrides", nargs="*", metavar="a.b=c", help=overrides)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--slurm", action="store_true", help="submit with sbatch")
    where.add_argument("--kubernetes", action="store_true", help="submit with kubectl")
    machine = "a DeepSpeed file, or the name of a shipped one"
    add("--deepspeed_config", metavar="FILE", help=machine)
    run_dir = "folder for all output, on the cluster"
    add("--run_dir", type=local_path, metavar="DIR", help=run_dir)
    add("--nodes", type=int, metavar="N", help="number of machines (2)")
    add("--gpus", type=int, metavar="N", help="GPUs per machine (8)")
    add("--name", metavar="NAME", help="name of the job (the recipe's)")
    option = "option of sbatch (partition) or kubectl (namespace, context); repeatable"
    add("--option", action="append", default=[], metavar="KEY=VALUE", help=option)
    image = "kubernetes: the container image, built from the Dockerfile"
    add("--image", default="", metavar="IMAGE", help=image)
    claim = "kubernetes: the volume claim mounted at /data (palm-ds-data)"
    add("--claim", default="", metavar="NAME", help=claim)
    add("--print", dest="print_only", action="store_true", help="print the filled-in file and stop")
    add("--detach", action="store_true", help="do not follow the log")
    add("--follow", metavar="JOB", help="follow the log of a submitted job")
    add("--cancel", metavar="JOB", help="cancel a submitted job; it saves a checkpoint first")


def run(args: argparse.Namespace) -> int:
    if args.follow or args.cancel:
        _check_submitted(args)
    scheduler = _scheduler(args)
    if args.cancel:
        scheduler.cancel(args.cancel)
        summarize(args, {"job": args.cancel, "cancelled": True}, f"job {args.cancel} is cancelled")
        return 0
    key = args.follow or ""
    if not key:
        text = scheduler.filled(_job(args))
        if args.print_only:
            show(args, {"file": text}, text.rstrip("\n"))
            return 0
        key = scheduler.submit(text)
        summarize(args, {"job": key}, f"submitted as job {key}")
    return 0 if args.detach else _follow(args, scheduler, key)


def _check_submitted(args: argparse.Namespace) -> None:
    """Raises UserError for what only a job to submit can be given, and for --follow and --cancel
    together."""
    name = "follow" if args.follow else "cancel"
    given = [args.recipe] if args.recipe else []
    given += [f"--{x.removesuffix('_only')}" for x in _OF_SUBMISSION if getattr(args, x)]
    given += ["--cancel"] if args.follow and args.cancel else []
    if given:
        raise UserError(f"--{name}: the job is already submitted; remove {given[0]}")


def _follow(args: argparse.Namespace, scheduler: ClusterScheduler, key: str) -> int:
    """Until the job ends, or a signal; after Ctrl-C it is cancelled on request."""
    how = "--slurm" if args.slurm else "--kubernetes"
    log = sys.stderr if args.json else sys.stdout
    try:
        code = scheduler.follow(key, partial(print, file=log, flush=True))
    except KeyboardInterrupt as stop:
        ended = isinstance(stop, Ended)  # nobody waits for a question
        if not ended and _confirmed(f"cancel job {key}? [y/N] "):
            scheduler.cancel(key)
            print_error(f"job {key} is cancelled")
            return DETACHED
        again = f"palm-ds submit {how} --follow {key}  (or --cancel {key})"
        print_error(f"job {key} continues: {again}")
        if ended:
            raise
        return DETACHED
    if code:
        console_of(args).print(f"job {key} failed with code {code}")
    return code


def _confirmed(question: str) -> bool:
    """Whether the user says yes; no where nobody can be asked."""
    if sys.stdin is None or not sys.stdin.isatty():
        return False
    print(f"\n{question}", end="", file=sys.stderr, flush=True)
    try:
        return sys.stdin.readline().strip().lower() in ("y", "yes")
    except KeyboardInterrupt:
        return False


def _scheduler(args: argparse.Namespace) -> ClusterScheduler:
    from palm_ds.cli.shipped import cluster_file
    from palm_ds.runtime.schedulers.kubernetes import Kubernetes
    from palm_ds.runtime.schedulers.slurm import Slurm

    options = dict(_pair(text) for text in args.option)
    if args.slurm:
        for name in ("image", "claim"):
            if getattr(args, name):
                raise UserError(f"--{name}: Slurm runs no containers; remove it")
        return Slurm(template=cluster_file("slurm/pretrain.sbatch"), options=options)
    files = {} if args.cancel or args.follow else _files(args)
    return Kubernetes(
        template=cluster_file("k8s/pretrain.yaml"),
        image=args.image,
        claim=args.claim,
        files=files,
        options=options,
    )


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (equals and re.fullmatch("[a-zA-Z][a-zA-Z-]*", key.strip().lstrip("-"))):
        raise UserError(f"--option {text!r}: expected KEY=VALUE, such as partition=gpu")
    if not value.isprintable():  # the next line of the file would be a command
        raise UserError(f"--option {text!r}: has a line break or control character in its value")
    return key.strip().lstrip("-"), value


def _files(args: argparse.Namespace) -> dict[str, str]:
    """The files of the ConfigMap."""
    return {name: _text_of(path) for name, path in zip(_IN_CONFIG_MAP, _paths(args), strict=True)}


def _text_of(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot be read as text: {error}") from None


def _paths(args: argparse.Namespace) -> tuple[Path, Path]:
    """Recipe and DeepSpeed file. Raises UserError if one is not given or not there."""
    from palm_ds.cli.shipped import find_ds_config, find_recipe

    missing = [
        name
        for name, value in (
            ("RECIPE", args.recipe),
            ("--deepspeed_config", args.deepspeed_config),
            ("--run_dir", args.run_dir),
            ("--image", args.image or not args.kubernetes),
        )
        if not value
    ]
    if missing:
        raise UserError(f"palm-ds submit: {missing[0]}: missing; {_MISSING[missing[0]]}")
    return Path(find_recipe(args.recipe)), Path(find_ds_config(args.deepspeed_config))


def _check_sizes(args: argparse.Namespace) -> None:
    least = 0 if args.slurm else 1  # on Slurm's nodes without GPUs, a process each
    if args.nodes is not None and args.nodes < 1:
        raise UserError(f"--nodes: expected a number above 0, got {args.nodes}")
    if args.gpus is not None and args.gpus < least:
        raise UserError(f"--gpus: expected {least} or more, got {args.gpus}")


def _job(args: argparse.Namespace) -> ClusterJob:
    """The job, after a look at its files: a mistake is an error before the job waits in a queue."""
    from palm_ds.runtime.deepspeed.ds_config import read_ds_config
    from palm_ds.runtime.schedulers.job import ClusterJob, job_name
    from palm_ds.runtime.schedulers.kubernetes import FOLDER

    recipe, machine = _paths(args)
    check_overrides(args.overrides)
    _check_sizes(args)
    values = _checked(args, recipe)
    read_ds_config(machine)
    paths = (
        [f"{FOLDER}/{name}" for name in _IN_CONFIG_MAP]
        if args.kubernetes
        else [str(recipe.resolve()), str(machine.resolve())]
    )
    return ClusterJob(
        name=job_name(args.name or recipe.stem),
        command="finetune" if _reads_tables(values) else "pretrain",
        recipe=paths[0],
        ds_config=paths[1],
        run_dir=str(args.run_dir),
        overrides=args.overrides,
        nodes=args.nodes,
        gpus=args.gpus,
    )


def _reads_tables(values: Mapping[str, Any]) -> bool:
    """Whether a source is a table; the values may be of a recipe that only the job checks."""
    sources = values.get("sources")
    each = sources.values() if isinstance(sources, Mapping) else ()
    return any(isinstance(source, Mapping) and "table" in source for source in each)


def _checked(args: argparse.Namespace, file: Path) -> dict[str, Any]:
    """The recipe's values. Where its weights are not here, it is checked when the job starts."""
    from palm_ds.train.recipe.recipe import make_recipe, read_values

    values = read_values(file, args.overrides)
    start = values.get("init_from")
    if start and not Path(str(start)).exists():
        line = f"note: init_from: {start} is not here, so the recipe is checked by the job"
        print(line, file=sys.stderr, flush=True)
    else:
        make_recipe(values, str(file))
    return values


COMMAND = Command(
    name="submit",
    summary="Submit a run to Slurm or Kubernetes, and follow its log.",
    usage="--slurm|--kubernetes RECIPE --deepspeed_config FILE --run_dir DIR [options]",
    examples="""
palm-ds submit --slurm mine.yaml --deepspeed_config zero1_bf16.json --run_dir runs/mine --nodes 4
palm-ds submit --slurm mine.yaml --deepspeed_config FILE --run_dir DIR --option partition=gpu
palm-ds submit --kubernetes mine.yaml --deepspeed_config FILE --run_dir /data/mine --image IMAGE
palm-ds submit --slurm --follow 1234                             # --cancel 1234
""",
    notes="""
Fills in the shipped launch/slurm/pretrain.sbatch or launch/k8s/pretrain.yaml (--print shows it) and
hands it to `sbatch` or `kubectl`. Ctrl-C asks whether to cancel the job; without an answer the job
continues. The exit code is that of the job.""",
    add_arguments=add_arguments,
    run=run,
)

if __name__ == "__main__":
    COMMAND.start()
