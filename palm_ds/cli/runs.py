"""Shared by `palm-ds ablate` and `palm-ds suite`: the commands of their runs."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from pathlib import Path

from palm_ds.train.sweeps.subprocesses import interrupt


def add_launcher(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--launcher",
        default="",
        metavar="COMMAND",
        help='starts each run: "deepspeed --num_gpus 8", "torchrun ..." (python)',
    )


def command_of(launcher: Sequence[str], module: str, *arguments: object) -> list[str]:
    """The launcher's words, followed by a module of palm_ds.cli and its arguments."""
    deepspeed = any("deepspeed" in Path(word).name for word in launcher)
    option = "--module" if deepspeed else "-m"
    return [*launcher, option, f"palm_ds.cli.{module}", *map(str, arguments)]


def stop_on_signals() -> None:
    """SIGTERM and SIGHUP stop the runs as Ctrl-C does, unless they are ignored (`nohup`)."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)


def say(text: str) -> None:
    print(text, flush=True)
