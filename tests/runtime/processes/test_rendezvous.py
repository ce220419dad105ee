"""Processes that do not come are named, and nobody waits for them in silence."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.helpers.warm_python import Program, clear_away, free_port

PROGRAM = """
import sys
from datetime import timedelta
from palm_ds.common.errors import exit_on_user_error
from palm_ds.runtime.processes import processes, rendezvous
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.runtime.processes.signals import stop_signals
rendezvous._TELL_SECONDS = 0.5
settings = make_ds_config({"palm_ds": {"peer_seconds": 2, "timeout_minutes": MINUTES}})
with exit_on_user_error(), stop_signals(starting=True) as flag:
    print("waiting", flush=True)
    for _ in range(TIMES):
        joined = processes.start(settings)
        print("together", joined.gather(joined.rank), flush=True)
        processes.stop()
"""


class Ranks:
    """Processes of a run, started one by one."""

    def __init__(self, folder: Path, *, world: int = 2, minutes: float = 1.0, times: int = 1):
        self.file, self.port = folder / "program.py", str(free_port())
        text = PROGRAM.replace("MINUTES", str(minutes)).replace("TIMES", str(times))
        self.file.write_text(text)
        self.world, self.programs = str(world), list[Program]()

    def start(self, rank: int, *, address: str = "127.0.0.1", **more: str) -> Program:
        names = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": self.world}
        master = {"MASTER_ADDR": address, "MASTER_PORT": self.port}
        self.programs.append(Program([self.file], env={**names, **master, **more}))
        return self.programs[-1]


def wait_for(program: Program, text: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while text not in program.output():
        assert time.monotonic() < deadline and program.poll() is None, program.output()
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("there", "missing"), [(0, "rank 1"), (1, "rank 0 at 127.0.0.1:")])
def test_a_missing_process_is_named_and_signals_work(
    number, there, missing, tmp_path: Path
) -> None:
    ranks = Ranks(tmp_path)
    try:
        program = ranks.start(there)
        wait_for(program, f"waits for {missing}")
        os.kill(program.pid, number)
        assert program.wait(5) == 75
        assert ("stopped before the first step" in program.output()) == (there == 0)
        assert "Traceback" not in program.output()
    finally:
        clear_away(ranks.programs)


@pytest.mark.parametrize(("there", "missing"), [(0, "rank 1"), (1, "rank 0 at 127.0.0.1:")])
def test_the_wait_ends_with_one_line(there: int, missing: str, tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, minutes=0.02)
    try:
        program = ranks.start(there)
        assert program.wait(30) == 42, program.output()
        last = program.output().splitlines()[-1]
        assert last.startswith(f"error: waited 0.02 minutes for {missing}"), program.output()
    finally:
        clear_away(ranks.programs)


@pytest.mark.parametrize(
    ("address", "problem"),
    [("no.such.host.invalid", ": "), ("192.0.2.1", ", which does not lead back to rank 0")],
)
def test_an_address_of_no_host_or_another_is_named(address, problem, tmp_path: Path) -> None:
    """Rank 0 waited for it without a word."""
    ranks = Ranks(tmp_path)
    try:
        program = ranks.start(0, address=address)
        wait_for(program, f"waits for MASTER_ADDR={address}{problem}")
        os.kill(program.pid, signal.SIGTERM)
        assert program.wait(5) == 75
    finally:
        clear_away(ranks.programs)


def test_a_late_process_is_waited_for_and_they_can_meet_again(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, times=3)
    try:
        first = ranks.start(1)
        wait_for(first, "waits for rank 0")
        second = ranks.start(0)
        for program in (first, second):
            assert program.wait(60) == 0, program.output()
            assert program.output().count("together [0, 1]") == 3
    finally:
        clear_away(ranks.programs)


def test_a_process_that_hangs_before_the_others_come_is_noticed(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, world=3)
    try:
        first, hanging = ranks.start(0), ranks.start(1)
        wait_for(first, "waits for rank 2\n")
        os.kill(hanging.pid, signal.SIGSTOP)
        assert first.wait(30) == 42
        said = f"error: rank 1 on {socket.gethostname()} (last step 0) has given no sign of life"
        assert said in first.output()
    finally:
        clear_away(ranks.programs)


def test_processes_that_torchrun_starts_again_meet(tmp_path: Path) -> None:
    """Its store still has the keys of those that ended while they waited for each other."""
    ranks = Ranks(tmp_path)
    store = TCPStore("127.0.0.1", int(ranks.port), is_master=True, wait_for_workers=False)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    try:
        before = ranks.start(0, **agent)
        wait_for(before, "waits for rank 1")
        before.kill()
        agent["TORCHELASTIC_RESTART_COUNT"] = "1"
        for program in [ranks.start(rank, **agent) for rank in (0, 1)]:
            assert program.wait(60) == 0, program.output()
            assert "together [0, 1]" in program.output()
    finally:
        clear_away(ranks.programs)
        del store


def test_two_processes_with_one_rank_are_refused(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, world=3)
    try:
        wait_for(ranks.start(0), "waits for rank 1, rank 2")
        twins = [ranks.start(1), ranks.start(1)]
        deadline = time.monotonic() + 30
        while all(twin.poll() is None for twin in twins) and time.monotonic() < deadline:
            time.sleep(0.05)
        (second,) = [twin for twin in twins if twin.poll() is not None]
        assert second.wait() == 2
        said = "error: RANK=1: started twice; each process needs a rank of its own"
        assert said in second.output()
    finally:
        clear_away(ranks.programs)


def test_a_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    try:
        with socket.create_server(("", int(ranks.port))):
            program = ranks.start(0)
            assert program.wait(30) == 1
        assert f"error: MASTER_PORT={ranks.port}: rank 0 cannot listen there" in program.output()
        assert "Traceback" not in program.output()
    finally:
        clear_away(ranks.programs)
