"""Memory that is free, in a container and outside."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from palm_ds.runtime import memory


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
