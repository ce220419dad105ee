"""Checks the command line of DeepSpeed's launcher, a parent of this process.

`deepspeed --hostfile FILE` with a FILE that does not exist trains on this machine alone, after a
warning in its log. The launcher tells its processes nothing about it, but its command line and
working directory can be read. If they cannot, nothing is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import psutil

from palm_ds.common.errors import UserError
from palm_ds.runtime.processes.launch_env import deepspeed_launchers


def check_hostfile() -> None:
    """Raises UserError if the launcher was given a hostfile that does not exist."""
    for launcher in deepspeed_launchers():
        try:
            line, folder = launcher.cmdline(), Path(launcher.cwd())
        except (psutil.Error, OSError):
            continue
        name = hostfile_of(line)
        if name and not (folder / name).is_file():
            raise UserError(
                f"--hostfile {name}: no such file; deepspeed would train on this machine alone. "
                "Correct the name, or leave out --hostfile"
            )


def hostfile_of(line: Sequence[str]) -> str | None:
    """The value of `deepspeed`'s --hostfile, -H or an abbreviation."""
    for word, following in zip(line, [*line[1:], ""], strict=True):
        option, equals, value = word.partition("=")
        if len(option) > 3 and "--hostfile".startswith(option):
            return value if equals else following
        if word.startswith("-H"):
            return word[2:].removeprefix("=") or following
    return None
