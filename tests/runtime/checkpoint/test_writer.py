"""Checkpoints written in the background: complete or absent, as their step was, and what happens
when the disk is slow, full or gone. Threads play the processes of a run."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from palm_ds.runtime.checkpoint import checkpoint
from palm_ds.runtime.checkpoint import writer as checkpoint_writer
from palm_ds.runtime.checkpoint.checkpoint import (
    FileManifest,
    Layout,
    Retention,
    SaveError,
    SaveRequest,
    steps_in,
)
from palm_ds.runtime.checkpoint.shard_files import WEIGHT, ParamShard, write_shards
from palm_ds.runtime.checkpoint.writer import CheckpointWriter, HostCopies, bytes_of, short_memory
from palm_ds.runtime.processes.process_group import SINGLE_PROCESS
from tests.runtime.checkpoint.test_checkpoint import Team

CPU = torch.device("cpu")


def shards(*sizes: int, moments: bool = True) -> list[ParamShard]:
    """Views of one flat tensor, as ZeRO has them."""
    flat, out, start = torch.randn(3, sum(sizes)), [], 0
    for number, size in enumerate(sizes):
        rows = flat[:, start : start + size]
        kinds = (WEIGHT, "exp_avg", "exp_avg_sq") if moments else (WEIGHT,)
        out.append(ParamShard(f"layer{number}", 7, dict(zip(kinds, rows, strict=False)), {}))
        start += size
    return out


def values(found: list[ParamShard]) -> list[torch.Tensor]:
    return [tensor.clone() for shard in found for tensor in shard.tensors.values()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other)) and len(one) == len(other)


def test_copies_keep_the_values_of_their_moment() -> None:
    copies, mine = HostCopies(CPU), shards(5, 1, 30)
    before, made = values(mine), copies.copy(mine)
    copies.wait()
    for shard in mine:
        for tensor in shard.tensors.values():
            tensor.add_(1)
    assert same(values(made), before) and not same(values(mine), before)
    assert [(s.name, s.start, list(s.tensors)) for s in made] == [
        (s.name, s.start, list(s.tensors)) for s in mine
    ]
    assert bytes_of(mine) == 4 * 3 * 36


def test_memory_is_allocated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And again when there are moments, after the first update."""
    monkeypatch.setattr(checkpoint_writer, "_CHUNK_VALUES", 40)
    copies = HostCopies(CPU)
    copies.copy(shards(5, 1, 30, moments=False))
    mine = shards(5, 1, 30)
    addresses = [t.data_ptr() for s in copies.copy(mine) for t in s.tensors.values()]
    again = copies.copy(mine)
    assert [t.data_ptr() for s in again for t in s.tensors.values()] == addresses
    assert same(values(again), values(mine))


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([], []),
        ([40], [[40]]),
        ([41, 1], [[41], [1]]),
        ([20, 20, 1, 100, 3], [[20, 20], [1], [100], [3]]),
    ],
)
def test_chunks(sizes, groups, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_writer, "_CHUNK_VALUES", 40)
    assert list(checkpoint_writer._groups(sizes)) == groups


def test_half_precision_is_copied_as_fp32() -> None:
    weight = torch.randn(9).bfloat16()
    (made,) = HostCopies(CPU).copy([ParamShard("x", 0, {WEIGHT: weight}, {})])
    assert made.tensors[WEIGHT].dtype == torch.float32
    assert torch.equal(made.tensors[WEIGHT], weight.float())


def test_files_of_copies_are_those_of_the_shards_byte_for_byte(tmp_path) -> None:
    mine = shards(5, 1, 30)
    for name, found in (("direct", mine), ("copied", HostCopies(CPU).copy(mine))):
        (tmp_path / name).mkdir()
        write_shards(found, "p", lambda file, make, n=name: make(tmp_path / n / file))
    names = [path.name for path in (tmp_path / "direct").iterdir()]
    assert names == ["p_000.safetensors"]
    direct, copied = (tmp_path / name / names[0] for name in ("direct", "copied"))
    assert direct.read_bytes() == copied.read_bytes()
    assert torch.equal(load_file(copied)["exp_avg/7/layer2"], mine[2].tensors["exp_avg"])


GB = 10**9


def request(folder: Path, step: int, **more: Any) -> SaveRequest:
    given: dict[str, Any] = {"parameters": {}, "engine": {}, "state": {"step": step}}
    given["keep"] = Retention()
    layout = Layout(world=1, stage=0, precision="fp32")
    return SaveRequest(folder=folder, step=step, layout=layout, **given | more)


def shard(value: float, name: str = "w") -> ParamShard:
    return ParamShard(name, 0, {WEIGHT: torch.full((500,), value)}, {})


def writer(group: Any = SINGLE_PROCESS) -> CheckpointWriter:
    return CheckpointWriter(group, torch.device("cpu"))


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_files_follow_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        path = tmp_path / "plain"
        path.touch()
        write_shards([shard(1.0)], "rank_0", lambda name, make: make(tmp_path / name))
    finally:
        os.umask(before)
    (file,) = tmp_path.glob("*.safetensors")
    assert file.stat().st_mode == path.stat().st_mode
    assert len(list(tmp_path.iterdir())) == 2


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    return SlowDisk(monkeypatch)


class SlowDisk:
    """Writes wait until `go` is set; `failure` is raised instead of writing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.go = threading.Event()
        self.failure: Exception | None = None
        write = FileManifest.write

        def slow(manifest: FileManifest, path: Path, make: Callable[[Path], None]) -> None:
            assert self.go.wait(60)
            write(manifest, path, self._fail if self.failure else make)

        monkeypatch.setattr(FileManifest, "write", slow)

    def _fail(self, path: Path) -> None:
        assert self.failure is not None
        raise self.failure


def stored(path: Path) -> float:
    return load_file(path / "process_00000_000.safetensors")["weight/0/w"][0].item()


def test_nothing_exists_before_it_is_finished(tmp_path: Path, disk: SlowDisk) -> None:
    mine, one, state = writer(), shard(1.0), {"step": 5, "losses": {"a": [1.0]}}
    assert mine.start(request(tmp_path, 5, state=state), [one], background=True)
    assert mine.busy and not mine.written and steps_in(tmp_path) == []
    one.tensors[WEIGHT].add_(1)  # training continues
    state["losses"]["a"].append(2.0)
    disk.go.set()
    saved = mine.finish()
    assert (saved.step, saved.path) == (5, tmp_path / "step_00000005")
    assert not mine.busy and not mine.written and saved.write_seconds > 0
    found = checkpoint.open_published(saved.path)
    assert stored(saved.path) == 1.0 and found.state == {"step": 5, "losses": {"a": [1.0]}}


def test_written_says_that_nobody_waits(tmp_path: Path, disk: SlowDisk) -> None:
    mine = writer()
    mine.start(request(tmp_path, 1), [shard(1.0)], background=True)
    assert mine._thread is not None
    disk.go.set()
    mine._thread.join(60)
    assert mine.written and steps_in(tmp_path) == []
    mine.finish()
    assert steps_in(tmp_path) == [1]


def test_in_the_foreground_the_same_bytes(tmp_path: Path) -> None:
    mine = writer()
    for folder, background in ((tmp_path / "a", True), (tmp_path / "b", False)):
        assert mine.start(request(folder, 3), [shard(4.0)], background=background) == background
        mine.finish()
    texts = [(tmp_path / x / "step_00000003" / "manifest.json").read_bytes() for x in "ab"]
    assert texts[0] == texts[1]


def test_one_at_a_time(tmp_path: Path, disk: SlowDisk) -> None:
    mine = writer()
    mine.start(request(tmp_path, 1), [shard(1.0)], background=True)
    with pytest.raises(RuntimeError, match="finish the last checkpoint first"):
        mine.start(request(tmp_path, 2), [shard(1.0)], background=True)
    disk.go.set()
    mine.finish()
    mine.start(request(tmp_path, 2), [shard(2.0)], background=True)
    assert stored(mine.finish().path) == 2.0 and steps_in(tmp_path) == [2, 1]


def test_a_full_disk_fails_on_all_and_nothing_is_left(tmp_path: Path, disk: SlowDisk) -> None:
    disk.go.set()
    team, errors = Team(2), []

    def work(member: Any) -> None:
        mine = writer(member)
        for step in (1, 2):
            given = request(tmp_path, step, parameters={f"w{member.rank}": step})
            assert mine.start(given, [shard(step, f"w{member.rank}")], background=True)
            if step == 1:
                mine.finish()
                team.barrier.wait()
                disk.failure = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                team.barrier.wait()
        with pytest.raises(SaveError, match="No space left on device; the last one is step_00000"):
            mine.finish()
        errors.append(mine.busy)

    team.run(work)
    assert errors == [False, False]
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    manifest = json.loads((tmp_path / "step_00000001" / "manifest.json").read_text())
    assert manifest["parameters"] == {"w0": 1, "w1": 1} and len(manifest["files"]) == 2


def test_a_mistake_in_the_thread_is_raised(tmp_path: Path, disk: SlowDisk) -> None:
    disk.failure, mine = ZeroDivisionError("a mistake"), writer()
    mine.start(request(tmp_path, 1), [shard(1.0)], background=True)
    disk.go.set()
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        mine.finish()
    assert steps_in(tmp_path) == []


def test_cancelled_nothing_more_is_written(
    tmp_path: Path, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = writer()
    mine.cancel()
    mine.start(request(tmp_path, 1), [shard(1.0)], background=True)
    threading.Timer(0.05, disk.go.set).start()
    mine.cancel()
    assert not mine.busy and steps_in(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001.partial"]
    assert list((tmp_path / "step_00000001.partial").iterdir()) == []


def test_one_line_about_too_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpoint_writer, "free_host_memory", lambda: 3000)
    mine = writer()
    for step in (1, 2):
        assert not mine.start(request(tmp_path, step), [shard(1.0)], background=True)
        assert mine.written
        mine.finish()
    assert steps_in(tmp_path) == [2, 1]
    assert caplog.text.count("training waits while checkpoints are written: copies of them") == 1


def test_memory_is_that_of_a_host() -> None:
    """Half of what is free, for all processes of a host together."""
    fine = [("a", 2 * GB, 10 * GB), ("a", 2 * GB, 9 * GB), ("b", 4 * GB, 9 * GB)]
    assert short_memory(fine) == ""
    assert short_memory([*fine, ("a", GB, 9 * GB)]) == (
        "copies of them take 5 GB on a, which has 9 GB of memory free"
    )


def test_older_checkpoints_are_deleted_while_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, delete = threading.Event(), checkpoint.delete_set_aside

    def slow(folder: Path) -> None:
        assert go.wait(60)
        delete(folder)

    monkeypatch.setattr(checkpoint, "delete_set_aside", slow)
    mine = writer()
    for step in (1, 2):
        mine.start(request(tmp_path, step, keep=Retention(newest=1)), [shard(1.0)], background=True)
        if step == 2:
            go.clear()
        mine.finish()
        go.set() if step == 1 else None
    assert steps_in(tmp_path) == [2] and (tmp_path / "step_00000001.old.partial").is_dir()
    threading.Timer(0.05, go.set).start()
    mine.start(
        request(tmp_path, 3, keep=Retention(newest=1)), [shard(1.0)], background=False
    )  # waits for that
    assert not (tmp_path / "step_00000001.old.partial").exists()
    mine.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003"]
