"""A small model with tasks of several kinds over tables, saved like a finished run: its
weights/."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from palm_ds.runtime.deepspeed.ds_config import DSConfig
from palm_ds.train.export import info_of
from palm_ds.train.recipe.recipe import Recipe, make_recipe
from palm_ds.train.setup.build import build_model
from palm_ds.train.setup.resolve import resolve
from palm_ds.train.setup.sources import open_data
from palm_ds.weights import weights_folder
from palm_ds.weights.formats.weights_info import INFO, read_info
from tests.helpers.text_tables import WORDS, small_tokenizer

TASKS: Mapping[str, Mapping[str, Any]] = {
    "mood": {"kind": "classification", "source": "texts"},
    "topic": {"kind": "multi_label", "source": "texts", "label_column": "label_topic"},
    "size": {"kind": "regression", "source": "texts", "label_column": "label_size", "scale": False},
    "pair": {"kind": "matching", "source": "pairs"},
    "answer": {"kind": "reading", "source": "questions", "stride": 8, "max_query": 8},
}

MORE_TASKS: Mapping[str, Mapping[str, Any]] = {
    "names": {"kind": "tagging", "source": "words"},
    "choice": {"kind": "multiple_choice", "source": "choices"},
    "rank": {"kind": "ranking", "source": "pairs"},
    "words": {"kind": "masked_words", "source": "texts"},
}
"""Tasks of the other kinds of heads, for save_model(tasks=...)."""

TITLE = {"kind": "generation", "source": "titles", "max_target": 6, "max_source": 16}
"""A task that writes texts, for save_model(tasks=...)."""

FURTHER = {"label_topic": "label_topic", "label_size": "label_size"}


def texts(count: int, seed: int = 0, longest: int = 20) -> list[dict[str, Any]]:
    """Rows with a text and a label of each of three kinds."""
    rng = np.random.default_rng(seed)
    return [
        {
            "text_a": " ".join(rng.choice(WORDS[-6:], rng.integers(0, longest))),
            "label": ["bad", "fair", "good"][number % 3],
            "label_topic": [["art"], ["art", "sport"], []][int(rng.integers(3))],
            "label_size": float(rng.normal()),
        }
        for number in range(count)
    ]


def pairs(count: int, seed: int = 1) -> list[dict[str, Any]]:
    rows = texts(2 * count, seed)
    return [
        {"text_a": a["text_a"], "text_b": b["text_a"], "label": str(number % 2)}
        for number, (a, b) in enumerate(zip(rows[::2], rows[1::2], strict=True))
    ]


def questions(count: int, seed: int = 2) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        context = " ".join(rng.choice(WORDS[-6:-2], rng.integers(8, 60)))
        answer = {"text": context.split(" ")[0], "start": 0}
        rows.append(
            {"id": f"q{number}", "question": "good ?", "context": context, "answers": [answer]}
        )
    return rows


def tagged(count: int, seed: int = 3) -> list[dict[str, Any]]:
    """Rows of words, each with a tag."""
    rng = np.random.default_rng(seed)
    return [
        {
            "tokens": [str(word) for word in rng.choice(WORDS[-6:-2], size)],
            "tags": ["B-X", *rng.choice(["O", "I-X"], size - 1).tolist()],
        }
        for size in rng.integers(2, 12, count)
    ]


def choices(count: int, seed: int = 4) -> list[dict[str, Any]]:
    """Questions with three choices."""
    rows = texts(4 * count, seed, longest=8)
    return [
        {
            "text_a": rows[4 * n]["text_a"],
            "choices": [row["text_a"] for row in rows[4 * n + 1 : 4 * n + 4]],
            "label": n % 3,
        }
        for n in range(count)
    ]


def titles(count: int, seed: int = 5) -> list[dict[str, Any]]:
    """Rows with a text and the text to write."""
    rows = texts(count, seed, longest=12)
    return [{"source": f"so {row['text_a']}", "target": row["label"]} for row in rows]


def write_rows(file: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def save_model(folder: Path, stages: Sequence[str] = tuple(TASKS), **changes: Any) -> Path:
    """A run folder with the weights/ of an untrained model of these task groups; its weights are
    noisy. `tokenizer`: another one than `small_tokenizer`; others are keys of the recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    changes.pop("tokenizer", small_tokenizer()).save(folder / "vocabulary")
    made = {"texts": texts(12), "pairs": pairs(6), "questions": questions(4)}
    made |= {"words": tagged(8), "choices": choices(4), "titles": titles(4)}
    used = [name for task_group in stages for name in task_group.split(" + ")]
    tasks = changes.pop("tasks", None) or {name: dict(TASKS[name]) for name in used}
    sources = {
        name: {
            "table": str(write_rows(folder / f"{name}.jsonl", rows)),
            "tokenizer": str(folder / "vocabulary"),
            "read": {"columns": FURTHER if name == "texts" else {}},
        }
        for name, rows in made.items()
        if any(task["source"] == name for task in tasks.values())
    }
    values = {
        "backbone": {
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "max_positions": 64,
            "token_types": 2,
        },
        "length": 32,
        "batch": "4 examples",
        "sources": sources,
        "tasks": tasks,
        "stages": [dict.fromkeys(stages, 2)],
        **changes,
    }
    recipe = make_recipe(values, "recipe")
    data = open_data(recipe)
    recipe = resolve(recipe, data)
    ds_config = DSConfig(path="", sections={}, stage=0, precision="fp32")
    model = build_model(recipe, ds_config, data.vocabulary, device=torch.device("cpu"))
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    info = info_of(recipe, model, steps=2)
    weights_folder.save_weights(model, folder / "weights", info, tokenizer=data.tokenizer)
    return folder


def recipe_of(folder: Path) -> Recipe:
    """The recipe of the weights in a run folder."""
    return make_recipe(dict(read_info(folder / "weights" / INFO).recipe), "weights.json")
