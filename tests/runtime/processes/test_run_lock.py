"""One run folder, one run: two starts on one host, on several, together, after a crash."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from palm_ds.common.errors import UserError
from palm_ds.runtime.processes import run_lock
from palm_ds.runtime.processes.launchers import start_ticks
from palm_ds.runtime.processes.process_group import SINGLE_PROCESS
from palm_ds.runtime.processes.run_lock import FILE, LockOwner, RunLock, lock_run_folder, refresh
from tests.helpers.small_disk import fill, small_disk


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "REFRESH_SECONDS", 0.05)
    monkeypatch.setattr(run_lock, "STALE_SECONDS", 0.3)


def take(folder: Path) -> RunLock:
    return lock_run_folder(folder, group=SINGLE_PROCESS, poll_seconds=0.01)


def write(folder: Path, owner: LockOwner, age: float = 0.0) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / FILE).write_text(json.dumps(asdict(owner)))
    written = time.time() - age
    os.utime(folder / FILE, (written, written))
    return folder / FILE


@pytest.fixture
def elsewhere() -> LockOwner:
    """A run on another host, whose clock is an hour ahead."""
    return replace(LockOwner.here(), host="other", kernel="another kernel", since="in an hour")


@pytest.fixture
def ended() -> LockOwner:
    """A run of this host that was killed."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        owner = replace(LockOwner.here(), pid=process.pid, ticks=start_ticks(process.pid))
        assert owner.runs() is True
        process.kill()
    assert owner.runs() is False
    return owner


def test_a_lock_whose_confirmation_was_lost_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS repeats a request that was not answered: the first one has made the link."""
    link = os.link

    def repeated(part: Path, file: Path) -> None:
        link(part, file)
        link(part, file)

    monkeypatch.setattr(os, "link", repeated)
    lock = take(tmp_path / "run")
    assert (tmp_path / "run" / FILE).exists()
    lock.release()
    assert not (tmp_path / "run").exists()


def test_a_second_run_is_refused_with_who_where_and_since_when(tmp_path: Path) -> None:
    lock = take(tmp_path / "run")
    who = rf"process {os.getpid()} on \S+ since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d UTC \(.+\); wait"
    with pytest.raises(UserError, match=rf"run folder .*run: another run is using it: {who}"):
        take(tmp_path / "run")
    lock.release()
    lock.release()
    take(tmp_path / "run").release()
    assert not (tmp_path / "run").exists()  # nothing was written


@pytest.mark.parametrize("links", [True, False])
def test_a_full_disk_has_no_half_of_a_lock(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty lock was that of an unknown run, which the next start waited a minute for."""
    if not links:
        monkeypatch.setattr(run_lock, "_create", run_lock._create_without_link)
    with small_disk(tmp_path / "disk", "100k") as disk:
        fill(disk)
        with pytest.raises(UserError, match=f"folder {disk}: cannot be written: No space left"):
            take(disk)
        assert os.listdir(disk) == ["filler"]


def test_all_ranks_are_one_run_and_hear_of_a_refusal(tmp_path: Path) -> None:
    @dataclass
    class Rank:
        rank: int
        problem: str = ""
        world: int = 2

        def gather(self, value: Any) -> list[Any]:
            return [value if self.rank == 0 else self.problem] * 2

    lock = lock_run_folder(tmp_path, group=Rank(0))
    lock_run_folder(tmp_path, group=Rank(1)).release()
    assert (tmp_path / FILE).exists()
    with pytest.raises(UserError, match="refused there"):
        lock_run_folder(tmp_path, group=Rank(1, "refused there"))
    lock.release()


def test_a_killed_run_of_this_host_is_taken_over_immediately(
    tmp_path: Path, ended: LockOwner, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, ended)
    lock = take(tmp_path)
    (line,) = [record.message for record in caplog.records]
    assert f"taken over from process {ended.pid} on {ended.host}" in line
    lock.release()
    assert not list(tmp_path.iterdir())


def test_a_number_that_another_process_has_now(tmp_path: Path) -> None:
    write(tmp_path, replace(LockOwner.here(), ticks=1))
    lock = take(tmp_path)
    assert json.loads((tmp_path / FILE).read_text())["ticks"] == LockOwner.here().ticks
    lock.release()
    assert not (tmp_path / FILE).exists()


def test_a_silent_run_of_another_host_is_taken_over(
    tmp_path: Path, elsewhere: LockOwner, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    write(tmp_path, elsewhere)
    begun = time.monotonic()
    take(tmp_path).release()
    assert 0.25 < time.monotonic() - begun < 5
    assert ["waits to see" in caplog.text, "taken over from" in caplog.text] == [True, True]


def test_a_server_that_was_away_ages_no_lock(tmp_path: Path, elsewhere: LockOwner) -> None:
    """However old it looks, it is watched for some time."""
    file = write(tmp_path, elsewhere, age=999.0)
    timer = threading.Timer(0.05, os.utime, (file,))
    timer.start()
    with pytest.raises(UserError, match="process .* on other since in an hour"):
        take(tmp_path)
    timer.join()


def test_a_running_one_of_another_host_is_refused(tmp_path: Path, elsewhere: LockOwner) -> None:
    held = RunLock(write(tmp_path, elsewhere), elsewhere)
    with pytest.raises(UserError, match="on other since in an hour"):
        take(tmp_path)
    held.release()
    assert not (tmp_path / FILE).exists()


def test_a_lock_that_is_no_lock_gets_old(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("")
    lock = take(tmp_path)
    assert json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()
    lock.release()
    assert not (tmp_path / FILE).exists()


def test_of_many_simultaneous_starts_one_wins(tmp_path: Path, ended: LockOwner) -> None:
    def attempt(_number: int) -> RunLock | None:
        try:
            return take(tmp_path)
        except UserError:
            return None

    for _ in range(20):
        write(tmp_path, ended)
        with ThreadPoolExecutor(8) as pool:
            won = [lock for lock in pool.map(attempt, range(8)) if lock]
        assert len(won) == 1
        won[0].release()
        assert not list(tmp_path.iterdir())


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    codes: list[int] = []
    monkeypatch.setattr(run_lock.os, "_exit", codes.append)
    yield codes


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_a_lock_that_was_deleted_is_written_again(tmp_path: Path, exits: list[int]) -> None:
    lock = take(tmp_path)
    (tmp_path / FILE).unlink()
    wait_until((tmp_path / FILE).exists)
    lock.release()
    assert exits == []


def test_a_run_whose_lock_was_taken_over_ends(
    tmp_path: Path, exits: list[int], elsewhere: LockOwner, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = take(tmp_path)
    file = write(tmp_path, replace(elsewhere, token="another"))
    wait_until(lambda: bool(exits))
    lock.release()
    assert exits[0] == 2 and file.exists()
    assert "taken over by process" in capsys.readouterr().err


def test_it_ends_although_nobody_reads_its_messages(
    tmp_path: Path, exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs would have written one folder."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        run_lock._give_way(tmp_path / FILE)
        monkeypatch.undo()
        with suppress(BrokenPipeError):
            gone.close()
    assert exits == [2]


def test_an_unreadable_moment_ends_no_run(tmp_path: Path) -> None:
    owner = LockOwner.here()
    (tmp_path / FILE).write_text("{")
    assert refresh(tmp_path / FILE, owner) is True


def test_without_links_a_lock_is_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_names: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(run_lock.os, "link", link)
    lock = take(tmp_path)
    with pytest.raises(UserError, match="another run is using it"):
        take(tmp_path)
    lock.release()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="run folder .*: cannot be written: Not a directory"):
        take(tmp_path / "file" / "run")


def test_a_claim_that_a_killed_start_left_blocks_nobody_for_long(
    tmp_path: Path, ended: LockOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "_CLAIM_SECONDS", 0.2)
    write(tmp_path, ended)
    (tmp_path / f"{FILE}.{ended.token}.ended").hardlink_to(tmp_path / FILE)
    take(tmp_path).release()
    assert not list(tmp_path.iterdir())
