"""What a teacher is worth: MiniLM, fine-tuned on a data set, teaches a student of three of its
layers and a bag of words that have few labeled rows.

    python benchmarks/distillation.py --set SST-2 --data DIR --model DIR --work runs/distillation

DIR of --data has the files of the set, as its authors named them:

    SST-2           train.tsv, test.tsv; a sentence is positive or not
    SICK            SICK_train.txt, SICK_trial.txt, SICK_test_annotated.txt; of two sentences one
                    follows, is contradicted, or neither
    Restaurant8k    train_0.json, test.json; which slots a turn fills: its 16 most frequent sets

that of --model is a Hugging Face folder of an encoder; the student has every second of its layers.
Each student learns

    labels                          from --labeled rows, the same in every arm
    teacher                         from these and the teacher's scores of them
    teacher, unlabeled rows         the same, and the teacher's scores of the unlabeled rows
    teacher, augmented rows         instead of the others, ten copies that `palm-ds augment` makes
                                    of each labeled row

in the same number of steps of the same size, with every seed: it chooses the first weights of the
head (of the bag of words: all weights), dropout and the order of rows. The rows that the teacher
was trained on are others. `teacher` has a temperature of 2; other arms have another, or another
loss.

Reported are accuracies on the test, and the gain over the first arm with the same seed, with its
standard deviation over seeds and its standard error over the rows. A finished run is not repeated.
SST-2 has sentences and their phrases: scored are also --held_out sentences of train.tsv, and rows
that are part of one of them are not trained on.

To compare the first two where all these rows have labels:

    --labeled 12800 --unlabeled 0 --longer 4 --students bag --arms labels teacher
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.cpu import compute_on_cpu  # noqa: E402

TASK = "task"
LENGTH = 64
TEMPERATURE = 2.0

Row = Mapping[str, Any]
"""text_a, perhaps text_b, label; the label of an unlabeled row is None."""


@dataclass(frozen=True, kw_only=True)
class Learner:
    """A model to train."""

    name: str
    lr: float
    batch: int
    steps: int = 0
    """Those of the data set."""
    layers: str = ""
    """A folder in --work that it begins from; empty: a bag of words."""


TEACHER = Learner(name="teacher", layers="whole", lr=5e-5, batch=32)
STUDENTS: Mapping[str, Learner] = {
    "bag": Learner(name="bag of words", lr=1e-3, batch=32),
    "layers": Learner(name="3 layers", layers="half", lr=1e-4, batch=16),
}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What a student learns from."""

    rows: str
    taught: bool = True
    logits: Mapping[str, Any] = field(default_factory=lambda: {"temperature": TEMPERATURE})


ARMS: Mapping[str, Arm] = {
    "labels": Arm(rows="labeled", taught=False),
    "teacher": Arm(rows="labeled"),
    "teacher, unlabeled rows": Arm(rows="unlabeled"),
    "teacher, augmented rows": Arm(rows="augmented"),
    "teacher, temperature 1": Arm(rows="labeled", logits={}),
    "teacher, temperature 4": Arm(rows="labeled", logits={"temperature": 4.0}),
    "teacher, squared error": Arm(rows="labeled", logits={"loss": "mse"}),
}
FIRST_ARMS = list(ARMS)[:4]


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """Rows, and how many of those to train on each learns from."""

    read: Callable[[argparse.Namespace], tuple[list[Row], list[Row]]]
    """Rows to train on and to score."""
    teacher: int
    labeled: int
    unlabeled: int
    teacher_steps: int
    student_steps: Mapping[str, int]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", choices=SETS, default="SST-2", dest="data_set")
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--work", required=True, type=Path, help="folder of runs; kept")
    parser.add_argument("--labeled", type=int, help="rows; default: the data set's own")
    parser.add_argument("--unlabeled", type=int, help="likewise")
    parser.add_argument("--held_out", type=int, default=2128)
    parser.add_argument("--students", nargs="+", choices=STUDENTS, default=list(STUDENTS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=FIRST_ARMS, metavar="ARM")
    parser.add_argument("--longer", type=int, default=1, help="times the steps of a student")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args(arguments)


# ---- rows ----


def phrases(text: str) -> Iterator[str]:
    """All runs of words of a text; the text itself comes last."""
    words = text.split()
    for size in range(1, len(words) + 1):
        for first in range(len(words) - size + 1):
            yield " ".join(words[first : first + size])


def sst2(args: argparse.Namespace) -> tuple[list[Row], list[Row]]:
    """A sentence is a row that is part of no other. Rows that are part of a sentence that is scored
    are not trained on."""

    def read(name: str) -> list[Row]:
        rows = read_tsv(args.data / name)
        return [{"text_a": row["sentence"].strip(), "label": row["label"]} for row in rows]

    rows = read("train.tsv")
    texts = {row["text_a"] for row in rows}
    parts = {part for text in texts for part in list(phrases(text))[:-1] if part in texts}
    sentences = [row for row in rows if row["text_a"] not in parts]
    held_out = random.Random(0).sample(sentences, args.held_out)
    known = {phrase for row in held_out for phrase in phrases(row["text_a"])}
    return [row for row in rows if row["text_a"] not in known], [*read("test.tsv"), *held_out]


def sick(args: argparse.Namespace) -> tuple[list[Row], list[Row]]:
    columns = {"text_a": "sentence_A", "text_b": "sentence_B", "label": "entailment_judgment"}

    def read(name: str) -> list[Row]:
        rows = read_tsv(args.data / f"SICK_{name}.txt")
        return [{role: row[column] for role, column in columns.items()} for row in rows]

    return [*read("train"), *read("trial")], read("test_annotated")


def restaurant8k(args: argparse.Namespace) -> tuple[list[Row], list[Row]]:
    """Turns that are scored are not trained on."""

    def read(name: str) -> list[Row]:
        turns = json.loads((args.data / name).read_text(encoding="utf-8"))
        texts = [" ".join(turn["userInput"]["text"].split()) for turn in turns]
        slots = [{each["slot"] for each in turn.get("labels", ())} for turn in turns]
        return [
            {"text_a": text, "label": " ".join(sorted(filled)) or "nothing"}
            for text, filled in zip(texts, slots, strict=True)
            if text
        ]

    rows, test = read("train_0.json"), read("test.json")
    classes = {label for label, _ in Counter(row["label"] for row in rows).most_common(16)}
    scored = {row["text_a"] for row in test}
    rows = [row for row in rows if row["text_a"] not in scored and row["label"] in classes]
    return rows, [row for row in test if row["label"] in classes]


SETS: Mapping[str, DataSet] = {
    "SST-2": DataSet(
        read=sst2,
        teacher=20000,
        labeled=800,
        unlabeled=12000,
        teacher_steps=625,
        student_steps={"bag": 600, "layers": 400},
    ),
    "SICK": DataSet(
        read=sick,
        teacher=2600,
        labeled=400,
        unlabeled=2000,
        teacher_steps=250,
        student_steps={"bag": 300, "layers": 200},
    ),
    "Restaurant8k": DataSet(
        read=restaurant8k,
        teacher=3000,
        labeled=400,
        unlabeled=2000,
        teacher_steps=250,
        student_steps={"bag": 300, "layers": 200},
    ),
}


def read_tsv(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))


def write_rows(args: argparse.Namespace) -> None:
    data_set = SETS[args.data_set]
    rest, test = data_set.read(args)
    labeled = data_set.labeled if args.labeled is None else args.labeled
    unlabeled = data_set.unlabeled if args.unlabeled is None else args.unlabeled
    first, second = data_set.teacher, data_set.teacher + labeled
    rows = random.Random(0).sample(rest, second + unlabeled)
    others = [{**row, "label": None} for row in rows[second:]]
    sets = {
        "teacher": rows[:first],
        "labeled": rows[first:second],
        "unlabeled": [*rows[first:second], *others],
        "test": test,
    }
    for name, found in sets.items():
        text = "".join(json.dumps(row) + "\n" for row in found)
        file_of(args, name).write_text(text, encoding="utf-8")


def write_augmented(args: argparse.Namespace) -> None:
    from palm_ds.data.reader import TableSettings, open_table
    from palm_ds.inference.distillation.augment import AugmentSettings, augment

    if file_of(args, "augmented").exists():
        return
    table = open_table(str(file_of(args, "labeled")), TableSettings())
    augment(table, file_of(args, "augmented"), AugmentSettings())


def file_of(args: argparse.Namespace, rows: str) -> Path:
    return args.work / f"{rows}.jsonl"


def load_rows(args: argparse.Namespace, rows: str) -> list[Row]:
    return [json.loads(line) for line in file_of(args, rows).read_text("utf-8").split("\n")[:-1]]


def labeled_share(args: argparse.Namespace, rows: str) -> float:
    every = load_rows(args, rows)
    return sum(row["label"] is not None for row in every) / len(every)


# ---- models ----


def write_half(args: argparse.Namespace) -> None:
    """Every second layer of the model."""
    from palm_ds.weights import weights_folder
    from palm_ds.weights.formats.weights_info import WeightsInfo
    from palm_ds.weights.model_folder import open_model

    contents = open_model(args.model)
    state = {name: entry.read() for name, entry in contents.entries.items()}
    layers = list(range(1, contents.config.num_layers, 2))
    kept = {name: x for name, x in state.items() if not name.startswith("backbone.layers.")}
    for new, old in enumerate(layers):
        prefix = f"backbone.layers.{old}."
        parts = {n.removeprefix(prefix): x for n, x in state.items() if n.startswith(prefix)}
        kept |= {f"backbone.layers.{new}.{part}": x for part, x in parts.items()}
    info = WeightsInfo(backbone=replace(contents.config, num_layers=len(layers)))
    weights_folder.save_weights(kept, args.work / "half", info)


def recipe_of(args: argparse.Namespace, learner: Learner, arm: Arm, seed: int) -> dict[str, Any]:
    start: dict[str, Any] = {"backbone": {"kind": "bag_of_words", "hidden_size": 128}}
    if learner.layers:
        whole = learner.layers == "whole"
        start = {"init_from": str(args.model if whole else args.work / learner.layers)}
    taught: dict[str, Any] = {
        "path": str(args.work / "teacher"),
        "file": str(args.work / f"{arm.rows}.parquet"),
        "logits": dict(arm.logits),
    }
    # Both losses are means, over the rows with labels and over all: by its share, the label of a
    # row counts as much as its score.
    weight = labeled_share(args, arm.rows) if arm.taught else 1.0
    return {
        **start,
        "seed": seed,
        "length": LENGTH,
        "batch": f"{learner.batch} examples",
        "optimizer": {"lr": learner.lr, "weight_decay": 0.01},
        "schedule": {"kind": "linear", "warmup": 0.1},
        "sources": {
            "rows": {
                "table": str(file_of(args, arm.rows)),
                "tokenizer": str(args.model),
                "read": {"missing_labels": "keep"},
            }
        },
        "tasks": {TASK: {"kind": "classification", "source": "rows", "weight": weight}},
        "teacher": taught if arm.taught else None,
        "stages": [{TASK: learner.steps}],
        "export_onnx": [],
        "held_out": 0.0,
        "save": {"every": 0},
        "log": {"every": 50},
    }


def train_and_predict(
    args: argparse.Namespace, learner: Learner, arm: Arm, folder: Path, seed: int = 1
) -> list[bool]:
    """Which rows of the test a model has right, which is trained unless it has been."""
    import palm_ds as palm
    from palm_ds.inference.distillation.teach import teach
    from palm_ds.runtime.deepspeed.ds_config import make_ds_config
    from palm_ds.runtime.processes.processes import start
    from palm_ds.train.recipe.recipe import make_recipe
    from palm_ds.train.setup.run_folder import RunSpec
    from palm_ds.train.train import train

    found = folder / "correct.json"
    if not found.exists():
        machine = make_ds_config({"train_micro_batch_size_per_gpu": 4})
        recipe = make_recipe(recipe_of(args, learner, arm, seed))
        if recipe.teacher and not Path(recipe.teacher.file).exists():
            teach(recipe, Path(recipe.teacher.file), ds_config=machine, processes=start(machine))
        if code := train(RunSpec(recipe=recipe, ds_config=machine, folder=folder)):
            sys.exit(code)
        test = load_rows(args, "test")
        texts = [{key: row[key] for key in ("text_a", "text_b") if key in row} for row in test]
        predicted = palm.load(folder, device="cpu")(texts)
        right = [p["label"] == row["label"] for p, row in zip(predicted, test, strict=True)]
        found.write_text(json.dumps(right))
    return json.loads(found.read_text())


# ---- the table ----


def percent(values: Sequence[float]) -> str:
    spread = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.1f}{spread}"


def line_of(name: str, runs: Sequence[Sequence[bool]], labels: Sequence[Sequence[bool]]) -> str:
    """A line of the table: `runs` and those from the labels alone, with the same seeds."""
    scores = [statistics.fmean(run) for run in runs]
    each = ", ".join(f"{100 * score:.1f}" for score in scores)
    pairs = list(zip(runs, labels, strict=True))
    gains = [statistics.fmean(run) - statistics.fmean(base) for run, base in pairs]
    by_row = [
        statistics.fmean(a - b for a, b in zip(new, old, strict=True))
        for new, old in zip(zip(*runs, strict=True), zip(*labels, strict=True), strict=True)
    ]
    error = statistics.stdev(by_row) / len(by_row) ** 0.5
    gain = f"{percent(gains)} | {100 * error:.1f}" if runs is not labels else "|"
    return f"| {name} | {percent(scores)} | {each} | {gain} |"


def students(args: argparse.Namespace, student: str) -> Iterator[str]:
    """Lines of the table. The first of the arms is what the others are compared with."""
    steps = SETS[args.data_set].student_steps[student]
    learner = replace(STUDENTS[student], steps=steps * args.longer)
    first: list[list[bool]] | None = None
    for name in args.arms:
        folder = args.work / f"{learner.name}, {name}".replace(", ", "_").replace(" ", "_")
        runs = [
            train_and_predict(args, learner, ARMS[name], folder / str(seed), seed)
            for seed in args.seeds
        ]
        first = first or runs
        yield line_of(f"{learner.name}, {name}", runs, first)


def main(args: argparse.Namespace) -> None:
    args.work.mkdir(parents=True, exist_ok=True)
    if not file_of(args, "test").exists():
        write_rows(args)
    if any(ARMS[name].rows == "augmented" for name in args.arms):
        write_augmented(args)
    write_half(args)
    learner = replace(TEACHER, steps=SETS[args.data_set].teacher_steps)
    arm = Arm(rows="teacher", taught=False)
    teacher = train_and_predict(args, learner, arm, args.work / TEACHER.name)
    lines = [f"| teacher | {percent([statistics.fmean(teacher)])} | | | |"]
    for name in args.students:
        lines += students(args, name)
    print(f"{len(teacher):,} rows scored")
    print("| | accuracy, % | of each seed | gain over the first arm | standard error |")
    print("\n".join(["|---|---|---|---|---|", *lines]))


if __name__ == "__main__":
    given = parse()
    compute_on_cpu(given.threads)
    main(given)
