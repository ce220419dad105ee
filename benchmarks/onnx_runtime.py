"""Embeds texts with palm_ds and with the ONNX files of the same model in ONNX Runtime, in turns, in
one process.

    palm-ds convert models/minilm models/minilm-onnx --to onnx --precision int8
    python benchmarks/onnx_runtime.py models/minilm models/minilm-onnx texts.txt --rounds 5

Threads and texts (a text on each line) are the same. Two cases: all texts, sorted by length
(palm_ds packs them, ONNX Runtime pads batches of --batch_size), and one text at a time. Reported
are texts per second, the ratio to palm_ds (medians over the rounds), and the mean cosine to its
vectors.
"""

from __future__ import annotations

import argparse
import runpy
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from palm_ds.inference.trained_model import TrainedModel

RUN = Path(__file__).resolve().parent.parent / "tools" / "onnx" / "run.py"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path, help="of palm-ds convert --to onnx")
    parser.add_argument("texts", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=int, default=500, help="texts")
    parser.add_argument("--single", type=int, default=50, help="texts that are embedded one by one")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch_size", type=int, default=32)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    texts = args.texts.read_text("utf-8").splitlines()[: args.limit]
    ways: dict[str, Way] = {"palm_ds": TrainedModel.open(args.model).embedder().embed}
    for file in sorted((args.folder / "onnx").glob("*.onnx")):
        ways[file.name] = onnx_runtime(args, file.name)
    print(f"all {len(texts)} texts")
    compare(ways, lambda way: way(texts), len(texts), args.rounds)
    some = texts[: args.single]
    print("one at a time")
    compare(ways, lambda way: np.concatenate([way([x]) for x in some]), len(some), args.rounds)


Way = Callable[[Sequence[str]], np.ndarray]


def compare(
    ways: dict[str, Way], run: Callable[[Way], np.ndarray], count: int, rounds: int
) -> None:
    """Run the ways in turns and print their speeds."""
    vectors = {name: run(way) for name, way in ways.items()}  # warms up
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            run(way)
            seconds[name].append(time.perf_counter() - started)
    own = statistics.median(seconds["palm_ds"])
    for name, found in seconds.items():
        value = statistics.median(found)
        close = cosine(vectors[name], vectors["palm_ds"])
        print(f"  {name:18} {count / value:8,.0f} texts/s  {own / value:5.2f}  cosine {close:.5f}")


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return float(((one * other).sum(1) / lengths).mean())


def onnx_runtime(args: argparse.Namespace, file: str) -> Way:
    model = runpy.run_path(str(RUN))["OnnxFolder"](args.folder, file, threads=args.threads)

    def embed(texts: Sequence[str]) -> np.ndarray:
        encoded = model.encode(list(texts))
        order = np.argsort([-len(each.ids) for each in encoded], kind="stable")
        vectors: np.ndarray | None = None
        for first in range(0, len(order), args.batch_size):
            part = order[first : first + args.batch_size]
            found = model.run([encoded[n] for n in part], ["sentence_embedding"])
            if vectors is None:
                vectors = np.empty((len(order), found["sentence_embedding"].shape[1]), np.float32)
            vectors[part] = found["sentence_embedding"]
        assert vectors is not None, "at least one text"
        return vectors

    return embed


if __name__ == "__main__":
    main()
