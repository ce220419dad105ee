"""Progress and end of each process, in small files that `palm-ds run` reads.

The folder is on the process's own machine and named by an environment variable; without it nothing
is written. A file of a process that has ended without a code was killed.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from palm_ds.runtime.processes.launchers import start_ticks

FOLDER = "PALM_DS_STATUS"
"""Environment variable: the folder of the files."""
_BYTES = 1024


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """One process of a run."""

    rank: int
    host: str
    pid: int
    ticks: int
    """When its process started (`start_ticks`): a pid alone may be another's later."""
    step: int = 0
    """Completed steps."""
    saved: int = 0
    """The step of its last checkpoint."""
    resumed: int = 0
    """The step of the checkpoint that it continued from; no progress of its own."""
    code: int | None = None
    """Its exit code, if it ended in an orderly way."""
    why: str = ""

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}"

    @property
    def running(self) -> bool:
        return start_ticks(self.pid) == self.ticks


def report(rank: int | None = None, **facts: object) -> None:
    """Update this process's file. `rank`: the launcher's, unless given. Raises OSError if there is
    none yet and none can be made; one that cannot be updated stays as it is, since what ends a
    process reports first."""
    folder = os.environ.get(FOLDER)
    if not folder or not os.path.isdir(folder):
        return
    if rank is None:
        text = os.environ.get("RANK", "")
        rank = int(text) if text.isdecimal() else 0  # refused later
    path = Path(folder) / f"{rank}.json"
    before = _read(path)
    own = before is not None and before.pid == os.getpid()
    if before is None or not own:
        pid, host = os.getpid(), socket.gethostname()
        before = RankStatus(rank=rank, host=host, pid=pid, ticks=start_ticks(pid))
    with suppress(OSError) if own else nullcontext():
        _write(path, replace(before, **facts))


def _write(path: Path, status: RankStatus) -> None:
    text = json.dumps(asdict(status))
    size = max(_BYTES, path.stat().st_size if path.exists() else 0)  # a long reason may be there
    with open(path, "r+b" if path.exists() else "w+b", buffering=0) as file:
        file.write(text.encode().ljust(size))  # one write: a reader sees the old or the new


def read_all(folder: Path) -> list[RankStatus]:
    """The processes that have reported, by rank."""
    statuses = filter(None, map(_read, folder.glob("*.json")))
    return sorted(statuses, key=lambda status: status.rank)


def _read(path: Path) -> RankStatus | None:
    try:
        return RankStatus(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
