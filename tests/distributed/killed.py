"""Two processes train and save in the background, and are killed with SIGKILL again and again, at
chosen moments of the writing and at any; each time they start again from what is there. Each loss
ever computed is written down. A slow disk makes every write last until after the next step.

The processes are forked from one that has imported everything, so that a start costs little.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from palm_ds.runtime.checkpoint import checkpoint
from palm_ds.runtime.checkpoint import writer as checkpoint_writer
from palm_ds.runtime.step.gradient_accumulation import StepResult
from tests.distributed.tiny import make_engine, train
from tests.helpers.warm_python import free_port

STEPS, EVERY, WORLD = 12, 2, 2
STAGE = 2
WRITE_SECONDS = 0.1
PATIENCE = 3.0  # seconds; a launcher ends the others immediately
HOLD_AT = 9  # the step at which a kill at any time is waited for: what follows is for later moments


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at(moment: str, step: int) -> None:
    """Make this process kill itself at a certain moment of the save after `step` steps."""
    name = checkpoint.folder_name(step)

    def before(owner: Any, attribute: str, when: Callable[..., bool]) -> None:
        inner = getattr(owner, attribute)

        def wrapped(*values: Any, **options: Any) -> Any:
            if when(*values):
                die()
            return inner(*values, **options)

        setattr(owner, attribute, wrapped)

    if moment in ("in a shard", "after the shards"):
        inner = checkpoint.FileManifest.write

        def write(self: Any, path: Any, make: Any) -> None:
            inner(self, path, make)
            if name in str(path):
                if moment == "in a shard":
                    os.truncate(path, os.path.getsize(path) // 2)
                die()

        checkpoint.FileManifest.write = write  # type: ignore[method-assign]
    elif moment == "before the copy":
        before(checkpoint_writer, "_frozen", lambda request: request.step == step)
    elif moment == "written by all":
        before(checkpoint, "publish", lambda request, *_: request.step == step)
    elif moment == "before the manifest":
        before(checkpoint, "_publish", lambda partial, *_: name in partial.name)
    elif moment == "before the rename":
        before(checkpoint.os, "replace", lambda old, new: Path(new).name == name)
    elif moment == "after the rename":
        before(checkpoint, "prune", lambda _folder, newest: newest == step)
    elif moment == "while old ones go":
        before(
            checkpoint.shutil,
            "rmtree",
            lambda path: ".old" in str(path) and (Path(path).parent / name).exists(),
        )
    else:
        raise AssertionError(moment)


def work(folder: Path, rank: int, moment: tuple[int, str, int] | float | None) -> None:
    """One process, from its start to the last step or its death."""
    slow_disk()
    timed = isinstance(moment, float)
    if isinstance(moment, tuple) and moment[0] == rank and moment[1] != "step":
        kill_at(moment[1], moment[2])
    engine = make_engine(STAGE, micro=8, dropout=0.1)
    state = engine.load(folder / "checkpoints")
    step = state["step"] if state else 0
    record(folder, engine.rank, {"start": step})
    pending, spent = False, []

    def finish() -> None:
        nonlocal pending
        if pending:
            engine.finish_save()
        pending = False

    def after(result: StepResult) -> None:
        if result.checkpoint_written:
            finish()
        elif pending:
            spent.append(step)

    while step < STEPS:
        if moment == (rank, "step", step):
            die()
        while timed and step == HOLD_AT:
            time.sleep(1)
        losses = train(engine, range(step, step + 1), after=after)
        record(folder, engine.rank, {"step": step, "loss": losses[0], "norm": engine.grad_norm})
        step += 1
        if step % EVERY == 0:
            finish()
            pending = engine.start_save(folder / "checkpoints", {"step": step}, step=step)
    finish()
    record(folder, engine.rank, {"trained while writing": spent})
    engine.close()


def slow_disk() -> None:
    inner = checkpoint.FileManifest.write

    def write(self: Any, path: Any, make: Any) -> None:
        time.sleep(WRITE_SECONDS)
        inner(self, path, make)

    checkpoint.FileManifest.write = write  # type: ignore[method-assign]


def record(folder: Path, rank: int, facts: dict[str, Any]) -> None:
    if rank == 0:
        with open(folder / "record.jsonl", "a") as file:
            file.write(json.dumps(facts) + "\n")


def start(folder: Path, rank: int, port: int, moment: Any) -> int:
    pid = os.fork()
    if pid:
        return pid
    log = os.open(folder / f"log{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        work(folder, rank, moment)
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def attempt(folder: Path, moment: tuple[int, str, int] | float | None = None) -> list[int]:
    """Exit codes of the processes (negative: the signal). `moment`: of a process that kills itself,
    or seconds until one is killed; the others get a little time to notice."""
    folder.mkdir(exist_ok=True)
    port = free_port()
    pids = [start(folder, rank, port, moment) for rank in range(WORLD)]
    codes: dict[int, int] = {}
    started, first_end = time.monotonic(), None
    after = moment if isinstance(moment, float) else None
    while len(codes) < WORLD:
        for pid in set(pids) - set(codes):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
                first_end = first_end or time.monotonic()
        now = time.monotonic()
        if after is not None and now - started > after:
            if not codes:
                os.kill(pids[int(after * 10) % WORLD], signal.SIGKILL)
            after = None
        if first_end and now - first_end > PATIENCE:
            for pid in set(pids) - set(codes):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def damage_newest(folder: Path, how: str) -> str:
    """Flip a bit in, or truncate, a shard of the newest checkpoint."""
    step = checkpoint.steps_in(folder / "checkpoints")[0]
    newest = folder / "checkpoints" / checkpoint.folder_name(step)
    path = sorted(newest.glob("*.safetensors"))[-1]
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[len(data) // 2] ^= 16
        path.write_bytes(data)
    else:
        path.write_bytes(data[: len(data) // 2])
    return newest.name


MOMENTS: list[Any] = [
    (0, "step", 1),
    (1, "in a shard", 2),
    (0, "in a shard", 2),
    (1, "before the copy", 2),
    (0, "before the manifest", 2),
    (1, "after the shards", 4),
    (1, "written by all", 4),
    (0, "before the rename", 4),
    (0, "after the rename", 4),
    "flip",  # of 4: on from 2
    (1, "step", 5),
    (0, "while old ones go", 6),
    "truncate",  # of 6: on from 4
]
FURTHER: list[Any] = [
    (1, "in a shard", 8),
    0.3,
    0.9,
    1.5,
    (0, "while old ones go", 10),
    (0, "step", 11),
]


def again_and_again(base: str, *, every: bool) -> dict[str, Any]:
    """`every`: at further moments, and at any."""
    place = Path(base)
    results: dict[str, Any] = {"whole": attempt(place / "whole"), "kills": 0, "damaged": []}
    folder = place / "killed"
    for moment in MOMENTS + (FURTHER if every else []):
        if isinstance(moment, str):
            results["damaged"].append(damage_newest(folder, moment))
            continue
        codes = attempt(folder, moment)
        results["kills"] += codes.count(-signal.SIGKILL) > 0
        results.setdefault("codes", []).append([str(moment), *codes])
    results["last"] = attempt(folder)
    for name in ("whole", "killed"):
        lines = (place / name / "record.jsonl").read_text().splitlines()
        results[name + " record"] = [json.loads(line) for line in lines]
    results["log"] = (folder / "log0.txt").read_text()
    results["left"] = sorted(p.name for p in (folder / "checkpoints").iterdir())
    return results
