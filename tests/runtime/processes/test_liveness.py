"""Signs of life between processes: farewells, silence, and what each ends with."""

from __future__ import annotations

import selectors
import socket
from pathlib import Path

import pytest

from palm_ds.runtime.processes import liveness
from palm_ds.runtime.processes.launch_env import LaunchedProcess
from palm_ds.runtime.processes.liveness import Liveness, PeerLink
from tests.helpers.warm_python import clear_away, start_together

PROGRAM = """
import os, signal, sys, time
import torch.distributed as dist
from palm_ds.runtime.processes import liveness
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.runtime.processes.processes import leave, start, stop
processes = start(make_ds_config({"palm_ds": {"peer_seconds": 2}}))
liveness.reached(7)
processes.barrier()
time.sleep(1)
if processes.rank == 1:
    LAST
    time.sleep(60)
DO
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("last", "do", "codes", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "", (1, -9), "was killed or crashed"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", "", (42, None), "no sign of life for 2 seconds"),
        ("leave(2)", "", (2, 2), "ended with exit code 2"),
        ("leave(7)", "", (1, 7), "ended with exit code 7"),
        ("liveness.end(1, 'KeyError: x'); os._exit(1)", "", (1, 1), "code 1: KeyError: x"),
        ("time.sleep(1); os._exit(3 if liveness.end(2) else 9)", "leave(2)", (2, 3), ""),
        ("time.sleep(0.5); leave(2)", "time.sleep(1.5); leave(2)", (2, 2), ""),  # the same mistake
        ("leave(0)", "time.sleep(4); leave(0)", (0, 0), ""),
    ],
)
def test_the_end_of_a_process(last, do, codes, said, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.replace("LAST", last).replace("DO", do))
    programs = start_together(2, [tmp_path / "program.py"], env={})
    try:
        output, _ = programs[0].communicate(30)
        assert programs[0].returncode == codes[0], output
        assert codes[1] is None or programs[1].wait(10) == codes[1]
        lines = [line for line in output.splitlines() if line.startswith("error: rank 1 on ")]
        assert len(lines) == bool(said)
        assert all("(last step 7)" in line and said in line for line in lines)
    finally:
        clear_away(programs)


@pytest.mark.parametrize(
    ("last", "ends"),
    [
        ({"code": 0}, []),
        ({"code": 2, "why": "lr: above 1"}, ["rank 1 on h (last step 3) ended with exit code 2"]),
        ({"lost": "rank 1 was asked to stop", "code": 143}, ["rank 1 was asked to stop"]),
    ],
)
def test_what_a_process_says_together_with_its_greeting(last, ends, monkeypatch) -> None:
    """It ended before rank 0 had looked at its connection."""
    place = LaunchedProcess(rank=0, world=2, address="127.0.0.1", port=0)
    watching = Liveness([], place, seconds=5, secret="s")
    left: list[str] = []
    monkeypatch.setattr(watching, "_leave", lambda text, code, lost=None: left.append(text))
    here, there = socket.socketpair()
    with there:
        other = PeerLink(there)
        other.say(secret="s", rank=1, host="h")
        other.say(step=3)
        other.say(**last)
    here.setblocking(False)
    with here, selectors.DefaultSelector() as selector:
        link = PeerLink(here)
        selector.register(here, selectors.EVENT_READ, link)
        watching._greet(link, selector)
        for key, _ in selector.select(0):
            watching._read(key.data, selector)
    assert [text.partition(":")[0] for text in left[:1]] == ends  # the first ends rank 0


@pytest.mark.parametrize(
    ("master", "reachable"), [("127.0.0.1", False), ("localhost", False), ("node1", True)]
)
def test_only_runs_of_several_hosts_listen_to_others(master, reachable) -> None:
    with liveness._listen(master) as server:
        assert (server.getsockname()[0] != "127.0.0.1") == reachable
