"""What tasks on images and texts learn from made regions, whose relation to the texts is known.

    python benchmarks/made_regions.py --work runs/regions
    python benchmarks/made_regions.py --work runs/regions --only answers --encoder ernie_vil

An image has 4 regions: things (one of 8) in colors (one of 5). The features of a region are a
vector of its thing plus one of its color, with noise; its box says where it is. A text is about
two of them: "a red cat left of a blue dog", or asks for a color, or refers to one of them. So each
task can be solved, and only by reading the image: what a task's baseline knows is the frequency of
its labels.

Each task is trained by palm_ds from random weights, with a tiny encoder, for 400 steps; those that
these teach too little, for more, some at a lower rate (LONGER). Then every held-out row is scored
by itself. The table has the mean of the losses and of right predictions, those of the baseline on
the same rows, and how many standard errors (of the mean of the differences between the two, over
rows) lie between. A finished run is not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.cpu import compute_on_cpu  # noqa: E402

THINGS = ["cat", "dog", "cow", "tree", "car", "boat", "house", "bird"]
COLORS = ["red", "green", "blue", "black", "white"]
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
OTHERS = ["a", "left", "right", "of", "what", "color", "is", "the"]
REGIONS, FEATURES, SIDE = 4, 24, 100
ROWS = {"train": 4000, "test": 400}
NOISE = 0.2
ENCODERS: Mapping[str, Mapping[str, Any]] = {
    "unimo": {"kind": "unimo", "token_types": 1, "options": {"region_size": FEATURES}},
    "ernie_vil": {
        "kind": "ernie_vil",
        "options": {
            "region_size": FEATURES,
            "image_hidden_size": 32,
            "image_heads": 2,
            "image_intermediate_size": 64,
            "co_hidden_size": 32,
            "co_heads": 2,
        },
    },
}
SIZES: Mapping[str, Any] = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "max_positions": 98,
    "layer_norm_eps": 1e-5,
    "init_range": 0.15,
    "task_types": 0,
    "pad": 0,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
CAPTIONS = {"decoder": "next_token", "end": "mask", "max_target": 12, "smoothing": 0.0}
TASKS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, str]]] = {
    "regions": ({"kind": "masked_regions"}, {"text_a": "caption"}),
    "words": ({"kind": "masked_words"}, {"text_a": "caption"}),
    "match": ({"kind": "image_text_matching"}, {"text_a": "caption"}),
    "scenes": ({"kind": "scene_graph_prediction"}, {"text_a": "caption", "scene_graph": "graph"}),
    "answers": ({"kind": "multi_label", "images": True}, {"text_a": "question", "label": "answer"}),
    "entailment": (
        {"kind": "classification", "images": True},
        {"text_a": "claim", "label": "true"},
    ),
    "ranking": ({"kind": "ranking", "images": True}, {"text_a": "claim", "label": "grade"}),
    "choice": ({"kind": "multiple_choice", "images": True}, {"text_a": "ask", "label": "right"}),
    "referring": ({"kind": "referring_expressions"}, {"text_a": "phrase", "box": "box"}),
    "count": ({"kind": "regression", "images": True}, {"text_a": "counted", "label": "count"}),
    "contrast": ({"kind": "cross_modal_contrast"}, {"text_a": "caption"}),
    "captions": ({"kind": "generation", "images": True, **CAPTIONS}, {"target": "caption"}),
}
"""{name: its settings in a recipe, {role: column}}"""
ONLY_UNIMO = ("captions",)


class Run(NamedTuple):
    """How long a task is trained, and how fast it learns at most."""

    steps: int = 400
    lr: float = 4e-3


LONGER: Mapping[tuple[str, str], Run] = {
    ("unimo", "contrast"): Run(steps=1200),
    ("ernie_vil", "contrast"): Run(1200, 2e-3),
    ("ernie_vil", "match"): Run(1200, 1e-3),
    ("ernie_vil", "entailment"): Run(800, 1e-3),
    ("ernie_vil", "ranking"): Run(800, 1e-3),
    ("ernie_vil", "count"): Run(800, 1e-3),
}
"""{(encoder, task): ...}. At 4e-3 the vectors of [CLS] and of the whole image become nearly equal
for all rows in ERNIE-ViL, before their product tells a true pair from a false one."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of rows and runs; kept")
    parser.add_argument("--encoder", choices=ENCODERS, nargs="+", default=["unimo"])
    parser.add_argument("--only", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--steps", type=int, help="of every task, instead of 400 or more")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args(arguments)


# ---- rows ----


def image_of(things: np.ndarray, colors: np.ndarray, rng: np.random.Generator) -> dict[str, Any]:
    """From left to right: boxes that do not overlap."""
    table = np.random.default_rng(0).normal(size=(len(THINGS) + len(COLORS), FEATURES))
    left = np.arange(REGIONS) * SIDE / REGIONS + rng.uniform(0, 5, REGIONS)
    top = rng.uniform(0, 50, REGIONS)
    boxes = np.stack([left, top, left + rng.uniform(8, 14, REGIONS), top + 20], 1)
    features = table[things] + table[len(THINGS) + colors]
    features = features + NOISE * rng.normal(size=features.shape)
    classes = np.full((REGIONS, len(THINGS)), 0.01)
    classes[np.arange(REGIONS), things] = 1 - 0.01 * (len(THINGS) - 1)
    return {
        "width": SIDE,
        "height": SIDE,
        "boxes": boxes.round(2).tolist(),
        "features": features.round(3).tolist(),
        "classes": classes.tolist(),
    }


def caption_of(names: Sequence[str], first: int, second: int) -> tuple[str, dict[str, Any]]:
    """A text about two regions, and its scene graph."""
    relation = "left of" if first < second else "right of"
    words = ["a", *names[first].split(), relation, "a", *names[second].split()]
    starts = np.cumsum([0, *(len(word) + 1 for word in words)])
    spans = [[int(at), int(at) + len(word)] for at, word in zip(starts, words, strict=False)]
    return " ".join(words), {
        "objects": [spans[2], spans[6]],
        "attributes": [[*spans[1], 0], [*spans[5], 1]],
        "relations": [[*spans[3], 0, 1]],
    }


def made_rows(count: int, seed: int) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    for number in range(count):
        things = rng.choice(len(THINGS), REGIONS, replace=False)
        colors = rng.integers(len(COLORS), size=REGIONS)
        others = (colors + rng.integers(1, len(COLORS), REGIONS)) % len(COLORS)
        names, false = (
            [f"{COLORS[c]} {THINGS[t]}" for c, t in zip(each, things, strict=True)]
            for each in (colors, others)
        )
        first, second, asked = (int(x) for x in rng.choice(REGIONS, 3, replace=False))
        caption, graph = caption_of(names, first, second)
        true, image, right = number % 2 == 0, image_of(things, colors, rng), int(rng.integers(4))
        choices = [COLORS[(colors[asked] + step) % len(COLORS)] for step in range(4)]
        yield {
            "image": image,
            "caption": caption,
            "graph": graph,
            "question": f"what color is the {THINGS[things[asked]]}",
            "answer": {COLORS[colors[asked]]: 1.0, COLORS[others[asked]]: 0.3},
            "claim": f"a {(names if true else false)[asked]}",
            "true": "yes" if true else "no",
            "grade": int(true),
            "counted": f"color is {COLORS[(colors if true else others)[asked]]}",
            "count": int((colors == (colors if true else others)[asked]).sum()),
            "ask": f"what color is the {THINGS[things[asked]]}",
            "choices": choices[-right:] + choices[:-right] if right else choices,
            "right": right,
            "phrase": f"the {names[asked]}",
            "box": image["boxes"][asked],
        }


def write_rows(work: Path) -> None:
    work.mkdir(parents=True, exist_ok=True)
    (work / "vocab.txt").write_text("\n".join([*SPECIALS, *OTHERS, *THINGS, *COLORS]))
    for seed, (part, count) in enumerate(ROWS.items(), 1):
        lines = (json.dumps(row) + "\n" for row in made_rows(count, seed))
        (work / f"{part}.jsonl").write_text("".join(lines))


# ---- runs ----


def recipe_of(work: Path, encoder: str, name: str, run: Run) -> dict[str, Any]:
    settings, columns = TASKS[name]
    tasks, group = {name: {**settings, "source": "made"}}, name
    if name == "words":  # masked_regions reads the image
        tasks = {"regions": {"kind": "masked_regions", "source": "made"}, **tasks}
        group = "regions + words"
    return {
        "seed": 1,
        "backbone": {**SIZES, **ENCODERS[encoder]},
        "length": 96,
        "batch": "64 examples",
        "optimizer": {"lr": run.lr, "betas": [0.9, 0.98], "weight_decay": 0.01, "clip": 1.0},
        "schedule": {"kind": "linear", "warmup": 0.1},
        "sources": {
            "made": {
                "table": str(work / "train.jsonl"),
                "validation": str(work / "test.jsonl"),
                "tokenizer": str(work / "vocab.txt"),
                "read": {"columns": {"image": "image", **columns}},
            }
        },
        "tasks": tasks,
        "stages": [{group: run.steps}],
        "evaluate": {"every": run.steps},
        "log": {"every": 50},
    }


def trained(values: dict[str, Any], folder: Path) -> float:
    """Processor seconds of a run, which is done unless it has been."""
    from palm_ds.runtime.deepspeed.ds_config import make_ds_config
    from palm_ds.train.recipe.recipe import make_recipe
    from palm_ds.train.setup.run_folder import RunSpec
    from palm_ds.train.train import train

    took = folder / "seconds.json"
    if not took.exists():
        start = time.process_time()
        machine = make_ds_config({"train_micro_batch_size_per_gpu": 8})
        if code := train(RunSpec(recipe=make_recipe(values), ds_config=machine, folder=folder)):
            sys.exit(code)
        took.write_text(json.dumps(time.process_time() - start))
    return json.loads(took.read_text())


# ---- scores ----


class Score(NamedTuple):
    """Of a task, or of one of its losses, on held-out rows: means over rows."""

    name: str
    loss: float
    base_loss: float
    right: float
    base_right: float
    loss_errors: float
    """Standard errors between the two losses."""
    right_errors: float


def scores_of(folder: Path, name: str) -> Iterator[Score]:
    """Of the losses of a task, each held-out row by itself."""
    import torch

    from palm_ds.data.reader import open_table
    from palm_ds.data.sources.table import TableSource
    from palm_ds.data.stream.task_group_dataset import (
        TaskGroupDataset,
        build_examples,
        collate_built,
        held_out_rows,
    )
    from palm_ds.inference.trained_model import TrainedModel
    from palm_ds.tasks.multi_label import MultiLabel

    opened = TrainedModel.open(folder / "weights")
    recipe, model = opened.recipe, opened.task_model
    read = recipe.sources["made"].read
    table = open_table(str(folder.parents[1] / "test.jsonl"), read)
    source = TableSource(table, np.arange(len(table)), opened.tokenizer, "test")
    tasks = recipe.built_tasks
    dataset = TaskGroupDataset(
        " + ".join(tasks),
        tuple(tasks.values()),  # pyright: ignore[reportArgumentType]
        task_id=0,
        source=source,
        seed=1,
        max_length=recipe.length,
        fixed=True,
        segments=recipe.backbone_config.token_types,
    )
    built = build_examples([dataset], held_out_rows(dataset, 0, dataset.num_items))
    found: dict[str, list[list[float]]] = {}
    pairs: list[np.ndarray] = []  # (2, hidden): an image and its text
    with torch.inference_mode():
        for part in (part for row in built for part in row):
            batch = collate_built([dataset], [[part]], len(part.example), 0)
            if name == "contrast":
                pairs.append(model(batch)[name].scores.numpy())
                continue
            for loss in tasks[name].loss_weights():
                if many := batch.count(loss):
                    output = model(batch, (loss,))[loss]
                    base = tasks[name].baseline_of(loss, batch.labels[loss][1].numpy(), source)
                    right = float(output.correct) / many, float(np.sum(base[1])) / many
                    if isinstance(tasks[name], MultiLabel):
                        right = worth(output.scores, batch.labels[loss][1])
                    row = [float(output.loss_sum) / many, float(np.sum(base[0])) / many, *right]
                    found.setdefault(loss, []).append(row)
    if pairs:
        found[name] = contrasted(np.array(pairs))
    for loss, rows in found.items():
        values = np.array(rows)
        differences = np.stack([values[:, 1] - values[:, 0], values[:, 2] - values[:, 3]], 1)
        errors = np.maximum(differences.std(0, ddof=1), 1e-9) / np.sqrt(len(rows))
        yield Score(loss, *values.mean(0), *(differences.mean(0) / errors))


def contrasted(pairs: np.ndarray) -> list[list[float]]:
    """Of vectors (pairs, 2, hidden) for each image: the loss of choosing its text among all, and
    whether the likeliest one is right, each after that of chance."""
    images, texts = np.moveaxis(pairs / np.linalg.norm(pairs, axis=-1, keepdims=True), 1, 0)
    scores, many = images @ texts.T / 0.07, len(pairs)
    losses = np.log(np.exp(scores - scores.max()).sum(1)) + scores.max() - scores.diagonal()
    right = scores.argmax(1) == np.arange(many)
    return [
        [float(loss), float(np.log(many)), float(hit), 1 / many]
        for loss, hit in zip(losses, right, strict=True)
    ]


def worth(scores: Any, targets: Any) -> tuple[float, float]:
    """What the likeliest answer is worth, and what any of the colors is, on average."""
    return float(targets[0, scores[0].argmax()]), float(targets.mean())


def shown(errors: float) -> str:
    return f"{errors:.0f}" if errors <= 100 else "> 100"


def lines(encoder: str, seconds: float, steps: int, scores: Iterable[Score]) -> Iterator[str]:
    for score in scores:
        right = (
            f"{score.right:.3f} ({score.base_right:.3f}) | {shown(score.right_errors)}"
            if np.isfinite(score.right)
            else "— | —"
        )
        yield (
            f"| {score.name} | {encoder} | {steps}, {seconds:.0f} s | {score.loss:.3f} "
            f"({score.base_loss:.3f}) | {shown(score.loss_errors)} | {right} |"
        )


def main() -> None:
    args = parse()
    compute_on_cpu(args.threads)
    write_rows(args.work)
    print("| loss | encoder | steps | loss (baseline) | s.e. | right (baseline) | s.e. |")
    for encoder in args.encoder:
        for name in args.only:
            if name in ONLY_UNIMO and encoder != "unimo":
                continue
            run = LONGER.get((encoder, name), Run())
            run = run._replace(steps=args.steps or run.steps)
            folder = args.work / encoder / name
            seconds = trained(recipe_of(args.work, encoder, name, run), folder)
            for line in lines(encoder, seconds, run.steps, scores_of(folder, name)):
                print(line, flush=True)


if __name__ == "__main__":
    main()
