"""The agent of `palm-ds run` on one host: starts the command, reports, and leaves nothing running.

It adopts whatever its processes leave behind (as a subreaper), so that the end of a launcher hides
nothing from it. Without news from `palm-ds run` it ends the run itself: with a checkpoint if only
`palm-ds run` was killed, in any case within 60 seconds if the host was cut off.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from palm_ds.common.errors import FINISHED, STOPPED, UserError
from palm_ds.runtime.processes import rank_status
from palm_ds.runtime.processes.launchers import host_name
from palm_ds.runtime.supervisor.command_line import FOLDER
from palm_ds.runtime.supervisor.messages import SILENCE, MessageReader, TimeLimits, send

RUN = "PALM_DS_RUN"
"""Environment variable of all processes of a run: which one they belong to."""
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_TICK = 0.2
_ASK_AGAIN = 3.0
"""Seconds between two requests to stop: a process that starts may not hear the first, as it ignores
SIGTERM like this agent, from which it has that, until it has a handler."""
_AFTER_LAUNCHER = 60.0
"""Seconds to save once the launcher has ended."""


def run_agent(name: str, descriptor: int) -> int:
    """Serve one start of the run `name`; messages go to `descriptor`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # `palm-ds run` says when to stop
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    killed = kill_leftovers(name)
    send(descriptor, hello=_address(), port=free_port(), killed=killed)
    lines = MessageReader(0)
    request = _first(lines)
    if request is None:
        return FINISHED
    folder = Path(tempfile.mkdtemp(prefix=_prefix(name)))
    try:
        before = out_of_memory_kills()
        child = _start(request, folder, name, descriptor)
        _Agent(descriptor, lines, folder, child, TimeLimits(request["silence"]), before).serve()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return FINISHED


def kill_leftovers(name: str) -> int:
    """Remove what an earlier start of the run left on this host; returns how many processes."""
    left = [process for process in psutil.process_iter() if _belongs_to(process, name)]
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=10)
    for folder in Path(tempfile.gettempdir()).glob(f"{_prefix(name)}*"):
        shutil.rmtree(folder, ignore_errors=True)
    return len(left)


def _prefix(name: str) -> str:
    return f"palm-ds-run-{name}-"


def out_of_memory_kills() -> int:
    """Number of processes that the kernel has killed for want of memory, of this host or of a
    container's limit; 0 if it does not count."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def free_port() -> int:
    """Below the ports that the system gives to outgoing connections."""
    for port in (20_000 + (os.getpid() * 7 + n * 101) % 12_000 for n in range(500)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    return 0


@dataclass
class _Agent:
    descriptor: int
    lines: MessageReader
    folder: Path
    child: subprocess.Popen[bytes]
    limits: TimeLimits
    memory_kills: int
    """Of the kernel, before."""
    stopping: float = 0.0
    """Since when the processes are asked to save and stop."""
    deadline: float = float("inf")
    """When they are killed."""
    asked: dict[int, float] = field(default_factory=dict)
    """When each process was last asked."""
    heard: float = field(default_factory=time.monotonic)

    def serve(self) -> None:
        reported = 0.0
        while self.child.poll() is None or any(_family()):
            self._listen()
            self._judge()
            if self.stopping:
                self._ask_to_stop()
            if time.monotonic() > self.deadline:
                _kill_family()
            if time.monotonic() - reported > self.limits.pause:
                reported = time.monotonic()
                self._report()
        self._report(ended=self.child.returncode)

    def _report(self, **facts: object) -> None:
        ranks = rank_status.read_all(self.folder)
        records = [asdict(rank) | {"lost": _lost(rank)} for rank in ranks]
        memory = out_of_memory_kills() > self.memory_kills
        send(self.descriptor, ranks=records, out_of_memory=memory, **facts)

    def _listen(self) -> None:
        if self.lines.closed:
            time.sleep(_TICK)
        elif select.select([self.lines.descriptor], [], [], _TICK)[0]:
            self.heard = time.monotonic()
            for message in self.lines.read():
                if message.get("do") == "stop":
                    self._stop()
                elif message.get("do") == "kill":
                    self.deadline = 0.0
            if self.lines.closed:  # `palm-ds run` was killed
                self._stop()
        elif time.monotonic() - self.heard > self.limits.silence:
            self._stop()
            self._end_within(self.limits.cut_off)

    def _judge(self) -> None:
        """Whether what still runs has lost its launcher or another process."""
        ranks = rank_status.read_all(self.folder)
        if self.child.poll() is not None:
            self._stop()
            self._end_within(_AFTER_LAUNCHER)
        if any(_lost(rank) or rank.code not in (None, FINISHED, STOPPED) for rank in ranks):
            self._end_within(self.limits.others)

    def _stop(self) -> None:
        self.stopping = self.stopping or time.monotonic()

    def _end_within(self, seconds: float) -> None:
        self.deadline = min(self.deadline, time.monotonic() + seconds)

    def _ask_to_stop(self) -> None:
        """SIGTERM to the training processes: they save together. Launchers would kill them after 30
        seconds, and end by themselves. Before there are any, to everything."""
        known = rank_status.read_all(self.folder)
        ranks = [rank for rank in known if rank.running]
        pids = [r.pid for r in ranks] if known else [process.pid for process in _family()]
        now = time.monotonic()
        for pid in pids:
            if now - self.asked.get(pid, -_ASK_AGAIN) >= _ASK_AGAIN:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
                self.asked[pid] = now
        if not ranks and time.monotonic() - self.stopping > self.limits.cut_off:
            self.deadline = 0.0


def _lost(rank: rank_status.RankStatus) -> bool:
    """Whether it ended without a word."""
    return rank.code is None and not rank.running


def _start(
    request: Mapping[str, Any], folder: Path, name: str, descriptor: int
) -> subprocess.Popen[bytes]:
    (folder / "hosts").write_text(request["hosts"], encoding="utf-8")
    command = [word.replace(FOLDER, str(folder)) for word in request["command"]]
    own = {RUN: name, rank_status.FOLDER: str(folder)}
    try:
        return subprocess.Popen(
            command,
            cwd=request["cwd"],
            env={**os.environ, **request["env"], **own},
            stdin=subprocess.DEVNULL,
            stdout=2 if descriptor == 1 else None,
            start_new_session=True,
        )
    except OSError as error:  # another host may not have the program
        text = f"{host_name()}: {command[0]} cannot be started: {error.strerror}"
        raise UserError(text) from None


def _first(lines: MessageReader) -> dict[str, Any] | None:
    """The request; None if `palm-ds run` has ended or does without this host."""
    while not lines.closed and select.select([lines.descriptor], [], [], SILENCE)[0]:
        for message in lines.read():
            if "command" in message:
                return message
    return None


def _family() -> Iterator[psutil.Process]:
    """All processes of the run that still run, adopted ones included."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                yield process


def _kill_family() -> None:
    for process in list(_family()):
        with contextlib.suppress(psutil.Error):
            process.kill()


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


def _belongs_to(process: psutil.Process, name: str) -> bool:
    return process.pid != os.getpid() and _environment(process).get(RUN) == name


def _address() -> str:
    """At which other hosts reach this one: not the loopback interface, over which `localhost` of a
    hostfile is connected."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    address = connection[2] if len(connection) == 4 else ""
    if address and address != "::1" and not address.startswith("127."):
        return address
    try:
        done = subprocess.run(["hostname", "-I"], capture_output=True, text=True, timeout=10)
        return (done.stdout.split() or ["127.0.0.1"])[0]
    except (OSError, subprocess.TimeoutExpired):
        return "127.0.0.1"
