"""What pretraining is worth to a text generator: titles of laws from passages of them.

    python benchmarks/titles.py rows --data laws.jsonl --work runs/titles
    palm-ds prepare runs/titles/0/corpus runs/titles/0/corpus.jsonl --language zh \\
        --train wordpiece --vocab_size 4000
    python benchmarks/titles.py train --work runs/titles --seeds 1 2 3
    python benchmarks/titles.py score --work runs/titles --seeds 1 2 3

`rows` reads documents {"title", "text"} with a blank line between paragraphs. One title in four is
held out with all its passages, and its text is not in `corpus.jsonl` either, which is what models
are pretrained on. Which ones is the fold: --folds 0 1 2 3 holds out each title once, each fold in
a folder of its number, with a corpus of its own to prepare.

`train` fine-tunes three models with each seed: from random weights, and pretrained word by word or
with both flows. Both read the same passages in as many steps: a row holds as many more tokens as it
has queries. It writes titles greedily and with 4 beams. A finished run is not repeated. --steps is
that of pretraining, --only NAME trains some models.

`score` prints ROUGE-L on characters by `rouge-score`, over all folds, also of two simple rules: the
first characters of the passage, as many as titles have on average, and the most frequent title.
Standard errors are of 2,000 bootstrap samples of the held-out titles, and say nothing of seeds.
Perplexities are those of the correct titles.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.cpu import compute_on_cpu  # noqa: E402

FOLDS = 4
"""One of this number of titles is held out."""
CHARACTERS = 100
"""Of a passage: whole paragraphs, at least one."""
PASSAGES = {"train": 12, "test": 6}
"""The most of each title."""
PRETRAINED: Mapping[str, Mapping[str, Any] | None] = {
    "none": None,
    "word": {"word_weight": 1.0, "length": 80},
    "both": {"word_weight": 0.5, "length": 96},
}
"""How the models are pretrained: the weight of the word-by-word flow, and tokens of a row."""
ROWS = 24
"""Rows of a step of pretraining."""
DECODING: Mapping[str, Mapping[str, Any]] = {"greedy": {}, "4 beams": {"beams": 4}}
ENCODER: Mapping[str, Any] = {
    "preset": "tiny",
    "hidden_size": 128,
    "num_layers": 3,
    "num_heads": 4,
    "max_positions": 192,
    "task_types": 0,
    "init_range": 0.03,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
OPTIMIZER: Mapping[str, Any] = {"lr": 1e-3, "weight_decay": 0.01, "clip": 1.0}
TASK = "titles"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("rows", "train", "score"))
    parser.add_argument("--data", type=Path, help="of `rows`: the documents")
    parser.add_argument("--work", type=Path, required=True, help="folder of rows and runs; kept")
    parser.add_argument("--folds", type=int, nargs="+", choices=range(FOLDS), default=[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="*", choices=PRETRAINED, default=list(PRETRAINED))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args(arguments)


# ---- rows ----


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    print(f"{path}: {len(lines):,} rows")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]


def passages(text: str) -> Iterator[str]:
    taken = ""
    for paragraph in text.split("\n\n"):
        if taken and len(taken) + len(paragraph) > CHARACTERS:
            yield taken
            taken = ""
        taken += paragraph
    yield taken


def spread(values: Sequence[str], most: int) -> list[str]:
    """At most `most` of them, evenly spread."""
    step = max(len(values) / most, 1.0)
    return [values[int(i * step)] for i in range(min(most, len(values)))]


def write_rows(args: argparse.Namespace, fold: int) -> None:
    work = args.work / str(fold)
    work.mkdir(parents=True, exist_ok=True)
    documents: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
    for document in read(args.data):
        held_out = crc32(document["title"].encode()) % FOLDS == fold
        documents["test" if held_out else "train"].append(document)
    write(work / "corpus.jsonl", documents["train"])
    for part, found in documents.items():
        rows = [
            {"source": passage, "target": document["title"]}
            for document in found
            for passage in spread(list(passages(document["text"])), PASSAGES[part])
        ]
        write(work / f"{part}.jsonl", rows)


# ---- runs ----


def pretraining(work: Path, seed: int, steps: int, flow: Mapping[str, Any]) -> dict[str, Any]:
    task = {"source": "text", "positions": "restart", "word_weight": flow["word_weight"]}
    return {
        "seed": seed,
        "backbone": ENCODER,
        "length": flow["length"],
        "batch": f"{ROWS * flow['length']} tokens",
        "optimizer": {**OPTIMIZER, "betas": [0.9, 0.98]},
        "schedule": {"kind": "wsd", "warmup": 60, "decay": steps // 3},
        "sources": {"text": {"corpus": str(work / "corpus")}},
        "held_out": 0.03,
        "tasks": {"span_generation": task},
        "stages": [{"span_generation": steps}],
        "evaluate": {"examples": 300},
        "log": {"every": 50},
    }


def fine_tuning(work: Path, seed: int, origin: Path | None) -> dict[str, Any]:
    tables = {"table": str(work / "train.jsonl"), "validation": str(work / "test.jsonl")}
    words = {"tokenizer": str(work / "corpus" / "tokenizer")}
    encoder = {"init_from": str(origin)} if origin else {"backbone": ENCODER}
    task = {"kind": "generation", "max_target": 24, "positions": "restart", "noise_rate": 0.3}
    return {
        **encoder,
        "seed": seed,
        "length": 160,
        "batch": "32 examples",
        "optimizer": OPTIMIZER,
        "schedule": {"kind": "linear", "warmup": 0.1},
        "sources": {"laws": tables if origin else tables | words},
        "tasks": {TASK: {**task, "source": "laws"}},
        "stages": [{TASK: "4 epochs"}],
        "log": {"every": 50},
    }


def trained(values: dict[str, Any], folder: Path) -> Path:
    """The folder of weights of a run, which is trained unless it has been."""
    from palm_ds.runtime.deepspeed.ds_config import make_ds_config
    from palm_ds.train.recipe.recipe import make_recipe
    from palm_ds.train.setup.run_folder import RunSpec
    from palm_ds.train.train import train

    if not (folder / "weights").exists():
        machine = make_ds_config({"train_micro_batch_size_per_gpu": 8})
        train(RunSpec(recipe=make_recipe(values), ds_config=machine, folder=folder))
    return folder / "weights"


def train_models(args: argparse.Namespace, fold: int) -> None:
    from palm_ds.api import load

    work = args.work / str(fold)
    rows = [{"source": row["source"]} for row in read(work / "test.jsonl")]
    for seed in args.seeds:
        for name in args.only:
            flow, folder, origin = PRETRAINED[name], work / name / str(seed), None
            if flow:
                origin = trained(pretraining(work, seed, args.steps, flow), folder / "pretrain")
            weights = trained(fine_tuning(work, seed, origin), folder / "titles")
            for way, settings in DECODING.items():
                written = load(str(weights)).predict(rows, generate=settings)[TASK]
                write(folder / f"{way}.jsonl", written)


# ---- scores ----


def rouge_l(predictions: Sequence[str], targets: Sequence[str]) -> np.ndarray:
    """(texts,) the F-measures over characters, in percent."""
    from rouge_score.rouge_scorer import RougeScorer

    class Characters:
        def tokenize(self, text: str) -> list[str]:
            return list("".join(text.split()))

    scorer = RougeScorer(["rougeL"], tokenizer=Characters())
    pairs = zip(targets, predictions, strict=True)
    return np.array([100 * scorer.score(a, b)["rougeL"].fmeasure for a, b in pairs])


def standard_error(scores: np.ndarray, groups: np.ndarray) -> float:
    """Of the mean of scores (n,) in groups (n,), by drawing groups with replacement."""
    many = np.bincount(groups)
    sums = np.bincount(groups, weights=scores)
    draws = np.random.default_rng(0).integers(len(many), size=(2000, len(many)))
    return float(np.std(sums[draws].sum(1) / many[draws].sum(1), ddof=1))


def perplexity(run: Path) -> float:
    from palm_ds.train.report.metrics_file import FILE, read_metrics

    return float(np.exp(read_metrics(run / FILE).evaluations[-1]["scores"][TASK]["loss"]))


def line(name: str, scores: np.ndarray, groups: np.ndarray, sign: str = "") -> str:
    """A row of the table, of scores (seeds, n)."""
    mean, each = scores.mean(), ", ".join(f"{seed.mean():{sign}.1f}" for seed in scores)
    error = standard_error(scores.mean(0), groups)
    return f"| {name} | {mean:{sign}.1f} ± {error:.1f} | {each if len(scores) > 1 else ''} |"


def score(args: argparse.Namespace) -> None:
    works = [args.work / str(fold) for fold in args.folds]
    given = [row for work in works for row in read(work / "test.jsonl")]
    targets = [row["target"] for row in given]
    groups = np.unique(targets, return_inverse=True)[1]
    usual = round(sum(map(len, targets)) / len(targets))
    often = [text for work in works for text in most_frequent(work)]
    found = {
        f"the first {usual} characters": rouge_l([row["source"][:usual] for row in given], targets),
        "the most frequent title": rouge_l(often, targets),
    }
    rows = [line(name, scores[None], groups) for name, scores in found.items()]
    for way in DECODING:
        models = {}
        for name in args.only:
            files = [
                [work / name / str(seed) / f"{way}.jsonl" for work in works] for seed in args.seeds
            ]
            texts = [[row["text"] for file in each for row in read(file)] for each in files]
            models[name] = np.stack([rouge_l(each, targets) for each in texts])
            rows.append(line(f"{name}, {way}", models[name], groups))
        names = list(models)
        for one, other in zip(names[1:], names[:-1], strict=True):
            rows.append(line(f"{one} - {other}, {way}", models[one] - models[other], groups, "+"))
    print("| | ROUGE-L | of each seed |\n|---|---|---|")
    print("\n".join(rows))
    for name in args.only:
        runs = [work / name / str(seed) / "titles" for seed in args.seeds for work in works]
        print(f"{name}: perplexity", ", ".join(f"{perplexity(run):.1f}" for run in runs))


def most_frequent(work: Path) -> list[str]:
    """The most frequent title to learn from, for each held-out passage."""
    title = Counter(row["target"] for row in read(work / "train.jsonl")).most_common(1)[0][0]
    return [title] * len(read(work / "test.jsonl"))


if __name__ == "__main__":
    given = parse()
    compute_on_cpu(given.threads)
    if given.command == "score":
        score(given)
    else:
        for fold in given.folds:
            {"rows": write_rows, "train": train_models}[given.command](given, fold)
