"""Embeds texts with palm_ds and with sentence-transformers' `encode`, in turns, in one process.

    python benchmarks/embed.py models/minilm texts.txt --rounds 5

It needs `pip install sentence-transformers`. Model, threads, precision and texts (a text on each
line) are the same; each has its own batch size, or the one given. Reported are texts per second and
their ratio (medians over the rounds), by the clock and in processor time, which other programs on
the machine disturb less, and the largest difference of a number. In bf16 both are compared with
sentence-transformers' vectors in fp32.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from palm_ds.inference.trained_model import TrainedModel
from palm_ds.runtime.device.torch_settings import DTYPES


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=int, default=2000, help="texts")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--batch_tokens", type=int, default=0)
    parser.add_argument("--batch_size", type=int, default=32)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    texts = args.texts.read_text("utf-8").splitlines()[: args.limit]
    ways = {"palm_ds": palm_ds(args), "sentence-transformers": sentence_transformers(args)}
    vectors = {name: way(texts) for name, way in ways.items()}  # warms up
    clocks = {"elapsed": time.perf_counter, "processor": time.process_time}
    seconds: dict[tuple[str, str], list[float]] = {(x, y): [] for x in clocks for y in ways}
    for _ in range(args.rounds):
        for name, way in ways.items():
            started = {clock: read() for clock, read in clocks.items()}
            way(texts)
            for clock, read in clocks.items():
                seconds[clock, name].append(read() - started[clock])
    for clock in clocks:
        median = {name: statistics.median(seconds[clock, name]) for name in ways}
        for name, value in median.items():
            print(f"{clock:10} {name:22} {len(texts) / value:8,.0f} texts/s")
        print(f"{clock:10} {median['sentence-transformers'] / median['palm_ds']:.2f} times")
    exact = sentence_transformers(args, torch.float32)(texts)
    for name, each in vectors.items():
        print(f"{name:33} {np.abs(each - exact).max():.1e} largest difference from fp32")


def palm_ds(args: argparse.Namespace) -> Callable[[list[str]], np.ndarray]:
    model = TrainedModel.open(args.model, precision=args.precision, batch_tokens=args.batch_tokens)
    return model.embedder().embed


def sentence_transformers(
    args: argparse.Namespace, dtype: torch.dtype | None = None
) -> Callable[[list[str]], np.ndarray]:
    from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found]

    dtype = dtype or DTYPES[args.precision]
    model = SentenceTransformer(str(args.model), device="cpu", model_kwargs={"dtype": dtype})
    return lambda texts: model.encode(
        texts, batch_size=args.batch_size, convert_to_numpy=True, show_progress_bar=False
    )


if __name__ == "__main__":
    main()
