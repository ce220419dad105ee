"""Memory that is free, in a container and outside."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.runtime.device import memory
from palm_ds.runtime.device.memory import names_micro_batch


def test_what_only_caches_files_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CONTAINER", tmp_path)
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("4000\n")
    (tmp_path / "memory.stat").write_text("anon 1000\ninactive_file 2500\n")
    assert memory.free_host_memory() == 3500
    (tmp_path / "memory.current").write_text("9000\n")
    assert memory.free_host_memory() == 0


@pytest.mark.parametrize("limit", ["max", None])
def test_without_a_limit_it_is_that_of_the_machine(limit, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(memory, "_CONTAINER", tmp_path)
    if limit:
        (tmp_path / "memory.max").write_text(limit)
    assert 0 < memory.free_host_memory() <= psutil.virtual_memory().total


def test_a_full_gpu_is_one_line_with_the_key_that_helps() -> None:
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nGPU 0 has ...")
    with (
        pytest.raises(
            UserError, match=r"micro-batch of 64 rows .*2 GiB.*micro_batch_size"
        ) as found,
        names_micro_batch(64),
    ):
        raise full
    assert "\n" not in str(found.value)
