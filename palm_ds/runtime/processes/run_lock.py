"""One run folder, one run: a lock that also holds between hosts of a shared file system.

    run.lock    who runs here: host, process, since when, command; refreshed every few seconds

Rank 0 holds it for all processes of a run. It is a file that is created by linking, which is atomic
on NFS too; locks of the operating system are not known to every client of a shared file system, or
vanish with a server. Whether its owner still runs is known

    on the same host      from the process table, immediately
    from another host     from the age of the file, which a thread of the owner refreshes, by the
                          clock of the file system: those of hosts may differ

A lock whose owner has ended is taken over, with a line in the log. An owner whose lock was taken
over (it was suspended, or cut off for a minute) ends itself: two runs in one folder would delete
each other's checkpoints.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from palm_ds.common import errors
from palm_ds.common.errors import UserError
from palm_ds.common.messages import print_error
from palm_ds.runtime.processes import rank_status
from palm_ds.runtime.processes.launchers import command_line, host_identity, host_name, start_ticks
from palm_ds.runtime.processes.process_group import ProcessGroup

FILE = "run.lock"
REFRESH_SECONDS = 5.0
STALE_SECONDS = 60.0
"""An owner on another host that has not refreshed its lock for so long has ended."""
_CLAIM_SECONDS = 10.0
"""A claim on the lock of an ended run is held for a moment; an older one is a killed start's."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LockOwner:
    """The contents of the lock file."""

    host: str
    kernel: str
    """Identity of the running kernel and process namespace: equal means that `pid` can be looked up
    here."""
    pid: int
    ticks: int
    """When it started, by the kernel's counter: a later process may have the same number."""
    since: str
    command: str
    token: str
    """Random: tells two locks of one process apart."""

    @classmethod
    def here(cls) -> LockOwner:
        """This process."""
        return cls(
            host=host_name(),
            kernel=host_identity(),
            pid=os.getpid(),
            ticks=start_ticks(os.getpid()),
            since=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
            command=command_line(),
            token=secrets.token_hex(8),
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since} ({self.command})"

    def runs(self) -> bool | None:
        """Whether the owner still runs; None if that cannot be known from here."""
        if not self.kernel or self.kernel != host_identity():
            return None
        return start_ticks(self.pid) == self.ticks


class RunLock:
    """A held lock. On other ranks than 0 it does nothing."""

    def __init__(self, file: Path, owner: LockOwner | None, *, made_folder: bool = False):
        self._file, self._owner, self._made_folder = file, owner, made_folder
        self._released = threading.Event()
        if owner is not None:
            _Refresher(self).start()
            atexit.register(self.release)

    def release(self) -> None:
        """Delete the lock file, if it is this process's. May be called twice."""
        atexit.unregister(self.release)
        if self._owner is None or self._released.is_set() or self._owner.pid != os.getpid():
            return
        self._released.set()
        with suppress(OSError):
            if _read(self._file) == self._owner:
                self._file.unlink()
        if self._made_folder:  # a run that failed before it wrote anything leaves nothing
            with suppress(OSError):
                self._file.parent.rmdir()

    def refresh_until_released(self) -> None:
        assert self._owner is not None
        while not self._released.wait(REFRESH_SECONDS):
            with suppress(OSError):  # a full disk or a server that is away; tried again
                if not refresh(self._file, self._owner) and not self._released.is_set():
                    _give_way(self._file)


class _Refresher(threading.Thread):
    def __init__(self, lock: RunLock):
        super().__init__(daemon=True, name="run lock")
        self.lock = lock

    def run(self) -> None:
        self.lock.refresh_until_released()


def release_held() -> None:
    """Release the locks of this process, which is about to end without cleaning up."""
    for thread in threading.enumerate():
        if isinstance(thread, _Refresher):
            thread.lock.release()


def refresh(file: Path, owner: LockOwner) -> bool:
    """Mark the lock as alive; write it again if somebody deleted it. Returns False if it belongs to
    another run."""
    holder = _read(file)
    if holder not in (owner, None):
        return False
    try:
        os.utime(file)
    except FileNotFoundError:
        return _create(file, owner)
    return True


def _give_way(file: Path) -> None:
    print_error(  # not logged: the training thread may hold the logger's lock
        f"error: {file}: taken over by {_read(file)} while this run was suspended or cut off; "
        "this run ends, its checkpoints stay"
    )
    rank_status.report(code=errors.MISTAKE, why=f"{file} was taken over by another run")
    os._exit(errors.MISTAKE)


def lock_run_folder(
    folder: Path, *, group: ProcessGroup, poll_seconds: float = REFRESH_SECONDS / 5
) -> RunLock:
    """Take the lock of a run folder for all processes of a run. Raises UserError on all of them if
    another run has it. Waits up to a minute for an owner on another host that may have ended."""
    lock, problem = None, ""
    if group.rank == 0:
        try:
            lock = _take(folder, poll_seconds)
        except UserError as error:
            problem = str(error)
        except OSError as error:
            problem = f"run folder {folder}: cannot be written: {error.strerror or error}"
    problem = group.gather(problem)[0]
    if problem:
        raise UserError(problem)
    return lock or RunLock(folder / FILE, None)


def _take(folder: Path, poll_seconds: float) -> RunLock:
    file, me, made = folder / FILE, LockOwner.here(), not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    while not _create(file, me):
        owner = _read(file)
        state = _watch(file, owner, poll_seconds)
        if state == "runs":
            raise UserError(
                f"run folder {folder}: another run is using it: {owner or file}; wait for it, stop "
                "it, or choose another folder"
            )
        if state == "ended" and _remove(file, owner):
            log.warning("%s: taken over from %s, which has ended", file, owner or "an unknown run")
    return RunLock(file, me, made_folder=made)


def _watch(
    file: Path, owner: LockOwner | None, poll_seconds: float
) -> Literal["runs", "ended", "changed"]:
    """Find out what has become of the owner of a lock; watch its file if that cannot be known
    immediately. "changed": the lock was released, or is another run's now."""
    if owner is not None and (runs := owner.runs()) is not None:
        return "runs" if runs else "ended"
    first, watched = _modified(file), time.monotonic()
    if first is not None:
        log.info("%s: waits to see whether %s still runs", file, owner or "its owner")
    while (last := _modified(file)) is not None and _read(file) == owner:
        if last != first:
            return "runs"
        silent = time.monotonic() - watched > 2 * REFRESH_SECONDS
        if silent and _now_at(file) - last > STALE_SECONDS:
            return "ended"
        time.sleep(poll_seconds)
    return "changed"


def _create(file: Path, owner: LockOwner) -> bool:
    """Create the lock file with its contents in one atomic step; False if there is one."""
    part = file.with_name(f"{FILE}.{owner.token}")
    try:
        part.write_text(json.dumps(asdict(owner)), encoding="utf-8")
        return _link(part, file, owner)
    finally:
        part.unlink(missing_ok=True)


def _link(part: Path, file: Path, owner: LockOwner) -> bool:
    try:
        os.link(part, file)
    except FileExistsError:  # on NFS also if the answer was lost and the request repeated
        return _read(file) == owner
    except OSError as error:
        if error.errno in errors.FULL_DISK:
            raise
        return _create_without_link(file, owner)  # a file system without links
    return True


def _create_without_link(file: Path, owner: LockOwner) -> bool:
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return False
    try:
        file.write_text(json.dumps(asdict(owner)), encoding="utf-8")
    except OSError:  # a full disk: an empty lock would be an unknown run's
        file.unlink(missing_ok=True)
        raise
    return True


def _remove(file: Path, owner: LockOwner | None) -> bool:
    """Remove a lock whose owner has ended, unless another run has just replaced it. Only the run
    that holds the claim on this owner's lock may, so that nobody removes a newer one."""
    claim = file.with_name(f"{FILE}.{owner.token if owner else 'unknown'}.ended")
    try:
        os.link(file, claim)
    except FileNotFoundError:
        return False
    except FileExistsError:
        _drop_old_claim(claim)
        return False
    except OSError:  # a file system without links
        return _remove_without_link(file, owner)
    mine = _read(claim) == owner
    if mine:
        file.unlink(missing_ok=True)
    claim.unlink(missing_ok=True)
    return mine


def _drop_old_claim(claim: Path) -> None:
    """Wait a moment for the run that holds a claim; remove what a run that was killed has left."""
    time.sleep(0.02)
    with suppress(FileNotFoundError):
        if _now_at(claim.with_name(FILE)) - claim.stat().st_ctime > _CLAIM_SECONDS:
            claim.unlink(missing_ok=True)


def _remove_without_link(file: Path, owner: LockOwner | None) -> bool:
    aside = file.with_name(f"{FILE}.{secrets.token_hex(8)}.ended")
    try:
        os.rename(file, aside)
    except FileNotFoundError:
        return False
    mine = _read(aside) == owner
    if not mine:  # another run's: it notices and writes it again, or ends
        with suppress(OSError):
            os.rename(aside, file)
    aside.unlink(missing_ok=True)
    return mine


def _read(file: Path) -> LockOwner | None:
    """The owner of a lock; None if there is no lock, or it is being written."""
    try:
        values = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    names = {field_.name for field_ in fields(LockOwner)}
    if not isinstance(values, Mapping) or values.keys() != names:
        return None
    return LockOwner(**values)


def _modified(file: Path) -> float | None:
    """When a file was written, by the file system's clock; None if it is gone. Opened first, since
    clients of NFS ask the server again then."""
    try:
        with file.open("rb") as opened:
            return os.fstat(opened.fileno()).st_mtime
    except FileNotFoundError:
        return None


def _now_at(file: Path) -> float:
    """The file system's clock."""
    probe = file.with_name(f"{FILE}.{secrets.token_hex(8)}.clock")
    try:
        probe.write_bytes(b"")
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)
