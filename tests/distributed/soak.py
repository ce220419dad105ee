"""Trains many small steps and looks whether anything grows: memory of the processes, open files,
temporary folders, shared memory.

    python -m tests.distributed.soak --steps 20000 --out runs/soak

Two processes under `palm-ds run` and DeepSpeed, ZeRO 2, saving every 500 steps, evaluating every
1,000. Each second, it samples a process's memory, its open files, and the part of its heap that is
in use (heap_watch.py). The median of the last tenth of the run may exceed that of the fifth tenth
by 1 %; that of the memory by 3 %, since the allocator keeps some freed pieces.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
import yaml

from tests.distributed.heap_watch import FOLDER
from tests.distributed.random_kills import supervised
from tests.distributed.test_commands import MASKS, recipe_values
from tests.helpers.launchers import ROOT, environment
from tests.helpers.small_corpus import write_small_corpus

GROWTH = {"MB": 1.03, "files": 1.01, "MB of heap in use": 1.01}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out = args.out.absolute()
    args.out.mkdir(parents=True)
    (args.out / "tmp").mkdir()
    before, began = leftovers(args.out), time.monotonic()
    found = summary(run(args.out, args.steps)) | {
        "seconds": round(time.monotonic() - began),
        "remains": sorted(leftovers(args.out) - before),
    }
    print(json.dumps(found, indent=1))
    sys.exit(bool(found["grew"] or found["remains"]))


def leftovers(folder: Path) -> set[str]:
    """What lies in the folders for temporary files and shared memory, but for torch's cache."""
    every = {str(path) for each in (folder / "tmp", Path("/dev/shm")) for path in each.iterdir()}
    return {path for path in every if "/torchinductor_" not in path}


def run(folder: Path, steps: int) -> dict[int, list[tuple[float, int, float]]]:
    """{rank: memory in MB, open files and MB of heap in use, once a second} of a run to its end."""
    write_small_corpus(folder / "corpus", documents=400)
    values = recipe_values(
        folder / "corpus",
        stages=[{MASKS: steps}],
        evaluate={"every": 1000},
        save={"every": 500, "keep": 2},
        log={"every": 100},
    )
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    (folder / "zero.json").write_text('{"zero_optimization": {"stage": 2}}')
    script, recipe = str(ROOT / "tests/distributed/heap_watch.py"), str(folder / "recipe.yaml")
    command = [script, recipe, "--deepspeed_config", str(folder / "zero.json")]
    samples: dict[int, list[tuple[float, int]]] = {}
    metrics = folder / "run" / "metrics.jsonl"
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            supervised(command, folder / "run"),
            env=environment(folder, "soak") | {"TMPDIR": str(folder / "tmp"), FOLDER: str(folder)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        while process.poll() is None:
            time.sleep(1)
            for rank, sample in sampled(process.pid) if metrics.exists() else []:
                samples.setdefault(rank, []).append(sample)
    if process.returncode:
        sys.exit(f"palm-ds run ended with {process.returncode}; see {folder / 'log.txt'}")
    return {
        rank: [
            (*sample, heap)
            for sample, heap in zip(every, heaps(folder, rank)[-len(every) :], strict=False)
        ]
        for rank, every in samples.items()
    }


def heaps(folder: Path, rank: int) -> list[float]:
    return [float(line) for line in (folder / f"heap-{rank}.txt").read_text().split()]


def sampled(supervisor: int) -> list[tuple[int, tuple[float, int]]]:
    """(rank, (memory in MB, open files)) of each training process, its workers included."""
    found = []
    try:
        for process in psutil.Process(supervisor).children(recursive=True):
            line = " ".join(process.cmdline())
            if "--local_rank=" in line and "deepspeed.launcher.launch" not in line:
                if f"--local_rank={(rank := rank_of(line))}" in " ".join(parent_line(process)):
                    continue  # a worker: counted with its parent
                every = [process, *process.children(recursive=True)]
                memory = sum(each.memory_full_info().uss for each in every) / 2**20
                found.append((rank, (memory, sum(each.num_fds() for each in every))))
    except psutil.Error:
        return []
    return found


def rank_of(line: str) -> int:
    return int(line.partition("--local_rank=")[2].split()[0])


def parent_line(process: psutil.Process) -> list[str]:
    parent = process.parent()
    return parent.cmdline() if parent else []


def summary(samples: dict[int, list[tuple[float, int, float]]]) -> dict:
    """Medians of the fifth and the last tenth of the run, per rank."""
    found, grew = {}, []
    for rank, values in sorted(samples.items()):
        tenth = len(values) // 10
        for column, what in enumerate(GROWTH):
            early, late = (
                statistics.median(value[column] for value in part)
                for part in (values[4 * tenth : 5 * tenth], values[-tenth:])
            )
            found[f"rank {rank}, {what}"] = [round(early, 1), round(late, 1)]
            if late > early * GROWTH[what]:
                grew.append(f"rank {rank}, {what}")
    return {**found, "grew": grew}


if __name__ == "__main__":
    main()
