"""Memory of gradients and optimizer state: all weights, and LoRA.

    python benchmarks/lora_memory.py MODEL

One process for each, on the same random texts: the growth of its resident memory from the start of
the first step, with the model loaded, to the last of a few steps of a classification. The batch is
small, so that gradients and optimizer state are most of it.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

WAYS: dict[str, dict[str, Any]] = {
    "LoRA, rank 8 on query and value": {"lora": {"rank": 8, "targets": ["query", "value"]}},
    "LoRA, rank 8 on all matrices": {"lora": {"rank": 8, "targets": "all"}},
    "all weights": {},
}


def train(model: str, way: str, folder: str) -> None:
    """Train a few steps and print by how many MB memory grew."""
    import palm_ds as palm

    rng = random.Random(0)
    words = ["good", "bad", "a", "film", "the", "plot", "and", "music"]
    rows = [
        {"text_a": " ".join(rng.choices(words, k=12)), "label": ("no", "yes")[n % 2]}
        for n in range(16)
    ]
    trainer = palm.Trainer(
        palm.tasks.Classification.on(train=rows, dev=rows[:2]),
        backbone=model,
        batch=4,
        epochs=1,
        lr=1e-4,
        length=32,
        folder=folder,
        recipe={"save": {"every": 0}, **WAYS[way]},
        deepspeed_config={"zero_optimization": {"stage": 0}},
    )
    sizes: list[float] = []

    def measure(event: object) -> None:
        if isinstance(event, palm.event.BeginTraining | palm.event.EndIteration):
            sizes.append(psutil.Process().memory_info().rss / 1e6)

    trainer.train(measure)
    print(f"grown {max(sizes) - sizes[0]:.0f}", flush=True)


def grown(model: str, way: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, model, "--way", way, "--folder", folder]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return next(float(x.split()[1]) for x in done.stdout.splitlines() if x.startswith("grown "))


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of training: LoRA and all weights.")
    parser.add_argument("model", help="a checkpoint of any format")
    parser.add_argument("--way", choices=list(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        train(args.model, args.way, args.folder)
        return
    print("| trained | growth, MB |\n|---|---:|")
    for way in WAYS:
        print(f"| {way} | {grown(args.model, way):,.0f} |", flush=True)


if __name__ == "__main__":
    main()
