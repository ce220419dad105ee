"""A run as a job of a scheduler, and the scheduler's program.

job = ClusterJob(name="mine", program="finetune", recipe=..., ...)
scheduler = Slurm(template=...)     or Kubernetes
text = scheduler.filled(job); key = scheduler.submit(text); scheduler.follow(key, print)
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from palm_ds.common.errors import UserError

T = TypeVar("T")

MOST_LETTERS = 40
"""Of a name: Kubernetes makes host names of it."""


@dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """A run, and the number of machines for it."""

    name: str
    command: str
    """pretrain or finetune."""
    recipe: str
    """Path of the recipe where the job runs."""
    ds_config: str
    """Path of the DeepSpeed file there."""
    run_dir: str
    overrides: Sequence[str] = ()
    """`a.b=c`, as on a command line."""
    nodes: int | None = None
    gpus: int | None = None
    """GPUs of each machine; None, as for `nodes`: those of the shipped file."""

    @property
    def program(self) -> str:
        """The argument of DeepSpeed's launcher, with or without a clone of the project."""
        return f"--module palm_ds.cli.{self.command}"


class ClusterScheduler(ABC):
    """A scheduler that runs jobs; `key` is its name for one."""

    unknown_job: ClassVar[str]
    """What its program says of a job that it does not know."""
    pause: float
    """Seconds between two looks at a job."""
    patience: ClassVar[float] = 600.0
    """Seconds that it may take to answer again."""

    @abstractmethod
    def filled(self, job: ClusterJob) -> str:
        """The shipped file with the job's settings."""

    @abstractmethod
    def submit(self, text: str) -> str:
        """Hand in a filled file; returns the job's key. Raises UserError."""

    @abstractmethod
    def follow(self, key: str, show: Callable[[str], None]) -> int:
        """Pass the lines of the job's log to `show` until it has ended; returns 0, or the exit code
        of a job that failed. Raises UserError if there is no such job."""

    @abstractmethod
    def cancel(self, key: str) -> None:
        """End a job. It saves a checkpoint first. Raises UserError."""

    def until_answered(self, look: Callable[[], T], show: Callable[[str], None]) -> T:
        """What `look` returns; if the scheduler does not answer, as while it restarts, it is asked
        again, and `show` gets a line. Raises UserError for an unknown job, and after a while."""
        until, noted = time.monotonic() + self.patience, False
        while True:
            try:
                return look()
            except UserError as error:
                if self.unknown_job in str(error) or time.monotonic() > until:
                    raise
                if not noted:
                    show(f"note: {error}; asking again for up to {self.patience:.0f} s")
                noted = True
                time.sleep(self.pause)


def job_name(text: str) -> str:
    """A name that both schedulers take: lower-case letters, digits and single hyphens.

    >>> job_name("ERNIE2_en base")
    'ernie2-en-base'
    """
    name = re.sub(r"[^a-z0-9]+", "-", text.lower())[:MOST_LETTERS].strip("-")
    if not re.match("[a-z]", name):  # a host name; Kubernetes's services begin with a letter
        raise UserError(f"name {text!r}: must begin with a letter, such as `mine-1`")
    return name


def called(words: Sequence[str], text: str | None = None) -> str:
    """The output of a scheduler's program, given a text on standard input. Raises UserError with
    its last line if it fails, or is not there."""
    _check_program(words[0])
    done = subprocess.run(words, input=text, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise UserError(f"{words[0]}: {said[-1]}")
    return done.stdout


def lines_of(words: Sequence[str]) -> Iterator[str]:
    """The lines that a program prints, as it prints them; it ends with the loop over them."""
    _check_program(words[0])
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, errors="replace") as program:
        assert program.stdout is not None
        try:
            for line in program.stdout:
                yield line.rstrip("\n")
        finally:
            program.terminate()


def _check_program(name: str) -> None:
    if shutil.which(name) is None:
        raise UserError(
            f"{name}: no such program on PATH; submit from a machine that has it, or give --print"
        )
