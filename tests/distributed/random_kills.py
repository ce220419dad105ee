"""Kills processes of a supervised run at random, until it is finished; its weights must equal, byte
for byte, those of a run that nobody disturbed.

    python -m tests.distributed.random_kills --kills 100 --out runs/random_kills

Each kill takes a training process, DeepSpeed's launcher or its inner process, at a random moment of
training, every fourth one within 15 seconds of the last. A restart takes some 15 seconds on two
cores. A slow disk makes checkpoints take longer than a step; "while writing" counts the kills that
left one unfinished.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import yaml

from tests.distributed.test_commands import MASKS, recipe_values
from tests.helpers.launchers import PROGRAMS, ROOT, environment
from tests.helpers.small_corpus import write_small_corpus

WEIGHTS = ("weights/weights.safetensors", "hf/model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out = args.out.absolute()
    args.out.mkdir(parents=True)
    command = prepare(args.out, args.steps)
    subprocess.run(supervised(command, args.out / "whole"), env=variables(args.out, 0), check=True)
    killed = disturb(command, args)
    same = all(
        (args.out / "whole" / name).read_bytes() == (args.out / "killed" / name).read_bytes()
        for name in WEIGHTS
    )
    unfinished = (args.out / "log.txt").read_text().count("unfinished save; not used")
    total = {"total": sum(killed.values()), "while writing": unfinished}
    print(json.dumps({"kills": killed, **total, "bit for bit": same}))
    sys.exit(not same)


def prepare(folder: Path, steps: int) -> list[str]:
    """Recipe and DeepSpeed file, as arguments."""
    write_small_corpus(folder / "corpus")
    backbone = recipe_values(folder)["backbone"] | {"dropout": 0.1, "attention_dropout": 0.1}
    values = recipe_values(
        folder / "corpus",
        backbone=backbone,
        tasks={MASKS: {"source": "text", "kind": "tests.helpers.paced_task.Paced"}},
        stages=[{MASKS: steps}],
        evaluate={},
        save={"every": 2, "keep": 3},
    )
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    (folder / "zero.json").write_text('{"zero_optimization": {"stage": 2}}')
    recipe, ds_config = str(folder / "recipe.yaml"), str(folder / "zero.json")
    return [str(ROOT / "launch/pretrain.py"), recipe, "--deepspeed_config", ds_config]


def supervised(command: list[str], run: Path) -> list[str]:
    palm_ds = [sys.executable, "-m", "palm_ds.cli.run", "--restarts", "30", "--"]
    deepspeed = [sys.executable, str(PROGRAMS / "deepspeed"), "--num_gpus", "2"]
    return [*palm_ds, *deepspeed, *command, "--run_dir", str(run)]


def variables(folder: Path, step_seconds: float) -> dict[str, str]:
    seconds = {"STEP": step_seconds, "WRITE": 1.5 * step_seconds}
    paced = {f"PALM_TEST_{what}_SECONDS": str(value) for what, value in seconds.items()}
    return environment(folder, "random-kills") | paced


def disturb(command: list[str], args: argparse.Namespace) -> Counter[str]:
    """Run to the end under `args.kills` kills; returns how many of each kind."""
    rng, found = random.Random(args.seed), Counter[str]()
    with (args.out / "log.txt").open("wb") as log:
        run = subprocess.Popen(
            supervised(command, args.out / "killed"),
            env=variables(args.out, 0.4),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        while run.poll() is None:
            wait_for_moment(rng, args.out / "killed/metrics.jsonl", run)
            if sum(found.values()) < args.kills and (victim := choose(rng, run.pid)):
                kind, process = victim
                process.kill()
                found[kind] += 1
    if run.returncode:
        sys.exit(f"palm-ds run ended with {run.returncode}; see {args.out / 'log.txt'}")
    return found


def wait_for_moment(rng: random.Random, metrics: Path, run: subprocess.Popen[bytes]) -> None:
    """Soon after the last kill, or once the run trains again."""
    since = time.time()
    if rng.random() < 0.25:
        time.sleep(rng.uniform(0.0, 15.0))
        return
    while run.poll() is None and not (metrics.exists() and metrics.stat().st_mtime > since):
        time.sleep(0.2)
    time.sleep(rng.uniform(0.0, 3.0))


def choose(rng: random.Random, supervisor: int) -> tuple[str, psutil.Process] | None:
    """A process of the run, and what it is."""
    found: list[tuple[str, psutil.Process]] = []
    try:
        for process in psutil.Process(supervisor).children(recursive=True):
            line = " ".join(process.cmdline())
            if "--agent" not in line and (kind := kind_of(line)):
                found.append((kind, process))
    except psutil.Error:
        return None
    return rng.choice(found) if found else None


def kind_of(line: str) -> str:
    if "--local_rank=" in line and "deepspeed.launcher.launch" not in line:
        return "rank"
    if "deepspeed.launcher.launch" in line:
        return "inner launcher"
    return "launcher" if "/deepspeed" in line else ""


if __name__ == "__main__":
    main()
