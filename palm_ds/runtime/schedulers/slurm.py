"""Slurm: launch/slurm/pretrain.sbatch filled in, by sbatch, scontrol and scancel.

A job that runs out of time, or loses a node, is queued again under its number, and its log is
continued, so that following it continues too.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from palm_ds.common.errors import FAILED, UserError
from palm_ds.runtime.schedulers.job import ClusterJob, ClusterScheduler, called

_WAITING = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING", "REQUEUED", "RESIZING")
_OTHER_MEMORY = {"mem-per-cpu", "mem-per-gpu"}  # sbatch refuses them beside --mem
_BEGIN = "set -euo pipefail\n"


@dataclass(frozen=True, kw_only=True)
class Slurm(ClusterScheduler):
    """Slurm's programs on this machine, and the shipped file."""

    unknown_job = "Invalid job id"
    template: str
    options: Mapping[str, str] = field(default_factory=dict)
    """Further options of sbatch: {"partition": "gpu"}."""
    pause: float = 2.0

    def filled(self, job: ClusterJob) -> str:
        options = {"job-name": job.name, "nodes": job.nodes, "gpus-per-node": job.gpus}
        text = self.template
        if _OTHER_MEMORY & self.options.keys():
            text = re.sub(r"^#SBATCH --mem .*\n", "", text, flags=re.M)
        for name, value in {**options, **self.options}.items():
            if value is not None:
                text = _with_directive(text, name, str(value))
        arguments = [job.recipe, job.ds_config, job.run_dir, *job.overrides]
        begin = [f"set -- {shlex.join(arguments)}", f"PROGRAM={shlex.quote(job.program)}"]
        return text.replace(_BEGIN, _BEGIN + "\n".join(begin) + "\n", 1)

    def submit(self, text: str) -> str:
        return called(["sbatch", "--parsable"], text).strip().partition(";")[0]  # ;cluster

    def follow(self, key: str, show: Callable[[str], None]) -> int:
        read, about = 0, self._about(key)
        while True:
            state, log = about["JobState"], Path(about["StdOut"])
            waits = state in _WAITING
            text = _new_text(log, read)
            done = text if not waits else text[: text.rfind("\n") + 1]
            for line in done.splitlines():
                show(line)
            read += len(done.encode("utf-8", "surrogateescape"))
            if not waits:
                return _exit_code(state, about.get("ExitCode", ""))
            time.sleep(self.pause)
            about = self.until_answered(partial(self._about, key), show)

    def cancel(self, key: str) -> None:
        called(["scancel", key])

    def _about(self, key: str) -> dict[str, str]:
        """Slurm's facts about a job. Raises UserError if it knows none of this number."""
        said = called(["scontrol", "show", "job", key])
        log = re.search(r"\bStdOut=(.*)$", said, re.M)  # at the end of a line; may have spaces
        found = dict(re.findall(r"(\w+)=(\S*)", said))
        if "JobState" not in found or log is None:
            raise UserError(f"scontrol: knows no job {key}")
        return {**found, "StdOut": log[1]}


def _with_directive(text: str, name: str, value: str) -> str:
    """With `#SBATCH --name=value` in place of the shipped one, or after the others. sbatch would
    read the value of --exclusive and of --nice, which need none, only after the sign."""
    line = f"#SBATCH --{name}={shlex.quote(value)}" if value else f"#SBATCH --{name}"
    changed, count = re.subn(
        rf"^#SBATCH --{re.escape(name)}(?![\w-]).*$", lambda _: line, text, flags=re.M
    )
    return changed if count else text.replace(_BEGIN, f"{line}\n{_BEGIN}", 1)


def _new_text(log: Path, read: int) -> str:
    """The text of a log after this number of bytes; empty if it is not there yet."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(read)
        return file.read().decode("utf-8", "surrogateescape")


def _exit_code(state: str, code: str) -> int:
    """0 of a completed job, else the exit code of its script (`code`:signal), or FAILED."""
    if state == "COMPLETED":
        return 0
    number = code.partition(":")[0]
    return int(number) if number.isdigit() and int(number) else FAILED
