from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
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
