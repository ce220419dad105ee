from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from palm_ds.runtime.deepspeed.ds_config import DSConfig, make_ds_config
from palm_ds.runtime.device import torch_settings
from palm_ds.runtime.device.torch_settings import (
    TORCH,
    TRITON,
    collecting_between,
    describe_slow_precision,
    describe_tf32,
    use_compile_cache,
    use_tf32,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def ds_config(tf32: bool, **sections: Any) -> DSConfig:
    return make_ds_config({"palm_ds": {"tf32": tf32}, **sections})


@pytest.fixture
def restored():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_gpus_only(restored: None) -> None:
    use_tf32(True, CPU)
    assert torch.get_float32_matmul_precision() == "highest"
    use_tf32(True, GPU)
    # torch.compile reads the old setting, torch's own kernels the new one
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    use_tf32(False, GPU)
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"


def test_the_log_says_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def gpu(name: str, capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)

    assert describe_tf32(ds_config(False), CPU) == ""
    assert describe_tf32(ds_config(True), CPU) == "palm_ds.tf32: no effect on this device (cpu)"
    gpu("H100", (9, 0))
    assert "10 bits" in describe_tf32(ds_config(True), GPU)
    assert "palm_ds.tf32 makes" in describe_tf32(ds_config(False), GPU)
    assert describe_tf32(ds_config(False, bf16={"enabled": True}), GPU) == ""
    gpu("V100", (7, 0))
    assert describe_tf32(ds_config(True), GPU) == "palm_ds.tf32: no effect, V100 has no TF32"
    assert describe_tf32(ds_config(False), GPU) == ""


@pytest.mark.parametrize(("seconds", "said"), [(0.5, ""), (1.9, ""), (60.0, "60 times slower")])
def test_the_log_says_that_a_cpu_has_no_bf16(
    seconds: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = {torch.bfloat16: seconds, torch.float32: 1.0}
    monkeypatch.setattr(torch_settings, "_matmul_seconds", taken.__getitem__)
    line = describe_slow_precision("bf16", CPU)
    assert said in line if said else not line
    assert not describe_slow_precision("fp32", CPU)
    assert not describe_slow_precision("bf16", GPU)


def test_the_time_of_a_product_is_measured() -> None:
    assert 0 < torch_settings._matmul_seconds(torch.float32) < 1


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


class Cycle:
    def __init__(self) -> None:
        self.own = self


def test_cycles_are_collected_every_50_steps_only() -> None:
    assert gc.isenabled()
    alive = []
    for step in collecting_between(range(30, 120)):
        assert not gc.isenabled()
        if step in (30, 60):
            cycle = weakref.ref(Cycle())
        alive.append(cycle() is not None)
    assert gc.isenabled()
    assert alive == [True] * 20 + [False] * 10 + [True] * 40 + [False] * 20


def test_what_existed_before_is_searched_once_in_1000_steps_only() -> None:
    searched: list[int] = []

    def note(phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            searched.append(about["generation"])

    gc.callbacks.append(note)
    try:
        list(collecting_between(range(930, 1080)))
    finally:
        gc.callbacks.remove(note)
    assert searched == [2, 1, 2, 1]  # before the first step, and before 950, 1000 and 1050


def test_it_is_on_again_whatever_ends_the_loop() -> None:
    for step in collecting_between(range(9)):
        if step == 2:
            break
    assert gc.isenabled()
    with pytest.raises(KeyError):
        for _ in collecting_between(range(9)):
            raise KeyError
    assert gc.isenabled()
    gc.disable()
    list(collecting_between(range(2)))
    try:
        assert not gc.isenabled()  # as before
    finally:
        gc.enable()
