import math
import sys
from types import SimpleNamespace

import pytest
import torch

from palm_ds.runtime.device.device_figures import compile_count, peak_flops, take_memory_use


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
