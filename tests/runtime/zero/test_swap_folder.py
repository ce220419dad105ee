"""Folders for optimizer state in files: who owns them, and hosts that cannot have them."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.runtime.deepspeed.ds_config import DSConfig, make_ds_config
from palm_ds.runtime.zero import swap_folder
from palm_ds.runtime.zero.swap_folder import (
    SwapFolder,
    check_swap_room,
    delete_abandoned,
    describe_swapping,
    prepare_swapping,
    swap_buffer_bytes,
)


class Two:
    """Two processes on this host, as one of them sees them."""

    rank, world = 0, 2

    def gather(self, value: Any) -> list[Any]:
        return [value, value]


TWO: Any = Two()


def on(path: Path, **zero: Any) -> DSConfig:
    offload = {"device": "nvme", "nvme_path": str(path)}
    return make_ds_config({"zero_optimization": {"stage": 3, "offload_optimizer": offload} | zero})


def test_folders_are_apart_and_removed(tmp_path: Path) -> None:
    config = on(tmp_path)
    model = torch.nn.Linear(3, 3)
    folders = [SwapFolder.claim(config, model, TWO) for _ in range(2)]
    sections = {"zero_optimization": {"offload_optimizer": {"nvme_path": "as in the file"}}}
    paths = [
        folder.in_config(sections)["zero_optimization"]["offload_optimizer"]["nvme_path"]
        for folder in folders
    ]
    assert len(set(paths)) == 2 and all(Path(path).is_dir() for path in paths)
    assert sections["zero_optimization"]["offload_optimizer"]["nvme_path"] == "as in the file"
    delete_abandoned(tmp_path)  # nobody's
    assert all(Path(path).is_dir() for path in paths)
    for folder in folders:
        folder.remove()
        folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_without_files_there_is_no_folder() -> None:
    config = make_ds_config({})
    prepare_swapping(config)
    folder = SwapFolder.claim(config, torch.nn.Linear(3, 3), TWO)
    assert folder.in_config({"a": 1}) == {"a": 1}
    folder.remove()
    assert describe_swapping(config) == []


def test_the_folder_of_a_killed_process_is_deleted_and_no_other(tmp_path: Path) -> None:
    ready, done = os.pipe()
    child = os.fork()
    if child == 0:
        claimed, _lock = swap_folder._claim(tmp_path)
        (claimed / "0.swp").write_text("moments")
        os.write(done, b".")
        signal.pause()
    os.read(ready, 1)
    mine = tmp_path / "my own"
    mine.mkdir()
    delete_abandoned(tmp_path)
    assert list(tmp_path.rglob("*.swp"))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    delete_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == [mine]


def refused(config: DSConfig, message: str, model: torch.nn.Module | None = None) -> None:
    with pytest.raises(UserError, match=message) as caught:
        if model is None:
            prepare_swapping(config)
        else:
            check_swap_room(config, model, TWO)
    assert "\n" not in str(caught.value)


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    key = "zero_optimization.offload_optimizer.nvme_path: "
    file = tmp_path / "file"
    file.touch()
    refused(on(tmp_path / "none"), f"{key}.*/none: no such folder")
    refused(on(file), f"{key}.*/file: not a folder")
    refused(on(Path("/proc")), f"{key}/proc: cannot be written")


def test_folders_without_locks_are_refused(tmp_path: Path, no_locks: None) -> None:
    refused(on(tmp_path), "nvme_path: .*: this file system has no locks .*local disk")
    assert list(tmp_path.iterdir()) == []


def test_without_a_compiler_or_libaio_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    def load(self: object, verbose: bool = True) -> None:
        raise RuntimeError("Unable to JIT load the async_io op")

    monkeypatch.setattr(AsyncIOBuilder, "load", load)
    refused(on(tmp_path), r'device: "nvme" needs .*\(Unable to JIT load .*libaio.*compiler')
    assert list(tmp_path.iterdir()) == []


def test_too_small_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(1000, 1000, bias=False)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(swap_folder, "_lockable_bytes", lambda: float("inf"))
    for free, fits in ((13e6, True), (11e6, False)):  # 12 bytes of each value, in two processes
        monkeypatch.setattr(shutil, "disk_usage", lambda path, f=free: usage._replace(free=int(f)))
        if fits:
            check_swap_room(on(tmp_path), model, TWO)
        else:
            refused(on(tmp_path), r"nvme_path: .* 11 MB free, .* takes 12 MB", model)


def test_too_little_locked_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed (0.19.8) would abort the process."""
    monkeypatch.setattr(swap_folder, "_lockable_bytes", lambda: 8e6)
    model = torch.nn.Linear(1000, 1000, bias=False)
    refused(on(tmp_path), r"buffer_count: buffers of 10 MB .* allows 8 MB; raise", model)
    check_swap_room(on(tmp_path, sub_group_size=400_000), model, TWO)
    assert swap_buffer_bytes(on(tmp_path), 1e12) == 5 * 4 * 1e8  # sub_group_size of ours


def test_lockable_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (unlimited, unlimited))
    assert swap_folder._lockable_bytes() == float("inf")


def test_the_log_says_that_training_waits(tmp_path: Path) -> None:
    (line,) = describe_swapping(on(tmp_path))
    assert re.search(f"files under {tmp_path} .*training waits", line)
