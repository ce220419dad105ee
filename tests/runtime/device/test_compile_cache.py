"""Compiled code survives a restart, in a folder that the user can choose."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from palm_ds.runtime.device.compile_cache import TORCH, TRITON, use_compile_cache


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (TORCH, TRITON):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)


def test_it_is_in_the_users_cache_one_for_each_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PALM_DS_CACHE", str(tmp_path))
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    folder = tmp_path / "compile" / "node7"
    assert use_compile_cache() == folder
    assert os.environ[TORCH] == str(folder) and os.environ[TRITON] == str(folder / "triton")
    assert not folder.exists()  # until something is compiled
    assert use_compile_cache() == folder


def test_what_the_user_has_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALM_DS_CACHE", str(tmp_path))
    monkeypatch.setenv(TRITON, "/fast/triton")
    use_compile_cache()
    assert os.environ[TRITON] == "/fast/triton"
    monkeypatch.setenv(TORCH, "/fast/torch")
    assert use_compile_cache() == Path("/fast/torch") and os.environ[TORCH] == "/fast/torch"


def test_torch_keeps_its_own_where_the_cache_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PALM_DS_CACHE", str(tmp_path))
    monkeypatch.setattr("os.access", lambda *_: False)
    assert use_compile_cache() is None and TORCH not in os.environ
