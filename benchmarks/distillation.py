"""What a teacher is worth: MiniLM, fine-tuned on SST-2, teaches a student of three of its layers
and a bag of words.

    python benchmarks/distillation.py --data DIR --model DIR --work runs/distillation

DIR of --data has train.tsv and test.tsv of SST-2 (`sentence`, `label`), that of --model a Hugging
Face folder of an encoder; the student has every second of its layers. Teacher and students learn
from the same --rows; "more rows" are others of the training set without their labels, which the
teacher alone labels. Each student is trained with every seed: it chooses the first weights of the
head (of the bag of words: all weights), dropout and the order of rows. Scored: accuracy on
test.tsv. A finished run is not repeated. --only NAME trains some of them.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SOURCE = "sst2"
LENGTH = 64


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--work", required=True, type=Path, help="folder of runs; kept")
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--more", type=int, default=12000, help="rows without labels")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args(arguments)


ARGUMENTS = parse() if __name__ == "__main__" else None
if ARGUMENTS is not None:  # before torch reads them
    os.environ["OMP_NUM_THREADS"] = str(ARGUMENTS.threads)
    os.environ["DS_ACCELERATOR"] = "cpu"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A way to train a student."""

    name: str
    encoder: Mapping[str, Any]
    rows: str
    epochs: int
    lr: float
    taught: Mapping[str, Any] = field(default_factory=dict)
    stored: bool = False
    """Whether the teacher's scores are stored, for all seeds and epochs"""


THREE_LAYERS: Mapping[str, Any] = {"init_from": "student"}
BAG: Mapping[str, Any] = {"backbone": {"kind": "bag_of_words", "hidden_size": 128}}
SOFT = {"logits": {"temperature": 2.0}}
ARMS = (
    Arm(name="3 layers, labels", encoder=THREE_LAYERS, rows="rows", epochs=2, lr=1e-4),
    Arm(
        name="3 layers, labels and teacher",
        encoder=THREE_LAYERS,
        rows="rows",
        epochs=2,
        lr=1e-4,
        taught={**SOFT, "hidden_states": {}},
    ),
    Arm(name="bag of words, labels", encoder=BAG, rows="rows", epochs=10, lr=1e-3),
    Arm(
        name="bag of words, labels and teacher",
        encoder=BAG,
        rows="rows",
        epochs=10,
        lr=1e-3,
        taught=SOFT,
        stored=True,
    ),
    Arm(
        name="bag of words, labels and teacher, more rows",
        encoder=BAG,
        rows="more",
        epochs=4,
        lr=1e-3,
        taught=SOFT,
        stored=True,
    ),
)


def write_rows(args: argparse.Namespace) -> None:
    """The rows with labels, and these together with those without."""
    with (args.data / "train.tsv").open(encoding="utf-8") as file:
        every = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    rows = random.Random(0).sample(every, args.rows + args.more)
    unlabelled = [{**row, "label": None} for row in rows[args.rows :]]
    sets = {"rows": rows[: args.rows], "more": [*rows[: args.rows], *unlabelled]}
    for name, found in sets.items():
        text = "".join(json.dumps(row) + "\n" for row in found)
        (args.work / f"{name}.jsonl").write_text(text, encoding="utf-8")


def write_student(args: argparse.Namespace) -> None:
    """Every second layer of the model."""
    from palm_ds.weights import weights_folder
    from palm_ds.weights.formats.open import open_checkpoint
    from palm_ds.weights.formats.weights_info import WeightsInfo

    contents = open_checkpoint(args.model)
    state = {name: entry.read() for name, entry in contents.entries.items()}
    layers = list(range(1, contents.config.num_layers, 2))
    kept = {name: x for name, x in state.items() if not name.startswith("backbone.layers.")}
    for new, old in enumerate(layers):
        prefix = f"backbone.layers.{old}."
        parts = {n.removeprefix(prefix): x for n, x in state.items() if n.startswith(prefix)}
        kept |= {f"backbone.layers.{new}.{part}": x for part, x in parts.items()}
    info = WeightsInfo(backbone=replace(contents.config, num_layers=len(layers)))
    weights_folder.save_weights(kept, args.work / "student", info)


def recipe_of(args: argparse.Namespace, arm: Arm, seed: int) -> dict[str, Any]:
    encoder = dict(arm.encoder)
    if encoder == THREE_LAYERS:
        encoder["init_from"] = str(args.work / "student")
    values = {
        **encoder,
        "seed": seed,
        "length": LENGTH,
        "batch": "32 examples",
        "optimizer": {"lr": arm.lr, "weight_decay": 0.01},
        "schedule": {"kind": "linear", "warmup": 0.1},
        "sources": {
            SOURCE: {
                "table": str(args.work / f"{arm.rows}.jsonl"),
                "validation": str(args.data / "test.tsv"),
                "tokenizer": str(args.model),
                "read": {"columns": {"text_a": "sentence"}, "missing_labels": "keep"},
            }
        },
        "tasks": {SOURCE: {"kind": "classification", "source": SOURCE}},
        "stages": [{SOURCE: f"{arm.epochs} epochs"}],
        "save": {"every": 0},
        "log": {"every": 50},
    }
    if arm.taught:
        values["teacher"] = {"path": str(args.work / "teacher"), **arm.taught}
    if arm.stored:
        values["teacher"]["file"] = str(args.work / f"{arm.rows}.parquet")
    return values


def score(args: argparse.Namespace, arm: Arm, seed: int, folder: Path) -> float:
    """The accuracy after training, which is done unless it has been."""
    from palm_ds.inference.teach import teach
    from palm_ds.runtime.ds_config import make_ds_config
    from palm_ds.runtime.processes import start
    from palm_ds.train.recipe import make_recipe
    from palm_ds.train.report.metrics_file import FILE, read_metrics
    from palm_ds.train.run_folder import RunSpec
    from palm_ds.train.train import train

    if not (folder / "weights").exists():
        machine = make_ds_config({"train_micro_batch_size_per_gpu": 4})
        recipe = make_recipe(recipe_of(args, arm, seed))
        if arm.stored and recipe.teacher and not Path(recipe.teacher.file).exists():
            scores = {"ds_config": machine, "processes": start(machine)}
            teach(recipe, Path(recipe.teacher.file), **scores)
        train(RunSpec(recipe=recipe, ds_config=machine, folder=folder))
    (*_, last) = read_metrics(folder / FILE).evaluations
    return last["scores"][SOURCE]["metrics"]["accuracy"]


def main(args: argparse.Namespace) -> None:
    args.work.mkdir(parents=True, exist_ok=True)
    write_rows(args)
    write_student(args)
    whole = {"init_from": str(args.model)}
    teacher = Arm(name="teacher", encoder=whole, rows="rows", epochs=2, lr=5e-5)
    found = {"teacher": [score(args, teacher, 1, args.work / "teacher")]}
    for arm in ARMS:
        if args.only and arm.name not in args.only:
            continue
        folder = args.work / arm.name.replace(", ", "_").replace(" ", "_")
        runs = [score(args, arm, seed, folder / str(seed)) for seed in args.seeds]
        found[arm.name] = runs
    print("| | accuracy | of each seed |\n|---|---|---|")
    for name, runs in found.items():
        spread = f" ± {100 * statistics.stdev(runs):.1f}" if len(runs) > 1 else ""
        each = ", ".join(f"{100 * run:.1f}" for run in runs)
        print(f"| {name} | {100 * statistics.fmean(runs):.1f} %{spread} | {each} |")


if ARGUMENTS is not None:
    main(ARGUMENTS)
