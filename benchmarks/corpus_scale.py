"""What the size of a corpus costs a training process: memory, start, seeking, throughput.

    palm-ds prepare corpora/base text/
    python benchmarks/corpus_scale.py corpora/base --tokens 1e7 1e8 1e9 1e10 --scratch /big/disk

Each corpus is the documents of a prepared one again and again: its index and manifest are as large
as those of a real corpus of that size; its shards, of 64M tokens, are links to one file. Each is
measured in a fresh process. "Counting" happens once per corpus; everything else is what a process
of a run does whose corpus is counted. Memory is anonymous (private to the process), at its peak.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np  # noqa: E402
import yaml  # noqa: E402

from palm_ds.common.errors import exit_on_user_error  # noqa: E402
from palm_ds.corpus.store import Corpus, open_corpus  # noqa: E402
from palm_ds.corpus.writer import ShardSummary, ShardWriter, finish_corpus, shard_name  # noqa: E402
from palm_ds.train.recipe.recipe import read_recipe  # noqa: E402
from palm_ds.train.setup.build import build_held_out, build_stream  # noqa: E402
from palm_ds.train.setup.resolve import resolve  # noqa: E402
from palm_ds.train.setup.sources import open_data  # noqa: E402

SHARD_TOKENS = 1 << 26
STEPS = 20
TASKS = ("knowledge_masking", "sentence_reordering", "sentence_distance")
_COLUMNS = ("tokens", "documents", "counting_s", "start_s", "memory_mb", "seek_s", "tokens_per_s")


def main() -> None:
    args = _arguments()
    if args.measure:
        print(json.dumps(measure(Path(args.corpus), args.tasks)))
        return
    rows = []
    for tokens in args.tokens:
        with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
            write_repeated(open_corpus(args.corpus), int(tokens), Path(folder) / "corpus")
            command = [sys.executable, __file__, f"{folder}/corpus", "--measure", "--tasks"]
            found = subprocess.run(
                [*command, *args.tasks], check=True, stdout=subprocess.PIPE, text=True
            )
        rows.append(json.loads(found.stdout.splitlines()[-1]))
        print("  ".join(f"{name} {rows[-1][name]:,}" for name in _COLUMNS), flush=True)
    print(f"\n| {' | '.join(_COLUMNS)} |\n|{' --- |' * len(_COLUMNS)}")
    for row in rows:
        print(f"| {' | '.join(f'{row[name]:,}' for name in _COLUMNS)} |")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("corpus", help="a prepared corpus")
    add("--tokens", nargs="+", type=float, default=[1e7, 1e8, 1e9], help="(1e7 1e8 1e9)")
    add("--tasks", nargs="+", default=list(TASKS), help=f"({' '.join(TASKS)})")
    add("--scratch", help="folder for the corpora")
    add("--measure", action="store_true", help="measure this corpus itself")
    return parser.parse_args()


# The corpora -----------------------------------------------------------------------------------


def write_repeated(base: Corpus, tokens: int, folder: Path) -> None:
    """A corpus of the documents of `base` again and again, of at least `tokens` tokens."""
    folder.mkdir(parents=True)
    shards = max(1, round(tokens / SHARD_TOKENS))
    summary = _write_shard(base, tokens // shards, folder / shard_name(0, shards))
    parts = []
    for number in range(shards):
        name = shard_name(number, shards)
        if number:
            os.link(folder / shard_name(0, shards), folder / name)
        parts.append(replace(summary, shard=replace(summary.shard, name=name)))
    finish_corpus(
        folder,
        base.tokenizer(),
        parts,
        annotations=base.annotations,
        ids_type=base.manifest.ids_type,
    )


def _write_shard(base: Corpus, tokens: int, file: Path) -> ShardSummary:
    with ShardWriter(file, annotations=base.annotations, ids_type=base.manifest.ids_type) as shard:
        done = 0
        for name, text in _endless(base):
            shard.append(f"{name}/{done}", text.ids, text.annotations)
            done += len(text.ids)
            if done >= tokens:
                break
    return shard.summary()


def _endless(base: Corpus) -> Iterator:
    while True:
        for number in range(len(base)):
            yield base.document(number)


# What is measured ------------------------------------------------------------------------------


class PeakMemory:
    """Samples the anonymous memory of this process."""

    def __init__(self) -> None:
        self.peak, self._stop = _anonymous_mb(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self.peak = max(self.peak, _anonymous_mb())

    def stop(self) -> float:
        """The peak in MB."""
        self._stop.set()
        self._thread.join()
        return self.peak


def _anonymous_mb() -> float:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) / 1024
    return 0.0


def measure(folder: Path, tasks: list[str]) -> dict:
    recipe = folder.with_name("recipe.yaml")
    recipe.write_text(yaml.safe_dump(_recipe(folder, tasks)))
    began = _seconds()
    _open(recipe, 1)[1].batches(0, 0, 1, 8)  # counts the items
    counting = _seconds() - began
    before, memory, began = _anonymous_mb(), PeakMemory(), time.process_time()
    data, stream = _open(recipe, 2)
    stream.batches(0, 0, 1, 8)
    start = time.process_time() - began
    began = time.process_time()
    for step in range(1, STEPS):
        stream.batches(step, 0, 1, 8)
    seconds = time.process_time() - began
    peak = memory.stop()
    (corpus,) = data.corpora.values()
    return {
        "tokens": corpus.manifest.tokens,
        "documents": len(corpus),
        "counting_s": round(counting, 1),
        "start_s": round(start, 2),
        "memory_mb": round(peak - before),
        "seek_s": round(_seek(recipe), 2),
        "tokens_per_s": round((STEPS - 1) * stream.rows * stream.longest / seconds, -3),
    }


def _seconds() -> float:
    """Processor seconds of this process and the ones it has waited for."""
    return sum(os.times()[:4])


def _open(recipe: Path, seed: int):
    settings = read_recipe(recipe, [f"seed={seed}"])
    data = open_data(settings)
    settings = resolve(settings, data)
    stream = build_stream(settings, data)
    build_held_out(settings, data)
    return data, stream


def _seek(recipe: Path) -> float:
    """Seconds to build an example at a random place of an epoch, per task."""
    _, stream = _open(recipe, 3)
    began = time.process_time()
    for dataset in stream.datasets:
        n = int(0.7 * dataset.num_items)
        dataset.example(n, dataset.layouts(np.array([n]))[0])
    return (time.process_time() - began) / len(stream.datasets)


def _recipe(folder: Path, tasks: list[str]) -> dict:
    masking = "knowledge_masking"
    groups = [name if name == masking else f"{name} + {masking}" for name in tasks]
    return {
        "seed": 1,
        "backbone": {"hidden_size": 64, "num_layers": 1, "num_heads": 1, "token_types": 6},
        "length": 512,
        "batch": "64 rows",
        "sources": {"text": {"corpus": str(folder)}},
        "tasks": {name: {"source": "text"} for name in {*tasks, masking}},
        "stages": {"joint": groups, "steps": 1000},
        "optimizer": {"lr": 1e-4},
    }


if __name__ == "__main__":
    with exit_on_user_error():
        main()
