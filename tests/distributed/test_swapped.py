"""Optimizer state in files (`offload_optimizer.device: nvme`) changes nothing but memory and time.

These run where DeepSpeed's async_io is compiled, which takes minutes and is done once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palm_ds.runtime.deepspeed.deepspeed_import import import_deepspeed
from tests.helpers.launchers import PROGRAMS

pytestmark = pytest.mark.distributed
COMPILE = "from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load()"


@pytest.fixture
def compiled() -> dict[str, str]:
    """The variable with which programs find DeepSpeed's async_io, if nothing is left to compile."""
    import_deepspeed()
    import deepspeed
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    here = str(Path(deepspeed.__file__).parent)
    ninja = shutil.which("ninja", path=f"{PROGRAMS}:{os.environ['PATH']}")
    for rules in root.rglob("async_io/build.ninja"):
        if ninja and here in rules.read_text() and not rules.with_name("lock").exists():
            left = subprocess.run([ninja, "-n"], cwd=rules.parent, capture_output=True, text=True)
            if "no work to do" in left.stdout:
                return {"TORCH_EXTENSIONS_DIR": str(rules.parent.parent)}
    pytest.skip(
        "DeepSpeed's async_io is not compiled here; with libaio-dev, a C++ compiler and ninja: "
        f'python -c "{COMPILE}"'
    )


def assert_close(one: dict[str, Any], other: dict[str, Any], tolerance: float, what: str) -> None:
    np.testing.assert_allclose(one["losses"], other["losses"], rtol=tolerance, err_msg=what)
    for name in ("weights", "averages"):
        for key, value in one[name].items():
            assert value == pytest.approx(other[name][key], rel=1e-3, abs=1e-2), (what, key)


def test_state_in_files_trains_saves_and_resumes_as_in_memory(
    run_distributed, compiled: dict[str, str], tmp_path: Path
) -> None:
    """Two processes; then one that continues from their checkpoint and is killed, and one more."""
    disk = tmp_path / "disk"
    disk.mkdir()
    places = {"folder": tmp_path / "checkpoints", "disk": disk}
    every = places | {"kinds": ["fp32", "bf16", "fp16", "lamb", "stable"]}
    settings: dict[str, Any] = {"environment": compiled}
    two = run_distributed("swapped.compared", every, launcher="fork", **settings).result
    for kind, found in two.items():
        assert_close(found["files"], found["memory"], 1e-6, kind)
        assert found["resumed"] == found["files"], kind
        assert found["files"]["skipped"] == found["memory"]["skipped"], kind
    assert two["fp16"]["files"]["skipped"] > 0
    assert_close(two["fp32"]["crossed"], two["fp32"]["memory"], 1e-6, "from memory to files")
    assert_close(two["fp32"]["back"], two["fp32"]["memory"], 1e-6, "from files to memory")
    assert list(disk.iterdir()) == []

    alone: dict[str, Any] = settings | {"launcher": "python"}
    run_distributed("swapped.continued", places | {"killed": True}, code=-9, **alone)
    left = list(disk.rglob("*.swp"))
    assert left, "a killed process leaves its files"
    one = run_distributed("swapped.continued", places, **alone).result
    assert_close(one, two["fp32"]["memory"], 1e-5, "one process")
    assert list(disk.iterdir()) == []
