"""Starts a run again and again until it is finished, stopped, or beyond help."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from palm_ds.common import errors
from palm_ds.common.errors import UserError
from palm_ds.common.files import hash_of_text, locked
from palm_ds.common.messages import counted, print_error, printable
from palm_ds.common.settings import Settings
from palm_ds.runtime.supervisor.attempt import Attempt, Outcome
from palm_ds.runtime.supervisor.command_line import RunCommand, understand
from palm_ds.runtime.supervisor.messages import TimeLimits

_MAX_PAUSE = 60.0
_REPEAT_SECONDS = 2.0
"""Seconds after which a second signal means: now."""


@dataclass(frozen=True, kw_only=True)
class Supervision(Settings, option="--"):
    """Settings for starting a run again: how often and where."""

    restarts: NonNegativeInt = 5
    """In a row without a new checkpoint; one that is made resets the count. 0: never."""
    min_hosts: PositiveInt = 1
    silence: PositiveFloat = TimeLimits().silence
    """Seconds without a sign of life after which a host is lost."""
    ssh: str = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=10"


@dataclass
class _Stop:
    """Stop that signals have asked for."""

    urgency: int = 0
    since: float = 0.0

    def handle(self, number: int, frame: FrameType | None) -> None:
        if not self.urgency:
            self.urgency, self.since = 1, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self.since > _REPEAT_SECONDS:
            self.urgency = 2


def supervise(words: Sequence[str], settings: Supervision) -> int:
    """Run a command to its end; returns the exit code (common/errors.py). Raises UserError."""
    command = understand(words)
    hosts = max(len(command.slots), 1)
    if settings.min_hosts > hosts:
        raise UserError(f"--min_hosts {settings.min_hosts}: the run has {counted(hosts, 'host')}")
    ssh = _ssh(settings) if len(command.slots) > 1 else ()
    if command.only_checks:
        settings = replace(settings, min_hosts=hosts, restarts=0)
    name = _name_of(words)
    stop = _Stop()
    with _only_one(name), _signals(stop):
        return _Supervisor(command, name, settings, ssh, stop).run()


@dataclass
class _Supervisor:
    command: RunCommand
    name: str
    settings: Supervision
    ssh: Sequence[str]
    stop: _Stop
    failures: int = 0
    """In a row, without a new checkpoint."""
    saved: int = 0
    most_hosts: int = 0

    def run(self) -> int:
        while True:
            outcome = self._attempt()
            if (code := self._final(outcome)) is not None:
                return code
            self._count(outcome)
            if self.failures > self.settings.restarts or not self.settings.restarts:
                return self._give_up(outcome)
            pause = min(2.0 ** (self.failures - 1), _MAX_PAUSE) if self.failures else 1.0
            number = f"restart {max(self.failures, 1)} of {self.settings.restarts}"
            self._say(f"{outcome.reason}; {number} in {pause:g} s")
            self._sleep(pause)
            if self.stop.urgency:
                return errors.STOPPED

    def _attempt(self) -> Outcome:
        attempt = Attempt(
            command=self.command,
            name=self.name,
            ssh=self.ssh,
            stopping=lambda: self.stop.urgency,
            limits=TimeLimits(self.settings.silence),
        )
        try:
            return self._on_answering_hosts(attempt)
        finally:
            attempt.close()

    def _on_answering_hosts(self, attempt: Attempt) -> Outcome:
        asked = list(self.command.slots)
        answers = attempt.connect()
        missing = [host for host in asked if host not in answers]
        if attempt.killed:
            self._say(f"killed {counted(attempt.killed, 'process')} left by an earlier start")
        if self.stop.urgency:
            return Outcome(code=errors.STOPPED, reason="", saved=-1, hosts=0)
        if len(answers) < self.settings.min_hosts:
            reason = f"{', '.join(missing) or 'this machine'}: no answer"
            return Outcome(code=errors.FAILED, reason=reason, saved=-1, hosts=0)
        if missing:
            self._say(f"continues without {', '.join(missing)}: no answer")
        return attempt.run()

    def _final(self, outcome: Outcome) -> int | None:
        """The exit code if there is nothing to start again."""
        if outcome.code == errors.MISTAKE and 0 < outcome.hosts < self.most_hosts:
            return None  # it cannot be divided among fewer hosts: wait for the others
        if outcome.code in errors.FINAL:
            return outcome.code
        if self.stop.urgency:
            if not outcome.began:
                return errors.STOPPED  # before its processes had done anything
            if outcome.code != errors.STOPPED:
                self._say(f"stopped, but {outcome.reason}; the last checkpoint stays")
            return outcome.code
        return None

    def _count(self, outcome: Outcome) -> None:
        self.most_hosts = max(self.most_hosts, outcome.hosts)
        progress = outcome.saved > max(self.saved, outcome.resumed)
        self.failures = 0 if progress else self.failures + 1
        self.saved = max(self.saved, outcome.saved)

    def _give_up(self, outcome: Outcome) -> int:
        if outcome.code == errors.STOPPED:
            self._say(outcome.reason)
            return outcome.code
        where = f"; the last checkpoint is of step {self.saved}" if self.saved > 0 else ""
        tries = self.settings.restarts
        text = f"given up after {counted(tries, 'restart')} without progress: " if tries else ""
        print_error(f"error: {text}{printable(outcome.reason)}{where}")
        return outcome.code

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.stop.urgency:
            time.sleep(0.1)

    def _say(self, text: str) -> None:
        print_error(f"palm-ds run: {printable(text)}")


def _ssh(settings: Supervision) -> list[str]:
    """The words that reach another host. Raises UserError."""
    try:
        words = shlex.split(settings.ssh)
    except ValueError as error:
        raise UserError(f"--ssh {settings.ssh}: {error}") from None
    if not words or shutil.which(words[0]) is None:
        raise UserError(f"--ssh {settings.ssh}: no such program to reach other hosts")
    return words


def _name_of(words: Sequence[str]) -> str:
    """The same for the same command in the same folder, so that a later `palm-ds run` finds what an
    earlier one has left running."""
    text = "\0".join([os.getcwd(), str(os.getuid()), *words])
    return hash_of_text(text)[:16]


@contextmanager
def _only_one(name: str) -> Iterator[None]:
    """Raises UserError if the same command is supervised already: it would be killed."""
    path = Path(tempfile.gettempdir()) / f"palm-ds-run-{name}.lock"
    with locked(path, busy="palm-ds run: this command already runs under palm-ds run"):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def _signals(stop: _Stop) -> Iterator[None]:
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup`
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, stop.handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            # batch systems repeat them while a process ends, and take its code from the signal
            signal.signal(number, signal.SIG_IGN if stop.urgency else handler)
