from __future__ import annotations

from typing import Any

import pytest
import torch

from palm_ds.runtime.deepspeed.ds_config import DSConfig, make_ds_config
from palm_ds.runtime.device.tf32 import describe_tf32, use_tf32

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
