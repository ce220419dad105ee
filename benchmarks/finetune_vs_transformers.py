"""Fine-tuning beside transformers.Trainer: the same weights, rows, budget; scores and speed.

    python benchmarks/finetune_vs_transformers.py --model DIR --train train.tsv --dev dev.tsv
        --columns text_a=sentence --rows 4000 --epochs 1 --seeds 1 2 3

Classification of a text or a pair of texts. Each seed chooses the first weights of the classifier,
dropout, and the order of the rows; which rows are learned from is the same for all. The two run in
turns, each in a process of its own: AdamW, linear warm-up and fall, clipping at 1, dropout as the
checkpoint has it, fp32, rows cut at --length tokens. transformers pads each batch to its longest
row; palm_ds packs. A real token is one that is no padding. Times are of the steps alone, making the
batches included, evaluation, loading and saving not.

Prediction is timed on the dev rows with the weights that were just trained, from texts to scores,
the median of three passes: transformers.Trainer.predict in batches as large as in training.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_PASSES = 3


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a Hugging Face folder to start from")
    parser.add_argument("--train", required=True, help="rows to learn from, any format of a table")
    parser.add_argument("--dev", required=True, help="rows to score on")
    parser.add_argument("--columns", nargs="*", default=[], metavar="ROLE=NAME")
    parser.add_argument("--rows", type=int, default=0, help="train on N sampled rows; 0: all")
    parser.add_argument("--dev_rows", type=int, default=0, help="evaluate on the first N rows")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--contender", choices=("palm_ds", "transformers"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


ARGUMENTS = parse() if __name__ == "__main__" else None
if ARGUMENTS is not None:  # before torch reads them
    os.environ["OMP_NUM_THREADS"] = str(ARGUMENTS.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["DS_ACCELERATOR"] = "cpu"
    sys.path.insert(0, str(ROOT))


def main(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _write_rows(args, folder)
        found: dict[str, list[dict[str, float]]] = {"palm_ds": [], "transformers": []}
        for seed in args.seeds:
            for name, results in found.items():
                results.append(_in_process(name, seed, folder))
                print(f"seed {seed}  {name:13} {_line(results[-1])}", flush=True)
    ours, reference = ({k: _median(r, k) for k in r[0]} for r in found.values())
    print(f"median  palm_ds       {_line(ours)}")
    print(f"median  transformers  {_line(reference)}")
    for key in ("training", "prediction"):
        print(f"{key}: {ours[key] / reference[key]:.2f} times the real tokens a second")
    print(f"accuracy: {100 * (ours['accuracy'] - reference['accuracy']):+.1f} points")


def _median(results: list[dict[str, float]], key: str) -> float:
    return statistics.median(result[key] for result in results)


def _line(result: dict[str, float]) -> str:
    return (
        f"accuracy {100 * result['accuracy']:.1f} %  training {result['training']:,.0f} tokens/s  "
        f"prediction {result['prediction']:,.0f} tokens/s"
    )


def _in_process(name: str, seed: int, folder: Path) -> dict[str, float]:
    command = [sys.executable, __file__, *sys.argv[1:], "--contender", name]
    command += ["--folder", str(folder), "--seeds", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _write_rows(args: argparse.Namespace, folder: Path) -> None:
    """The rows that both read, as jsonl."""
    import numpy as np

    from palm_ds.data.reader import TableSettings, open_table

    columns = dict(pair.split("=", 1) for pair in args.columns)
    for name, path, most in (("train", args.train, args.rows), ("dev", args.dev, args.dev_rows)):
        table = open_table(path, TableSettings(columns=columns))
        numbers = np.arange(len(table))
        if name == "train" and most:
            numbers = np.sort(np.random.default_rng(0).permutation(len(table))[:most])
        elif most:
            numbers = numbers[:most]
        with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as file:
            for number in numbers:
                row = {k: v for k, v in table[int(number)].items() if k in _ROLES}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


_ROLES = ("text_a", "text_b", "label")


def _rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# palm_ds ---------------------------------------------------------------------------------------


def _ours(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    import contextlib
    import io

    from palm_ds.runtime.ds_config import read_ds_config
    from palm_ds.train.recipe import make_recipe
    from palm_ds.train.run_folder import RunSpec
    from palm_ds.train.train import train

    recipe = {
        "seed": args.seeds[0],
        "init_from": args.model,
        "length": args.length,
        "batch": f"{args.batch} examples",
        "optimizer": {"lr": args.lr, "weight_decay": 0.01, "clip": 1.0, "eps": 1e-8},
        "schedule": {"kind": "linear", "warmup": 0.1},
        "sources": {
            "rows": {
                "table": str(folder / "train.jsonl"),
                "validation": str(folder / "dev.jsonl"),
            }
        },
        "tasks": {"task": {"kind": "classification", "source": "rows"}},
        "stages": [{"task": f"{args.epochs} epochs"}],
        "save": {"every": 0},
        "log": {"every": 1_000_000},
    }
    clock: dict[str, float] = {}
    tokens = [0]
    scores: dict[str, Any] = {}

    def hear(event: str, facts: Any) -> None:
        if event == "begin":
            clock["begin"] = time.monotonic()
        elif event == "step":
            tokens[0] += facts["result"].tokens
            clock["end"] = time.monotonic()
        elif event == "evaluation":
            scores.update(facts["scores"])

    ds_config = read_ds_config(ROOT / "ds_configs/cpu.json")
    run_folder = folder / f"palm_ds-{args.seeds[0]}"
    run = RunSpec(recipe=make_recipe(recipe), ds_config=ds_config, folder=run_folder)
    with contextlib.redirect_stdout(io.StringIO()):
        assert train(run, hear) == 0
    return {
        "accuracy": scores["task"].accuracy,
        "training": tokens[0] / (clock["end"] - clock["begin"]),
        "prediction": _our_prediction(run_folder, folder / "dev.jsonl"),
    }


def _our_prediction(run: Path, rows: Path) -> float:
    """Real tokens a second, from texts to predictions."""
    import numpy as np

    from palm_ds.data.reader import open_table
    from palm_ds.inference.predictor import open_predictor

    predictor = open_predictor(str(run))
    (each,) = predictor.passes
    table = open_table(str(rows), each.read)

    source = predictor.source(table)  # to count its tokens: each pass makes them again
    columns = [column for column in ("text_a", "text_b") if column in table.columns]
    lengths = sum(source.encoded(column).lengths + 1 for column in columns) + 1
    tokens = float(np.minimum(lengths, predictor.recipe.length).sum())

    def predict() -> float:
        found = predictor.predict(each, predictor.source(table))
        assert sum(len(chunk.predictions["task"]) for chunk in found) == len(table)
        return tokens

    return _rate(predict)


def _rate(predict: Callable[[], float]) -> float:
    """Of a pass that gives its number of real tokens: how many a second, the median of a few."""
    rates = []
    for _ in range(_PASSES):
        started = time.monotonic()
        rates.append(predict() / (time.monotonic() - started))
    return statistics.median(rates)


# transformers ----------------------------------------------------------------------------------


def _theirs(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    train, dev = _rows(folder / "train.jsonl"), _rows(folder / "dev.jsonl")
    labels = sorted({row["label"] for row in train})
    tokenizer = AutoTokenizer.from_pretrained(args.model)

    def examples(rows: list[dict[str, str]]) -> list[dict[str, Any]]:
        texts = [row["text_a"] for row in rows]
        pairs = [row["text_b"] for row in rows] if "text_b" in rows[0] else None
        found = tokenizer(texts, pairs, truncation=True, max_length=args.length)
        return [
            {key: found[key][i] for key in found} | {"labels": labels.index(row["label"])}
            for i, row in enumerate(rows)
        ]

    torch.manual_seed(args.seeds[0])
    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=len(labels))
    learned = examples(train)
    trainer = _their_trainer(args, folder, model, tokenizer, learned)
    started = time.monotonic()
    trainer.train()
    training = time.monotonic() - started
    right = [0]

    def predict() -> float:
        rows = examples(dev)
        scores, targets, _ = trainer.predict(rows)
        right[0] = int((scores.argmax(-1) == targets).sum())
        return float(sum(len(row["input_ids"]) for row in rows))

    prediction = _rate(predict)
    return {
        "accuracy": right[0] / len(dev),
        "training": args.epochs * sum(len(row["input_ids"]) for row in learned) / training,
        "prediction": prediction,
    }


def _their_trainer(
    args: argparse.Namespace, folder: Path, model: Any, tokenizer: Any, learned: list[Any]
) -> Any:
    from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

    settings = TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=args.batch,
        num_train_epochs=args.epochs,
        learning_rate=args.lr,
        weight_decay=0.01,
        warmup_steps=int(0.1 * -(-len(learned) // args.batch) * args.epochs),
        lr_scheduler_type="linear",
        max_grad_norm=1.0,
        seed=args.seeds[0],
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        use_cpu=True,
    )
    return Trainer(
        model=model,
        args=settings,
        train_dataset=learned,  # type: ignore[arg-type]
        data_collator=DataCollatorWithPadding(tokenizer),
    )


if __name__ == "__main__":
    assert ARGUMENTS is not None
    if ARGUMENTS.contender is None:
        main(ARGUMENTS)
    else:
        contend = {"palm_ds": _ours, "transformers": _theirs}[ARGUMENTS.contender]
        print(json.dumps(contend(ARGUMENTS, Path(ARGUMENTS.folder))))
