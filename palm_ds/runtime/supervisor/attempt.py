"""One start of a run on the hosts that answer, from the connection to the last process."""

from __future__ import annotations

import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from palm_ds.common import errors
from palm_ds.runtime.processes.rank_status import RankStatus
from palm_ds.runtime.supervisor.command_line import Place, RunCommand
from palm_ds.runtime.supervisor.messages import MessageReader, TimeLimits, send

_ANSWER = 25.0
"""Seconds that a host has to answer."""
_INTERRUPTED = 143
_FATAL_SIGNALS = {
    *(signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGKILL),
    *(signal.SIGSEGV, signal.SIGTERM),
}
"""Others are exit codes of their own: 255 is ssh's, not SIGHUP."""
_RANK_FIELDS = {item.name for item in fields(RankStatus)}


@dataclass
class Connection:
    """The agent of one host."""

    host: str
    process: subprocess.Popen[bytes]
    lines: MessageReader
    heard: float = field(default_factory=time.monotonic)
    hello: dict[str, Any] = field(default_factory=dict)
    ranks: list[RankStatus] = field(default_factory=list)
    lost_ranks: set[int] = field(default_factory=set)
    ended: int | None = None
    """The exit code of the host's command."""
    lost: bool = False
    out_of_memory: bool = False
    """Whether its kernel has killed a process for want of memory meanwhile."""

    @property
    def done(self) -> bool:
        return self.lost or self.ended is not None

    def tell(self, **message: object) -> None:
        assert self.process.stdin is not None
        send(self.process.stdin.fileno(), **message)

    def read(self) -> None:
        for message in self.lines.read():
            self.heard = time.monotonic()
            self.hello = message if "hello" in message else self.hello
            if "ranks" in message:
                self.ranks = [_rank(record) for record in message["ranks"]]
                self.lost_ranks = {r["rank"] for r in message["ranks"] if r["lost"]}
            self.ended = message.get("ended", self.ended)
            self.out_of_memory = message.get("out_of_memory", self.out_of_memory)
        if self.lines.closed and self.ended is None:
            self.lost = True

    @property
    def killed_by(self) -> str:
        """` by SIGKILL: ...`, as far as the exit code of the host's command tells; or nothing."""
        number = signal_in(self.ended or 0)
        by = f" by {signal.Signals(number).name}" if number else ""
        if self.out_of_memory and number in (0, signal.SIGKILL):
            return (
                f"{by}: out of memory, most likely (the kernel of {self._place} killed a process)"
            )
        return by

    @property
    def _place(self) -> str:
        return self.host or "this machine"

    def close(self) -> None:
        """End it and reap it. An agent that still runs sees the end of its input and ends the run
        on its host."""
        assert self.process.stdin
        self.process.stdin.close()
        try:
            self.process.wait(0 if self.lost else _ANSWER)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.lines.descriptor)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of a start."""

    code: int
    reason: str
    saved: int
    """The step of the last checkpoint; -1: unknown."""
    hosts: int
    resumed: int = 0
    """The step of the checkpoint that it continued from."""
    began: bool = True
    """Whether a training process has started."""


@dataclass
class Attempt:
    """A start under way. `stopping`: whether to stop; 1 with a checkpoint, 2 now."""

    command: RunCommand
    name: str
    ssh: Sequence[str]
    stopping: Callable[[], int]
    limits: TimeLimits = TimeLimits()
    connections: list[Connection] = field(default_factory=list)

    def connect(self) -> list[str]:
        """Reach every host; returns those that answer."""
        for host in self.command.slots or {"": ""}:
            self.connections.append(_connect(host, self.name, self.ssh, many=self._many))
        deadline = time.monotonic() + _ANSWER
        while time.monotonic() < deadline and not self.stopping():
            waiting = [c for c in self.connections if not c.hello and not c.lost]
            if not waiting:
                break
            self._listen(waiting)
        answering = [c for c in self.connections if c.hello and not c.lost]
        for silent in [c for c in self.connections if c not in answering]:
            silent.lost = True
            silent.close()
        self.connections = answering
        return [c.host for c in answering]

    @property
    def killed(self) -> int:
        """Number of processes of earlier starts that were found and killed."""
        return sum(c.hello.get("killed", 0) for c in self.connections)

    @property
    def _many(self) -> bool:
        return len(self.command.slots) > 1

    def run(self) -> Outcome:
        """Start the command on the connected hosts and wait until nothing of it runs."""
        hosts = [c.host for c in self.connections]
        first = self.connections[0].hello
        for number, connection in enumerate(self.connections):
            place = Place(number=number, address=first["hello"], port=first["port"])
            connection.tell(
                command=self.command.on(place),
                hosts=self.command.hosts_file(hosts) if self.command.slots else "",
                cwd=str(Path.cwd()),
                silence=self.limits.silence,
                env=self._variables(place),
            )
        self._wait()
        return self._outcome()

    def _variables(self, place: Place) -> dict[str, str]:
        port = {} if "MASTER_PORT" in os.environ else {"MASTER_PORT": str(place.port)}
        return {**port, **self.command.variables}

    def _wait(self) -> None:
        reported, urgency, deadline = 0.0, 0, float("inf")
        while running := [c for c in self.connections if not c.done]:
            self._listen(running)
            now = time.monotonic()
            if self.stopping() > urgency:
                urgency = self.stopping()
                self._tell(running, do="stop" if urgency == 1 else "kill")
            elif now - reported > self.limits.pause:
                reported = now
                self._tell(running, do="go on")
            for connection in running:
                connection.lost = connection.lost or now - connection.heard > self.limits.silence
            if any(c.lost or c.ended for c in self.connections):
                deadline = min(deadline, now + self.limits.others)
            if now > deadline:
                deadline = now + self.limits.others
                self._tell(running, do="kill")

    def _tell(self, connections: Sequence[Connection], **message: object) -> None:
        for connection in connections:
            connection.tell(**message)

    def _listen(self, connections: Sequence[Connection]) -> None:
        ready, _, _ = select.select([c.lines.descriptor for c in connections], [], [], 0.2)
        for connection in connections:
            if connection.lines.descriptor in ready:
                connection.read()

    def _outcome(self) -> Outcome:
        ranks = [rank for c in self.connections for rank in c.ranks]
        code = combined([rank.code for rank in ranks], [c.ended for c in self.connections])
        if code == errors.FINISHED and self.command.launcher >= 0 and not ranks:
            code = errors.FAILED  # of `deepspeed` whose inner process was killed
        return Outcome(
            code=code,
            reason=self._reason(ranks, code),
            saved=max((rank.saved for rank in ranks), default=-1),
            hosts=len(self.connections),
            resumed=max((rank.resumed for rank in ranks), default=0),
            began=bool(ranks),
        )

    def _reason(self, ranks: Sequence[RankStatus], code: int) -> str:
        """Cause of a failure, in one line: the host, the process, or what a process said."""
        if lost := [c.host for c in self.connections if c.lost]:
            if lost == [""]:
                return "the agent of this machine was killed"
            return f"{', '.join(lost)}: the host does not answer any more"
        killed = [(r, c) for c in self.connections for r in c.ranks if r.rank in c.lost_ranks]
        for rank, connection in killed:
            return f"{rank.name} (last step {rank.step}) was killed{connection.killed_by}"
        ends = [rank for rank in ranks if rank.code not in (0, errors.STOPPED)]
        for rank in sorted(ends, key=lambda rank: "rank " in rank.why):  # its own reason first
            if rank.why:
                mine = rank.why if rank.why.startswith("rank ") else f"{rank.name}: {rank.why}"
                return f"{mine} (exit code {rank.code})"
        if ends:
            return f"{ends[0].name} ended with exit code {ends[0].code}"
        if code == errors.STOPPED:
            return "its processes were asked to stop, or its launcher was killed"
        for connection in self.connections:
            if signal_in(connection.ended or 0):
                return f"the command was killed{connection.killed_by}"
        if not ranks and self.command.launcher >= 0:
            return "the launcher ended before its processes had started"
        return f"the command ended with exit code {code}"

    def close(self) -> None:
        for connection in self.connections:
            connection.close()


def signal_in(code: int) -> int:
    """The signal in the exit code of a command: -9 (it was killed itself), 137 (a shell's or
    mpirun's) or 247 (deepspeed's) for 9; 0: none."""
    return next((n for n in (-code, code - 128, 256 - code) if n in _FATAL_SIGNALS), 0)


def combined(ranks: Sequence[int | None], commands: Sequence[int | None]) -> int:
    """The exit code of a run, from those of its processes and, where these are unknown, of the
    commands that started them."""
    for code in (errors.MISTAKE, errors.NONFINITE):
        if code in ranks:
            return code
    known = list(ranks) or list(commands)
    if all(code == errors.FINISHED for code in known):
        return errors.FINISHED if None not in commands else errors.FAILED
    if all(code in (0, errors.STOPPED, _INTERRUPTED) for code in known):
        return errors.STOPPED
    if errors.WATCHDOG in known:
        return errors.WATCHDOG
    if not ranks and len(set(known)) == 1 and (known[0] or 0) > 0:
        return known[0] or errors.FAILED
    return errors.FAILED


def _rank(record: dict[str, Any]) -> RankStatus:
    return RankStatus(**{name: record[name] for name in _RANK_FIELDS})


def _connect(host: str, name: str, ssh: Sequence[str], *, many: bool) -> Connection:
    """Start the agent of a host; "": this one."""
    agent = [sys.executable, "-m", "palm_ds.cli.run", "--agent", name]
    if not many:
        return _connect_here(host, agent)
    where = f"cd {shlex.quote(os.getcwd())}"
    path = os.environ.get("PYTHONPATH", "")
    words = shlex.join(["env", f"PYTHONPATH={path}", *agent, "--descriptor", "1"])
    process = subprocess.Popen(
        [*ssh, host, f"{where} && exec {words}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for `palm-ds run`
    )
    assert process.stdout is not None
    with process.stdout:
        return Connection(host, process, MessageReader(os.dup(process.stdout.fileno())))


def _connect_here(host: str, agent: Sequence[str]) -> Connection:
    """Its messages have a pipe of their own: standard output and error are the command's."""
    inward, outward = os.pipe()
    process = subprocess.Popen(
        [*agent, "--descriptor", str(outward)],
        stdin=subprocess.PIPE,
        pass_fds=[outward],
        start_new_session=True,
    )
    os.close(outward)
    return Connection(host, process, MessageReader(inward))
