from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.runtime.device import memory
from palm_ds.runtime.device.memory import (
    compile_count,
    names_micro_batch,
    peak_flops,
    take_memory_use,
)


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


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch):
    """Gives "cuda" a name and a use of memory."""

    def fake(name: str) -> torch.device:
        numbers = {
            "get_device_name": lambda _: name,
            "max_memory_allocated": lambda _: 10,
            "max_memory_reserved": lambda _: 20,
            "reset_peak_memory_stats": lambda _: None,
        }
        for attribute, function in numbers.items():
            monkeypatch.setattr(torch.cuda, attribute, function)
        return torch.device("cuda")

    return fake


def test_a_known_card_has_a_peak_and_others_none(fake_gpu) -> None:
    assert peak_flops(fake_gpu("NVIDIA A100-SXM4-80GB"), "bf16") == 312e12
    assert peak_flops(fake_gpu("NVIDIA A100-SXM4-80GB"), "fp32") == 19.5e12  # TF32 is off
    assert math.isnan(peak_flops(fake_gpu("Tesla V100-SXM2-16GB"), "bf16"))
    assert math.isnan(peak_flops(fake_gpu("NVIDIA Something"), "bf16"))
    assert math.isnan(peak_flops(torch.device("cpu"), "fp32"))


def test_memory_is_that_of_a_gpu(fake_gpu) -> None:
    used = take_memory_use(fake_gpu("NVIDIA L4"))
    assert used is not None and (used.allocated, used.reserved) == (10, 20)
    assert take_memory_use(torch.device("cpu")) is None


def test_compilations_are_counted_if_there_is_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)
    assert compile_count() == 0
    utils = SimpleNamespace(counters={"stats": {"unique_graphs": 3}})
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", utils)  # type: ignore[arg-type]
    assert compile_count() == 3
