"""Complete or absent, whatever happens in between. Threads stand for processes here; real
processes are killed in distributed/."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from palm_ds.common.errors import TemporaryError, UserError
from palm_ds.runtime.checkpoint import checkpoint
from palm_ds.runtime.checkpoint.checkpoint import (
    FileManifest,
    Layout,
    Retention,
    SaveError,
    VerifiedCheckpoint,
    best_of,
)
from tests.helpers.write_checkpoint import write_checkpoint

LAYOUT = Layout(world=2, stage=2, precision="bf16")


class Team:
    """Threads that play two processes and can gather."""

    def __init__(self, world: int):
        self.world = world
        self.barrier = threading.Barrier(world, timeout=60)
        self.values: list[Any] = [None] * world

    def run(self, work: Callable[[Member], Any]) -> list[Any]:
        with ThreadPoolExecutor(self.world) as pool:
            return list(pool.map(lambda rank: work(Member(self, rank)), range(self.world)))


class Member:
    def __init__(self, team: Team, rank: int):
        self.team, self.rank, self.world = team, rank, team.world

    def gather(self, value: Any) -> list[Any]:
        self.team.values[self.rank] = value
        self.team.barrier.wait()
        values = list(self.team.values)
        self.team.barrier.wait()
        return values


def save(
    folder: Path,
    step: int,
    *,
    keep: int = 2,
    reject: tuple[int, ...] = (),
    break_rank: int | None = None,
    failure: Exception | None = None,
) -> None:
    def make(path: Path, rank: int) -> None:
        save_file({"w": torch.full((1000,), float(step * 10 + rank))}, path)
        if rank == break_rank:
            raise failure or OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def work(member: Member) -> None:
        def write(place: Path, written: FileManifest) -> None:
            path = place / f"shard{member.rank}.pt"
            written.write(path, lambda path: make(path, member.rank))

        write_checkpoint(
            folder,
            step,
            write=write,
            layout=LAYOUT,
            parameters={f"of {member.rank}": step, "shared": step},
            engine={"global_steps": step},
            state={"step": step},
            group=member,
            keep=keep,
            invalid=reject,
        )

    Team(2).run(work)


def find(folder: Path) -> tuple[VerifiedCheckpoint | None, list[str]]:
    lines: list[str] = []
    found = Team(2).run(
        lambda member: checkpoint.latest_good(folder, group=member, warn=lines.append)
    )
    assert found[0] == found[1]
    return found[0], lines


def test_a_published_checkpoint_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    assert find(folder) == (None, [])
    save(folder, 10)
    save(folder, 20)
    found, lines = find(folder)
    assert found is not None and not lines
    assert (found.step, found.state, found.path) == (20, {"step": 20}, folder / "step_00000020")
    manifest = json.loads((found.path / "manifest.json").read_text())
    assert set(manifest["files"]) == {"shard0.pt", "shard1.pt"}
    assert manifest["layout"] == {"world": 2, "stage": 2, "precision": "bf16"}
    assert found.layout == LAYOUT and str(found.layout) == "2 processes, ZeRO 2, bf16"
    assert found.parameters == {"of 0": 20, "of 1": 20, "shared": 20}
    assert found.engine == {"global_steps": 20}
    assert [file.name for file in found.files] == ["shard0.pt", "shard1.pt"]
    assert load_file(found.files[1])["w"][0] == 201.0


def test_keeps_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10, 11):
        save(tmp_path, step, keep=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step_00000003",
        "step_00000010",
        "step_00000011",
    ]


def test_checkpoints_close_to_the_newest_do_not_count() -> None:
    keep = Retention(newest=2, margin=10)
    assert keep.superseded([35, 34, 30, 25, 20]) == [30, 20]
    assert keep.superseded([3000, 2000, 1000]) == [1000]
    assert Retention(newest=1, margin=10).superseded([35, 30, 20]) == [30, 20]
    assert keep.superseded([5]) == []


def test_the_first_of_every_hundred_steps_stays_for_good() -> None:
    keep = Retention(newest=1, every=100)
    assert keep.superseded([330, 300, 260, 210, 150, 99, 30]) == [260, 99, 30]


def test_the_best_stay_beside_the_newest() -> None:
    """Of equal ones the older; those that were not evaluated do not compete."""
    values = {10: 0.5, 20: 0.7, 30: 0.7, 40: 0.1, 70: 0.9}
    assert best_of([50, 40, 30, 20, 10], values) == [20, 30, 10, 40]
    keep = Retention(newest=1, best=2, values=values)
    assert keep.superseded([50, 40, 30, 20, 10]) == [40, 10]
    assert keep.superseded([30, 20, 10]) == [10]
    assert Retention(newest=1, values=values).superseded([30, 20]) == [20]


def test_what_is_protected_stays() -> None:
    assert Retention(newest=1, protected=20).superseded([50, 40, 30, 20, 10]) == [40, 30]


def test_a_return_to_an_older_one_may_leave_newer_ones_valid(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, keep=9)
    (found, _) = Team(2).run(
        lambda member: checkpoint.latest_good(
            tmp_path, group=member, warn=print, at_most=1, valid=2
        )
    )
    assert found is not None and (found.step, found.invalid) == (1, (3,))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped bit": (lambda p: flip(p / "shard1.pt"), r"shard1.pt has changed .*checksum"),
    "truncated": (
        lambda p: os.truncate(p / "shard0.pt", 100),
        r"shard0.pt has 100 bytes instead of \d+",
    ),
    "missing shard": (lambda p: (p / "shard1.pt").unlink(), "shard1.pt is missing"),
    "missing manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
    "half a manifest": (
        lambda p: os.truncate(p / "manifest.json", 60),
        "manifest.json is damaged",
    ),
    "unreadable manifest": (
        lambda p: ((p / "manifest.json").unlink(), (p / "manifest.json").mkdir()),
        "manifest.json cannot be read: Is a directory",
    ),
    "another manifest": (
        lambda p: (p / "manifest.json").write_text('{"format": 99}'),
        "manifest.json has format 99, this version reads 3",
    ),
    "a path for a name": (
        lambda p: (p / "manifest.json").write_text(
            (p / "manifest.json").read_text().replace("shard1.pt", "../shard1.pt")
        ),
        "manifest.json has changed since it was written",
    ),
    "a changed count": (
        lambda p: (p / "manifest.json").write_text(
            (p / "manifest.json").read_text().replace('"shared": 2', '"shared": 3')
        ),
        "manifest.json has changed since it was written",
    ),
    "empty": (lambda p: (shutil.rmtree(p), p.mkdir()), "manifest.json is missing"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_reported_and_the_older_checkpoint_is_used(name: str, tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    damage, wanted = DAMAGE[name]
    damage(tmp_path / "step_00000002")
    found, lines = find(tmp_path)
    assert found is not None and found.step == 1 and found.invalid == (2,)
    assert len(lines) == 1
    assert re.search(wanted, lines[0]) and "step_00000002: not used: " in lines[0]


def test_a_bad_checkpoint_is_replaced_and_not_counted(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, keep=9)
    flip(tmp_path / "step_00000003" / "shard0.pt")
    flip(tmp_path / "step_00000002" / "shard0.pt")
    found, _ = find(tmp_path)
    assert found is not None and found.invalid == (3, 2)
    save(tmp_path, 3, keep=2, reject=found.invalid)
    assert checkpoint.steps_in(tmp_path) == [3, 1]  # of the good ones, the newest two
    found, lines = find(tmp_path)
    assert found is not None and found.step == 3 and not lines


def test_no_good_checkpoint_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    for step in (1, 2):
        flip(tmp_path / f"step_0000000{step}" / "shard0.pt")
    with pytest.raises(UserError, match="no good checkpoint among 2 .*0002: .*0001: .*choose"):
        find(tmp_path)


def test_checkpoints_that_cannot_be_read_are_no_mistake(tmp_path: Path, monkeypatch) -> None:
    """A run that is started again while a file server is away was never started once more."""
    save(tmp_path, 1)

    def fail(path: Path) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(checkpoint, "sha256_of_file", fail)
    with pytest.raises(TemporaryError, match="cannot be read: Input/output error.*tries again"):
        find(tmp_path)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("failure", [None, SafetensorError("I/O error: no space\nmore")])
def test_a_failed_save_keeps_the_older_checkpoints(
    rank: int, failure: Exception | None, tmp_path: Path
) -> None:
    save(tmp_path, 1)
    why = "No space left on device" if failure is None else "I/O error: no space"
    wanted = f"step_00000002: cannot be saved: process {rank}: shard{rank}.pt: {why}; the last"
    with pytest.raises(SaveError, match=wanted) as caught:
        save(tmp_path, 2, break_rank=rank, failure=failure)
    assert "\n" not in str(caught.value) and str(caught.value).endswith("step_00000001")
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
    save(tmp_path, 2)
    assert checkpoint.steps_in(tmp_path) == [2, 1]


def test_a_disk_that_is_full_at_the_manifest(tmp_path: Path, monkeypatch) -> None:
    save(tmp_path, 1)

    def full(*_args: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "write_sealed_json", full)
    with pytest.raises(SaveError, match="process 0: No space left on device"):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]


def test_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match="cannot be saved: process 0: .*there is no older one"):
        save(tmp_path / "file" / "checkpoints", 1)


def test_a_save_while_the_file_server_is_away_is_an_error_of_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking for an older checkpoint, for the message, ended the run."""

    def fail(path: Path, **_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    for method in ("mkdir", "is_dir"):
        monkeypatch.setattr(Path, method, fail)
    with pytest.raises(SaveError, match="cannot be saved: process 0: Input/output error"):
        save(tmp_path, 1)


def test_leftovers_are_reported_and_removed_at_the_next_save(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step_00000002.partial").mkdir()
    (tmp_path / "step_00000002.partial" / "shard0.pt").write_bytes(b"half")
    found, lines = find(tmp_path)
    assert found is not None and found.step == 1 and found.invalid == ()
    assert len(lines) == 1 and "step_00000002.partial: unfinished save" in lines[0]
    save(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000001", "step_00000002"]


def test_what_cannot_be_deleted_yet_does_not_keep_from_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS keeps the files of a folder that somebody still reads."""
    read = tmp_path / "step_00000001.old.partial"
    read.mkdir()
    rmtree = shutil.rmtree

    def remove(path: Path, ignore_errors: bool = False) -> None:
        if path == read and not ignore_errors:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        if path != read:
            rmtree(path, ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", remove)
    save(tmp_path, 2)
    assert checkpoint.steps_in(tmp_path) == [2] and read.exists()


def test_saving_the_same_step_again(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
    assert find(tmp_path)[0] is not None
