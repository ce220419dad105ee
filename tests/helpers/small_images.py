"""Rows of made images and texts with a known relation: a region shows a letter, whose features are
a fixed vector with noise, and the text names the letters of its image."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

FEATURES, LETTERS, BOXES = 12, "abcdef", 3
COLUMNS = {"image": "pic", "scene_graph": "graph", "object_tags": "tags"}
PICTURE = {"image": "pic"}
UNIMO: dict[str, Any] = {
    "kind": "unimo",
    "token_types": 1,
    "hidden_size": 32,
    "layer_norm_eps": 1e-5,
    "options": {"region_size": FEATURES},
}
VIL: dict[str, Any] = {
    "kind": "ernie_vil",
    "hidden_size": 32,
    "layer_norm_eps": 1e-5,
    "options": {
        "region_size": FEATURES,
        "image_hidden_size": 24,
        "image_heads": 2,
        "image_intermediate_size": 24,
        "co_hidden_size": 16,
        "co_heads": 2,
    },
}
BOTH = pytest.mark.parametrize(
    "encoder", [UNIMO, pytest.param(VIL, marks=pytest.mark.exhaustive)], ids=["unimo", "ernie_vil"]
)
_TABLE = np.random.default_rng(0).normal(size=(len(LETTERS), FEATURES))


def encoded(values: np.ndarray) -> str:
    """As ERNIE's files have numbers."""
    return base64.b64encode(np.asarray(values, "<f4").tobytes()).decode()


def image_of(letters: np.ndarray, rng: np.random.Generator) -> dict[str, Any]:
    """The regions of letters, by their numbers."""
    corner = rng.uniform(0, 50, (len(letters), 2))
    boxes = np.concatenate([corner, corner + rng.uniform(5, 40, (len(letters), 2))], 1)
    features = _TABLE[letters] + 0.1 * rng.normal(size=(len(letters), FEATURES))
    classes = np.full((len(letters), len(LETTERS)), 0.02)
    classes[np.arange(len(letters)), letters] = 1 - 0.02 * (len(LETTERS) - 1)
    return {
        "width": 100,
        "height": 90,
        "boxes": boxes.round(2).tolist(),
        "features": features.round(4).tolist(),
        "classes": classes.tolist(),
    }


def image_rows(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Rows with the columns of COLUMNS: `so a very c very f`, whose letters are objects."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        letters = rng.choice(len(LETTERS), BOXES, replace=False)
        names = [LETTERS[letter] for letter in letters]
        text = "so " + " very ".join(names)
        objects = [[start := 3 + 7 * number, start + 1] for number in range(BOXES)]
        rows.append(
            {
                "text_a": text,
                "pic": image_of(letters, rng),
                "graph": {"objects": objects, "attributes": [[0, 2, 0]]},
                "tags": " ".join(names),
            }
        )
    return rows


def asked_rows(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Rows for every task on a text and its image: does the image show the letter of text_a, and
    where (`box`); which of two `choices` names its letters; and these in order (`target`)."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        letters = rng.choice(len(LETTERS), BOXES, replace=False)
        others = rng.choice(np.setdiff1d(np.arange(len(LETTERS)), letters), BOXES, replace=False)
        shown, image = number % 2 == 0, image_of(letters, rng)
        names = [" ".join(LETTERS[x] for x in sorted(each)) for each in (letters, others)]
        right = int(rng.integers(2))
        rows.append(
            {
                "text_a": f"so {LETTERS[letters[1] if shown else others[1]]} ?",
                "pic": image,
                "label": "yes" if shown else "no",
                "worth": {"yes": 1.0, "maybe": 0.3} if shown else {"no": 0.9},
                "grade": int(shown),
                "place": image["boxes"][1],
                "choices": names if right == 0 else names[::-1],
                "right": right,
                "target": names[0],
            }
        )
    return rows
