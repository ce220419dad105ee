"""Memory and time of a conversion, compared with plain torch.load + save_pretrained of the same
model.

    python benchmarks/convert.py --gigabytes 1.5 --folder /tmp/somewhere

A Bert-shaped model of about that size in fp32 is written as pytorch_model.bin. Each way runs in a
process of its own, three times, in turns; memory is the most that the process had resident beyond
what it had with its libraries imported. Mapped file pages count, though the system may take them
back at any time. Writing ends when the files are synced.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

WIDTH, HEADS, WORDS = 1024, 16, 30522
WAYS = ("plain", "convert", "convert, checked", "to ours", "from ours")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1.5)
    parser.add_argument("--folder", type=Path, required=True, help="scratch; three times the size")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measured(args.way, args.folder, args.threads)))
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    size = make(args.folder, args.gigabytes)
    print(
        f"a model of {size / 1e9:.2f} GB, {args.threads} thread(s), {args.rounds} rounds in turns"
    )
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(args.rounds):
        for way in WAYS:
            found[way].append(run(way, args))
    for way, results in found.items():
        seconds = statistics.median(each["seconds"] for each in results)
        most = max(each["bytes"] for each in results)
        print(f"{way:18} {seconds:6.1f} s   memory {most / size:.2f} of the model", flush=True)
    plain = statistics.median(each["seconds"] for each in found["plain"])
    mine = statistics.median(each["seconds"] for each in found["convert"])
    print(f"convert takes {mine / plain:.2f} times as long as the plain way")


def make(folder: Path, gigabytes: float) -> int:
    """The model, and a palm_ds folder of it; its bytes."""
    import torch
    from transformers import BertConfig, BertForMaskedLM

    layers = max(round((gigabytes * 1e9 / 4 - WORDS * WIDTH) / (12 * WIDTH * WIDTH)), 1)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        architectures=["BertForMaskedLM"],
    )
    model = BertForMaskedLM(config)
    config.save_pretrained(folder / "source")
    state = {name: x for name, x in model.state_dict().items() if ".decoder." not in name}
    torch.save(state, folder / "source" / "pytorch_model.bin")
    from palm_ds.weights.convert.convert import ConversionOptions, convert

    shutil.rmtree(folder / "ours", ignore_errors=True)
    convert(folder / "source", folder / "ours", "palm_ds", ConversionOptions(verify=False))
    return sum(x.numel() * x.element_size() for x in state.values())


def run(way: str, args: argparse.Namespace) -> dict[str, float]:
    """One way in a process of its own."""
    command = [sys.executable, __file__, "--folder", str(args.folder), "--way", way]
    threads = str(args.threads)
    done = subprocess.run(
        [*command, "--threads", threads],
        env={**os.environ, "OMP_NUM_THREADS": threads},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def measured(way: str, folder: Path, threads: int) -> dict[str, float]:
    import torch

    torch.set_num_threads(threads)
    work = prepared(way, folder, folder / "target")
    shutil.rmtree(folder / "target", ignore_errors=True)
    with Watch() as watch:
        started = time.perf_counter()
        work()
        sync(folder / "target")
        seconds = time.perf_counter() - started
    shutil.rmtree(folder / "target", ignore_errors=True)
    return {"seconds": seconds, "bytes": watch.most - watch.first}


def prepared(way: str, folder: Path, target: Path) -> Callable[[], object]:
    """The work, its libraries imported."""
    if way == "plain":
        return lambda: plain(folder / "source", target)
    from palm_ds.weights.convert.convert import ConversionOptions, convert

    source = folder / ("ours" if way == "from ours" else "source")
    to = "palm_ds" if way == "to ours" else "huggingface"
    options = ConversionOptions(verify=way == "convert, checked")
    return lambda: convert(source, target, to, options)


def plain(source: Path, target: Path) -> None:
    """The five lines a user would write."""
    import torch
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig.from_pretrained(source)
    state = torch.load(source / "pytorch_model.bin", weights_only=True)
    model = BertForMaskedLM.from_pretrained(None, config=config, state_dict=state)
    model.save_pretrained(target)


def sync(folder: Path) -> None:
    for file in folder.iterdir():
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


class Watch:
    """The most memory that this process has resident, looked at a hundred times a second."""

    def __enter__(self) -> Watch:
        import transformers  # noqa: F401  not what is measured

        from palm_ds.weights.convert import convert  # noqa: F401

        self.process, self.done = psutil.Process(), threading.Event()
        self.first = self.most = self.process.memory_info().rss
        self.thread = threading.Thread(target=self.look)
        self.thread.start()
        return self

    def look(self) -> None:
        while not self.done.wait(0.01):
            self.most = max(self.most, self.process.memory_info().rss)

    def __exit__(self, *_error: object) -> None:
        self.done.set()
        self.thread.join()


if __name__ == "__main__":
    main()
