"""Trains on two hosts (network namespaces with their own sshd) under `palm-ds run`, takes one away,
and measures until nothing of that start runs and until the run is finished. Needs root.

    python -m tests.distributed.lost_host --fault link --out runs/lost_host      # or: host
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.distributed.random_kills import prepare
from tests.helpers.hosts import hosts
from tests.helpers.launchers import MARK, PROGRAMS, environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", choices=["link", "host"], required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out = args.out.absolute()
    args.out.mkdir(parents=True)
    command = prepare(args.out, steps=40)
    (args.out / "hosts").write_text("w1 slots=1\nw2 slots=1\n")
    variables = environment(args.out, "lost-host") | {"PALM_TEST_STEP_SECONDS": "0.4"}
    deepspeed = [sys.executable, str(PROGRAMS / "deepspeed"), "--hostfile", f"{args.out}/hosts"]
    with hosts(3, args.out) as cluster, (args.out / "log.txt").open("wb") as log:
        supervisor = [sys.executable, "-m", "palm_ds.cli.run", "--ssh", cluster.ssh, "--"]
        words = [*supervisor, *deepspeed, *command, "--run_dir", str(args.out / "run")]
        run = subprocess.Popen(cluster.inside(0, words), env=variables, stdout=log, stderr=log)
        wait_for_steps(args.out / "run/metrics.jsonl", 5, run)
        first, began = ranks(), time.monotonic()
        cluster.link(2, "down") if args.fault == "link" else cluster.kill(2)
        while any(process.is_running() for process in first):
            time.sleep(0.2)
        gone = time.monotonic() - began
        code = run.wait(600)
    seconds = {"until nothing runs": round(gone), "until the end": round(time.monotonic() - began)}
    print(json.dumps({"processes": len(first), "exit code": code} | seconds))
    sys.exit(code)


def wait_for_steps(metrics: Path, steps: int, run: subprocess.Popen[bytes]) -> None:
    while run.poll() is None:
        if metrics.exists() and metrics.read_text().count('"kind": "step"') >= steps:
            return
        time.sleep(0.2)
    sys.exit("it ended too early")


def ranks() -> list[psutil.Process]:
    """The training processes on all hosts."""
    found = []
    for process in psutil.process_iter():
        try:
            variables = process.environ()
        except (psutil.Error, OSError):
            continue
        if "RANK" in variables and variables.get(MARK) == "lost-host":
            found.append(process)
    return found


if __name__ == "__main__":
    main()
