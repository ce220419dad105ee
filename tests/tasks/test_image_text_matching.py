"""Images and texts that belong together: rows, the head's input, and that it is learned."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.tasks.image_text_matching import ImageTextMatching
from tests.helpers.small_images import BOTH, BOXES, COLUMNS, UNIMO, image_rows
from tests.helpers.text_tables import (
    built_of,
    dataset_of,
    learned,
    make_task,
    model_of,
    source_of,
)


def task_of(source: Any, **values: Any) -> ImageTextMatching:
    return make_task(ImageTextMatching, "match", max_tags=0, **values).resolved(source)


def test_sure_scores_are_told_apart(tmp_path: Path) -> None:
    source = source_of(tmp_path, image_rows(6), columns=COLUMNS)
    probs = [[5.6e-9, 1.0], [2.5e-8, 1.0], [1.5e-8, 1.0]]
    made = {
        i: {"label": "its image", "probs": each, "belongs": i != 1} for i, each in enumerate(probs)
    }
    assert task_of(source).metrics(made, source)["auc"] == 1.0


def test_half_of_the_texts_have_another_image(tmp_path: Path) -> None:
    source = source_of(tmp_path, image_rows(120), columns=COLUMNS)
    built, batch = built_of(dataset_of(source, task_of(source)))
    same = 0
    for example in (part.example for row in built for part in row):
        (place,), (label,) = example.labels["match"]
        assert place == 0
        assert label == (example.image == example.item)
        features = source.regions(example.image).features
        assert example.regions is not None
        assert np.array_equal(example.regions.features[1:], features)
        same += label
    assert 40 < same < 80 and batch.count("match") == 120
    always = built_of(dataset_of(source, task_of(source, mismatched=0.0)))[1]
    assert always.labels["match"][1].min() == 1


def test_rows_that_name_the_same_image_are_a_match(tmp_path: Path) -> None:
    rows = [{"text_a": "so good", "pic": f"{number // 2}.npz"} for number in range(6)]
    for number, image in enumerate(image_rows(3)):
        arrays: dict[str, Any] = {key: np.array(value) for key, value in image["pic"].items()}
        np.savez(tmp_path / f"{number}.npz", **arrays)
    source = source_of(tmp_path, rows, columns={"image": "pic"})
    task = task_of(source, mismatched=1.0)
    for example in (part.example for row in built_of(dataset_of(source, task))[0] for part in row):
        assert example.image != example.item
        assert example.labels["match"][1] == (example.image // 2 == example.item // 2)
    single = source_of(tmp_path, rows[:2], columns={"image": "pic"})
    with pytest.raises(UserError, match="has a single image; 2 are needed"):
        task.check(single, labeled=True)


def test_the_head_reads_the_product_of_both_poolers(tmp_path: Path) -> None:
    source = source_of(tmp_path, image_rows(7), columns=COLUMNS)
    task = task_of(source)
    model = model_of(task, **UNIMO)
    built, batch = built_of(dataset_of(source, task))
    with torch.no_grad():
        output, vectors = model(batch, ("match",))["match"], model.backbone(batch).flatten(0, 1)
    weights = {name: x.detach().double().numpy() for name, x in model.named_parameters()}
    firsts, targets = (x.numpy() for x in batch.labels["match"])
    regions = firsts + [len(x.example) - BOXES - 1 for row in built for x in row]

    def pooled(pooler: str, places: np.ndarray) -> np.ndarray:
        weight, bias = (weights[f"backbone.{pooler}.dense.{x}"] for x in ("weight", "bias"))
        return np.maximum(vectors[places].double().numpy() @ weight.T + bias, 0)

    both = pooled("pooler", firsts) * pooled("region_pooler", regions)
    logits = both @ weights["heads.match.match.weight"].T + weights["heads.match.match.bias"]
    assert output.scores is not None and np.allclose(output.scores, logits, atol=1e-5)
    log = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    expected = -log[np.arange(len(log)), targets].sum()
    assert float(output.loss_sum) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@BOTH
def test_it_is_learned(encoder: dict[str, Any], tmp_path: Path) -> None:
    """Held-out accuracy beats chance by five standard errors."""
    train = source_of(tmp_path, image_rows(240), columns=COLUMNS)
    task = task_of(train)
    model = learned(train, task, steps=50, lr=4e-3, **encoder)
    held = source_of(tmp_path, image_rows(200, seed=2), columns=COLUMNS)
    _, batch = built_of(dataset_of(held, task))
    with torch.no_grad():
        right = float(model(batch)["match"].correct) / batch.count("match")
    chance = task.baseline(batch.labels["match"][1].numpy(), held)[1].mean()
    assert right - max(chance, 1 - chance) > 5 * math.sqrt(right * (1 - right) / 200)
