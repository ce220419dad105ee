from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.runtime.processes import processes
from palm_ds.runtime.processes.processes import check_supported, device_named
from tests.helpers import warm_python


def run(code: str) -> subprocess.CompletedProcess[str]:
    return warm_python.run(["-c", code], timeout=60)


@pytest.mark.parametrize(
    ("name", "why"), [("tpu", "not a device"), ("cuda:99", "cannot be used here")]
)
def test_a_device_that_is_not_there_is_one_line(name: str, why: str) -> None:
    assert device_named("cpu").type == "cpu"
    with pytest.raises(UserError, match=f"device: '{name}': {why}.*; there are: cpu") as caught:
        device_named(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["zero_quantized_weights", "zero_quantized_gradients"])
def test_what_needs_a_gpu_is_one_line(key: str) -> None:
    """DeepSpeed ended in a traceback about an operator."""
    ds_config = make_ds_config({"zero_optimization": {"stage": 3, key: True}}, where="m.json")
    with pytest.raises(UserError, match=f"m.json: zero_optimization.{key}: needs a GPU"):
        check_supported(ds_config, torch.device("cpu"))
    check_supported(ds_config, torch.device("cuda"))
    check_supported(make_ds_config({"zero_optimization": {"stage": 3}}), torch.device("cpu"))


@pytest.mark.parametrize(
    ("device", "count", "local"), [("cuda", 1, "0"), ("cuda", 4, "3"), ("cpu", 1, "3")]
)
def test_a_task_of_srun_may_see_its_own_gpu_alone(
    device: str, count: int, local: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--gpus-per-task 1` ended in CUDA's "invalid device ordinal"."""
    _under_srun(device, count, monkeypatch)
    assert processes._place().rank == 3
    assert os.environ["LOCAL_RANK"] == local


def test_more_tasks_of_srun_than_gpus_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    _under_srun("cuda", 2, monkeypatch)
    with pytest.raises(UserError, match="this process needs cuda:3, but there are 2 here"):
        processes._place()


def _under_srun(device: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of four tasks on a host with so many devices."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # restored after what the test sets
        monkeypatch.delenv(name)
    for name in ("PROCID", "LOCALID"):
        monkeypatch.setenv(f"SLURM_{name}", "3")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    found = SimpleNamespace(device_count=lambda: count, device_name=lambda: device)
    monkeypatch.setattr(processes, "accelerator", lambda: found)


def test_one_process_alone_is_quiet() -> None:
    code = (
        "from palm_ds.runtime.deepspeed.ds_config import make_ds_config\n"
        "from palm_ds.runtime.processes.processes import start, stop\n"
        "first, second = start(make_ds_config({})), start(make_ds_config({}))\n"
        "assert (first.rank, second.world) == (0, 1)\n"
        "assert (first.gather('x'), first.sum([3])) == (['x'], [3])\n"
        "first.barrier(); stop(); stop()\n"
        "import sys; assert not {'mlflow', 'torch._inductor.compile_fx'} & set(sys.modules)\n"
        "from deepspeed.runtime.zero.muon.original_muon import muon_update\n"
        "assert not {'torch._inductor.compile_fx'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code]  # a cold start: what is imported is quiet and light too
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_network_interface_that_is_not_there_is_one_line() -> None:
    code = (
        "import os; os.environ['GLOO_SOCKET_IFNAME'] = 'nosuch'\n"
        "from palm_ds.runtime.deepspeed.ds_config import make_ds_config\n"
        "from palm_ds.runtime.processes.processes import start\n"
        "start(make_ds_config({}))"
    )
    last = run(code).stderr.strip().splitlines()[-1]
    assert last.endswith(
        "UserError: GLOO_SOCKET_IFNAME=nosuch: no such network interface; correct or unset it"
    )


def test_a_process_ends_with_its_own_code_before_destructors_abort_it() -> None:
    code = (
        "import atexit, ctypes, sys, threading, time\n"
        "from palm_ds.runtime.processes.processes import end_without_destructors\n"
        "left = threading.Event()\n"
        "def let_go():\n"
        "    left.wait(); time.sleep(0.05)\n"
        "    print('let go', flush=True)\n"
        "threading.Thread(target=let_go, daemon=True).start()\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.on_exit(libc.abort, None)\n"
        "atexit.register(end_without_destructors)\n"
        "atexit.register(left.set)\n"
        "print('said', flush=True)\n"
        "sys.exit(3)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, "said\nlet go\n")
