"""Classes from 8 or 16 labeled texts each: accuracy of three ways to learn them.

    python benchmarks/few_shot.py --data DATA --model MINILM --output runs/few_shot [--seeds 1 2 3]
    python benchmarks/few_shot.py --data DATA --model MINILM --output runs/few_shot --table

    regression  scikit-learn's logistic regression, its defaults, on the frozen vectors
    plain       `classification` alone: batch 16, lr 5e-5, as many steps as `pairs` has below
    few_shot    launch/recipes/finetune/few_shot.yaml

Rows are sampled by seed from SST-2 (sentiment, two classes) and Restaurant8k (which slots a turn
fills: its seven most frequent sets), and scored on `--test_rows` of their test rows, always the
same. A run that is done already is not repeated. `--table` prints means and standard
errors of what is there.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import multiprocessing
import pkgutil
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import palm_ds
from palm_ds.common.rng import derive_key, permutation_at

RECIPE = Path(__file__).parents[1] / "launch/recipes/finetune/few_shot.yaml"
SETS = ("sst2", "restaurant8k")
SIZES = (8, 16)
METHODS = ("regression", "plain", "few_shot")
SLOTS = (
    "",
    "people",
    "time",
    "date",
    "first_name last_name",
    "people time",
    "date people",
)

Row = tuple[str, str]
"""A text and its class."""


def sst2(data: Path, part: str) -> list[Row]:
    lines = next(data.rglob(f"sst2/{part}.tsv")).read_text("utf-8").splitlines()[1:]
    return [(text.strip(), label) for text, label in (line.split("\t") for line in lines)]


def restaurant8k(data: Path, part: str) -> list[Row]:
    name = {"train": "train_0", "test": "test"}[part]
    turns = json.loads(next(data.rglob(f"restaurant8k/{name}.json")).read_text("utf-8"))
    rows = []
    for turn in turns:
        slots = " ".join(sorted({each["slot"] for each in turn.get("labels", ())}))
        text = " ".join(turn["userInput"]["text"].split())
        if slots in SLOTS and text:
            rows.append((text, slots or "nothing"))
    return rows


def sampled(rows: Sequence[Row], each: int, seed: int) -> list[Row]:
    """`each` different texts of every class."""
    chosen = []
    for label in sorted({label for _, label in rows}):
        texts = list(dict.fromkeys(text for text, own in rows if own == label))
        at = permutation_at(derive_key("few shot", seed, label), len(texts), np.arange(each))
        chosen += [(texts[i], label) for i in at]
    return chosen


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    lines = [{"text_a": text, "label": label} for text, label in rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


# ---- the three ways ----


def frozen(model: Path, rows: Sequence[Row], cache: Path) -> np.ndarray:
    """(rows, hidden) the vectors of texts, computed once."""
    import palm_ds as palm

    if not cache.exists():
        texts = [text for text, _ in rows]
        np.save(cache, np.asarray(palm.Backbone.from_pretrained(model)(texts)))
    return np.load(cache)


def regression(model: Path, train: Sequence[Row], test: Sequence[Row], folder: Path) -> float:
    from sklearn.linear_model import LogisticRegression

    texts = folder.parent / f"{folder.name.split('_')[0]}_test.npy"
    vectors = frozen(model, train, folder / "few.npy"), frozen(model, test, texts)
    answers = [[label for _, label in rows] for rows in (train, test)]
    fitted = LogisticRegression(max_iter=1000).fit(vectors[0], answers[0])
    return float(fitted.score(vectors[1], answers[1]))


def finetuned(recipe: Mapping[str, object], test: Sequence[Row], folder: Path) -> float:
    import palm_ds as palm
    from palm_ds.cli.main import main

    (folder / "recipe.yaml").write_text(yaml.safe_dump(dict(recipe)), "utf-8")
    words = ["finetune", str(folder / "recipe.yaml"), "--deepspeed_config", "cpu"]
    if main([*words, "--run_dir", str(folder / "run"), "export_onnx=[]"]):
        raise SystemExit(f"{folder}: the run failed")
    made: Any = palm.load(folder / "run").predict([text for text, _ in test])["topic"]
    shutil.rmtree(folder / "run")
    return float(np.mean([x["label"] == label for x, (_, label) in zip(made, test, strict=True)]))


def few_shot(model: Path, train: Sequence[Row], test: Sequence[Row], folder: Path) -> float:
    recipe = yaml.safe_load(RECIPE.read_text("utf-8")) | {"init_from": str(model)}
    recipe["sources"]["few"]["table"] = str(folder / "few.jsonl")
    return finetuned(recipe, test, folder)


def plain(model: Path, train: Sequence[Row], test: Sequence[Row], folder: Path) -> float:
    recipe = yaml.safe_load(RECIPE.read_text("utf-8")) | {"init_from": str(model)}
    epochs = int(recipe["stages"][0]["pairs"].split()[0])
    recipe |= {
        "sources": {"few": {"table": str(folder / "few.jsonl")}},
        "tasks": {"topic": {"kind": "classification", "source": "few", "max_length": 64}},
        "stages": [{"topic": f"{2 * epochs} epochs"}],
        "schedule": {"kind": "linear", "warmup": 0.1},
    }
    return finetuned(recipe, test, folder)


WAYS: Mapping[str, Callable[[Path, Sequence[Row], Sequence[Row], Path], float]] = {
    "regression": regression,
    "plain": plain,
    "few_shot": few_shot,
}
READ = {"sst2": sst2, "restaurant8k": restaurant8k}


# ---- all of them ----


def one(args: argparse.Namespace, name: str, each: int, seed: int, method: str) -> None:
    folder = args.output / f"{name}_{each}_{seed}_{method}"
    folder.mkdir(parents=True, exist_ok=True)
    test = READ[name](args.data, "test")
    chosen = permutation_at(derive_key("test", name), len(test), np.arange(args.test_rows))
    test = [test[i] for i in chosen]
    train = sampled(READ[name](args.data, "train"), each, seed)
    write_rows(folder / "few.jsonl", train)
    accuracy = WAYS[method](args.model, train, test, folder)
    (folder / "accuracy.json").write_text(json.dumps(accuracy))


def run_all(args: argparse.Namespace) -> None:
    """Each run in a process of its own, forked from this one."""
    for module in pkgutil.walk_packages(palm_ds.__path__, "palm_ds."):  # once for all runs
        with contextlib.suppress(ImportError):
            importlib.import_module(module.name)
    context = multiprocessing.get_context("fork")
    runs = itertools.product(args.sets, args.sizes, args.seeds, METHODS)
    for name, each, seed, method in runs:
        done = args.output / f"{name}_{each}_{seed}_{method}/accuracy.json"
        if not done.exists():
            child = context.Process(target=one, args=(args, name, each, seed, method))
            child.start()
            child.join()
        print(done.parent.name, done.read_text() if done.exists() else "failed", flush=True)


def table(args: argparse.Namespace) -> None:
    """Mean and standard error over the seeds."""
    print("| | texts of a class | seeds |", " | ".join(METHODS), "|")
    print("|---|---|---|" + "---|" * len(METHODS))
    for name in args.sets:
        for each in args.sizes:
            files = [
                sorted(args.output.glob(f"{name}_{each}_*_{way}/accuracy.json")) for way in METHODS
            ]
            values = [[float(file.read_text()) for file in own] for own in files]
            cells = [f"{np.mean(x):.3f} ± {_error(x):.3f}" if x else "" for x in values]
            print(f"| {name} | {each} | {min(map(len, values))} |", " | ".join(cells), "|")


def _error(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", default=SETS, choices=SETS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    parser.add_argument("--test_rows", type=int, default=400)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    (table if args.table else run_all)(args)


if __name__ == "__main__":
    main()
