"""Shared by `palm-ds ablate`, `suite` and `sweep`: the options and commands of their runs."""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from palm_ds.cli.interrupts import between_imports
from palm_ds.cli.options import add_ds_config, local_path
from palm_ds.cli.output import show
from palm_ds.common.errors import UserError, suggest_path
from palm_ds.train.sweeps.subprocesses import interrupt


def add_launcher(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--launcher",
        default="",
        metavar="COMMAND",
        help='command that starts each run: "deepspeed --num_gpus 8", "torchrun ..." (python)',
    )


def add_runs(parser: argparse.ArgumentParser, called: str) -> None:
    """The options of a command with many runs and a table. `called`: what it calls the runs."""
    add = parser.add_argument
    add_ds_config(parser)
    add(
        "--out",
        required=True,
        type=local_path,
        metavar="DIR",
        help=f"folder for all {called} and the table",
    )
    add("--jobs", type=int, default=0, metavar="N", help=f"concurrent {called} on CPU (1)")
    add("--table", action="store_true", help="show the table without running anything")
    add_launcher(parser)


def out_folder(args: argparse.Namespace) -> Path:
    """`--out` of a command with many runs. Raises UserError if its table is asked for and it does
    not exist."""
    if args.table and not Path(args.out).is_dir():
        raise UserError(f"--out {args.out}: no such folder{suggest_path(args.out)}")
    return Path(args.out)


def command_of(launcher: Sequence[str], module: str, *arguments: object) -> list[str]:
    """The launcher's words, followed by a module of palm_ds.cli and its arguments."""
    deepspeed = any("deepspeed" in Path(word).name for word in launcher)
    option = "--module" if deepspeed else "-m"
    return [*launcher, option, f"palm_ds.cli.{module}", *map(str, arguments)]


def without_onnx(values: Mapping[str, Any]) -> list[str]:
    """Overrides for one of many runs, which writes no hf/onnx/ unless its recipe asks for it."""
    return [] if "export_onnx" in values else ["export_onnx=[]"]


def slots_of(jobs: int, shared: bool) -> list[dict[str, str]]:
    """The environments of the runs that share the machine: one per device; on CPU, one per job with
    its share of the cores; a single one if a launcher gives each run all devices."""
    from palm_ds.runtime.processes.processes import accelerator

    device = accelerator()
    if jobs < 0:
        raise UserError(f"--jobs {jobs}: expected a number of runs")
    if shared:
        if jobs > 1:
            raise UserError(
                f"--jobs {jobs}: the launcher gives each run all devices, so that they run one "
                "after another; remove it"
            )
        return [{}]
    if device.device_name() == "cpu":
        jobs = jobs or 1
        cores = str(max((os.cpu_count() or 1) // jobs, 1))
        return [{} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": cores}] * jobs
    if jobs:
        raise UserError("--jobs: only for CPU; on GPUs there is one run per device")
    names = device.visible_devices_envs()
    visible = os.environ.get(names[0], "")
    ids = visible.split(",") if visible else [str(i) for i in range(device.device_count())]
    return [dict.fromkeys(names, each) for each in ids]


@contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """While a folder's runs are made: no other command makes runs there, and SIGUSR1, a warning of
    batch systems, stops them as Ctrl-C does. Raises UserError."""
    from palm_ds.runtime.processes.process_group import SINGLE_PROCESS
    from palm_ds.runtime.processes.run_lock import lock_run_folder

    stop_on_signals(signal.SIGUSR1)
    lock = lock_run_folder(out, group=SINGLE_PROCESS)
    try:
        yield
    finally:
        lock.release()


def stop_on_signals(*numbers: signal.Signals) -> None:
    """These do what Ctrl-C does, unless ignored (`nohup`)."""
    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, between_imports(interrupt))


def show_table(args: argparse.Namespace, table: str, file: Path, others: str) -> None:
    """Print a table that is also in `file`, as JSON, and in others next to it."""
    where = [] if args.quiet else [f"also in {file.with_suffix('.md')} and {others}"]
    show(args, json.loads(file.read_text(encoding="utf-8")), table, *where)
