"""Predicts texts from Python with palm_ds and with transformers, in turns, in one process.

    python benchmarks/predict_python.py models/minilm texts.txt --rounds 5

The model is a Hugging Face folder of an encoder; it gets a new classification head of three
classes, the same on every side. Texts (a text on each line), threads and weights are the same.
Compared are

    one text     palm.load(...).predict([text])  with  model(**tokenizer(text)), the bare classes
    many texts   palm.load(...).predict(texts)   with  pipeline("text-classification"), by default
                 one text at a time, and with the best of some batch sizes

Reported are medians over the rounds, by the clock or in processor time (`--clock cpu`), which other
programs on the machine disturb less, their ratio, and the largest difference of a probability.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import palm_ds as palm

Predict = Callable[[Sequence[str]], list[list[float]]]
"""The probabilities of every text."""
CLOCKS = {"elapsed": time.perf_counter, "cpu": time.process_time}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=int, default=200, help="texts")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=CLOCKS, default="elapsed")
    parser.add_argument("--batch_sizes", type=int, nargs="*", default=[8, 32])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    texts = args.texts.read_text("utf-8").splitlines()[: args.limit]
    with tempfile.TemporaryDirectory() as folder:
        with_head(args.model, Path(folder))
        own = palm_ds(Path(folder))
        one = {"palm_ds": own, "transformers": bare(Path(folder))}
        sizes = {1: "pipeline", **{n: f"pipeline, batches of {n}" for n in args.batch_sizes}}
        many = {name: pipeline(Path(folder), size) for size, name in sizes.items()}
        single = [[text] for text in texts[:50]]
        print(f"one text at a time, {len(single)} texts: milliseconds a text")
        report(one, single, args.rounds, CLOCKS[args.clock])
        print(f"{len(texts)} texts in one call: milliseconds a text")
        report({"palm_ds": own, **many}, [texts], args.rounds, CLOCKS[args.clock])


def report(
    ways: Mapping[str, Predict],
    calls: Sequence[Sequence[str]],
    rounds: int,
    clock: Callable[[], float],
) -> None:
    """Print the median seconds of each way, next to those of the first."""
    found = {name: [way(texts) for texts in calls] for name, way in ways.items()}  # warms up
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            started = clock()
            for texts in calls:
                way(texts)
            seconds[name].append(clock() - started)
    count = sum(map(len, calls))
    median = {name: statistics.median(took) / count for name, took in seconds.items()}
    first, *others = median
    print(f"  {first:26} {median[first] * 1e3:8.2f}")
    for name in others:
        apart = (torch.tensor(found[name]) - torch.tensor(found[first])).abs().max()
        ratio = median[name] / median[first]
        print(f"  {name:26} {median[name] * 1e3:8.2f}  {ratio:5.2f} times; differs by {apart:.1e}")


def with_head(model: Path, folder: Path) -> None:
    """A copy of the encoder with a head of three classes."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(1)
    names = {0: "bad", 1: "fair", 2: "good"}
    made = AutoModelForSequenceClassification.from_pretrained(model, id2label=names)
    made.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)


def palm_ds(folder: Path) -> Predict:
    model = palm.load(folder, device="cpu")
    return lambda texts: [each["probs"] for each in model(texts)]


def bare(folder: Path) -> Predict:
    """The classes of transformers, one text at a time."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model: Any = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def predict(texts: Sequence[str]) -> list[list[float]]:
        with torch.inference_mode():
            given = tokenizer(list(texts), truncation=True, return_tensors="pt")
            return model(**given).logits.softmax(-1).tolist()

    return predict


def pipeline(folder: Path, size: int) -> Predict:
    import transformers

    made: Any = transformers.pipeline("text-classification", str(folder), device="cpu")
    order = ["bad", "fair", "good"]

    def predict(texts: Sequence[str]) -> list[list[float]]:
        found = made(list(texts), top_k=None, truncation=True, batch_size=size)
        scores = [{each["label"]: each["score"] for each in row} for row in found]
        return [[row[name] for name in order] for row in scores]

    return predict


if __name__ == "__main__":
    main()
