"""Referring expressions: which regions are right, the loss in numpy, predictions, and mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.data.tasks.interfaces import StoredPrediction
from palm_ds.tasks.referring_expressions import ReferringExpressions
from tests.helpers.small_images import BOTH, BOXES, PICTURE, UNIMO, asked_rows
from tests.helpers.text_tables import (
    built_of,
    dataset_of,
    learned,
    make_task,
    model_of,
    predictions,
    source_of,
)

COLUMNS = {**PICTURE, "box": "place"}


def source_for(folder: Path, rows: list[dict[str, Any]]) -> Any:
    return source_of(folder, [{**row, "target": ""} for row in rows], columns=COLUMNS)


def task_of(source: Any, **values: Any) -> ReferringExpressions:
    task = make_task(ReferringExpressions, "find", max_tags=0, dropout=0.0, **values)
    return task.resolved(source)


def test_regions_that_overlap_the_box_are_right(tmp_path: Path) -> None:
    rows = asked_rows(3)
    for row in rows:  # half of the second box is the first one, a third of the third
        row["pic"]["boxes"] = [[0, 0, 50, 40], [0, 0, 50, 80], [10, 0, 60, 60]]
        row["place"] = "0,0 50 40"
    source = source_for(tmp_path, rows)
    found = {}
    for overlap in (0.49, 0.51, 0.4):
        _, batch = built_of(dataset_of(source, task_of(source, overlap=overlap)))
        found[overlap] = batch.labels["find"][1].reshape(3, BOXES)[0].tolist()
        assert batch.count("find") == 3
    assert found == {0.49: [1, 1, 0], 0.51: [1, 0, 0], 0.4: [1, 1, 1]}  # 1600 of 3400 pixels
    task = task_of(source, overlap=0.51)
    loss, right = task.baseline(np.zeros(9), source)  # of 3 images
    assert right.sum() / 3 == pytest.approx(1 / 3)
    assert loss.sum() / 3 == pytest.approx(-(np.log(1 / 3) + 2 * np.log(2 / 3)) / 3)


def shared(one: list[float], other: list[float]) -> float:
    """Intersection over union of two boxes."""
    sides = [max(0.0, min(one[i + 2], other[i + 2]) - max(one[i], other[i])) for i in (0, 1)]
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    return sides[0] * sides[1] / (sum(areas) - sides[0] * sides[1])


@BOTH
def test_the_loss_is_that_of_numpy(encoder: dict[str, Any], tmp_path: Path) -> None:
    rows = asked_rows(5)
    rows[0]["pic"] = {x: y if isinstance(y, int) else y[:2] for x, y in rows[0]["pic"].items()}
    source = source_for(tmp_path, rows)
    task = task_of(source)
    model = model_of(task, **encoder)
    _, batch = built_of(dataset_of(source, task))
    with torch.no_grad():
        output, vectors = model(batch, ("find",))["find"], model.backbone(batch).flatten(0, 1)
    at, targets = (x.numpy() for x in batch.labels["find"])
    score = model.heads["find"].score
    weight, bias = (x.detach().double().numpy() for x in (score.weight[0], score.bias))
    logits = vectors[at].double().numpy()[:, : len(weight)] @ weight + bias
    loss = np.logaddexp(0, logits) - targets * logits
    expected, right, start = 0.0, 0, 0
    for regions in np.bincount(batch.groups["find"].numpy()):
        mine = slice(start, start := start + regions)
        expected += loss[mine].mean()
        right += targets[mine][logits[mine].argmax()]
    assert sorted(np.bincount(batch.groups["find"].numpy())) == [2, 3, 3, 3, 3]
    assert float(output.loss_sum) == pytest.approx(expected, rel=1e-5)
    assert int(output.correct) == right


def test_predictions_are_boxes_in_pixels(tmp_path: Path) -> None:
    source = source_for(tmp_path, asked_rows(8))
    task = task_of(source)
    made = predictions(model_of(task, **UNIMO), source, task)["find"]
    for item, each in made.items():
        image = asked_rows(8)[item]["pic"]
        assert each["box"] == pytest.approx(image["boxes"][each["region"]], abs=0.01)
        assert each["region"] == int(np.argmax(each["scores"])) and len(each["scores"]) == BOXES
    boxes = {item: asked_rows(8)[item]["pic"]["boxes"] for item in made}
    right = [shared(boxes[item][made[item]["region"]], boxes[item][1]) >= 0.5 for item in made]
    assert task.metrics(made, source) == {"accuracy": pytest.approx(np.mean(right))}
    stored = [StoredPrediction(values={"cell": "1"}, place="p:1")] * 8
    untrained = make_task(ReferringExpressions, "find")
    scored, read = untrained.prepared(source, stored)
    assert scored.metrics(read, source) == {"accuracy": 1.0}
    none = StoredPrediction(values={"region": -1}, place="p:1")  # not the last one
    with pytest.raises(UserError, match=r"^p:1: region: -1 is below 0, the first region$"):
        untrained.prepared(source, [none])


def test_boxes_and_settings_that_are_wrong(tmp_path: Path) -> None:
    rows = asked_rows(2)
    rows[1]["place"] = [30, 0, 10, 5]
    with pytest.raises(UserError, match=r":2: box: \[30.0, 0.0, 10.0, 5.0\]; expected x1 y1 x2 y2"):
        source_for(tmp_path, rows)
    rows[1]["place"] = None
    source = source_for(tmp_path, rows)
    with pytest.raises(UserError, match=":2: box is empty"):
        task_of(source).check(source, labeled=True)
    with pytest.raises(UserError, match="max_regions: 1, the whole image, leaves none to find"):
        task_of(source, max_regions=1)


@pytest.mark.slow
@BOTH
def test_it_is_learned(encoder: dict[str, Any], tmp_path: Path) -> None:
    """The held-out share of right regions beats a guess by five standard errors."""
    train = source_for(tmp_path, asked_rows(240)[::2])  # whose letter is in the image
    task = task_of(train)
    model = learned(train, task, steps=60, lr=4e-3, **encoder)
    held = source_for(tmp_path, asked_rows(400, seed=2)[::2])
    right = task.metrics(predictions(model, held, task)["find"], held)["accuracy"]
    chance = 1 / BOXES
    assert right - chance > 5 * np.sqrt(right * (1 - right) / 200)
