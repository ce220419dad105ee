"""Images and texts that find each other: rows, the loss in numpy, recalls, and learning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.tasks.cross_modal_contrast import CrossModalContrast, recalls
from palm_ds.tasks.metrics.ranking import rank, recalls_of
from tests.helpers.small_images import BOTH, BOXES, UNIMO, VIL, image_rows
from tests.helpers.text_tables import (
    built_of,
    dataset_of,
    make_task,
    model_of,
    predictions,
    source_of,
)

COLUMNS = {"image": "pic", "positives": "rewritten"}


def source_for(folder: Path, rows: list[dict[str, Any]]) -> Any:
    made = [{"rewritten": [], "negatives": [], **row} for row in rows]
    made = [{x: y for x, y in row.items() if x not in ("tags", "graph")} for row in made]
    return source_of(folder, made, columns=COLUMNS)


def task_of(source: Any, **values: Any) -> CrossModalContrast:
    return make_task(CrossModalContrast, "find", max_tags=0, **values).resolved(source)


def rows_with_others() -> list[dict[str, Any]]:
    """The second image has two further texts, of which the last is that of the first one; the
    third text has a negative; the fourth row is the second one's image."""
    rows = image_rows(4)
    rows[1]["rewritten"] = ["so good", rows[0]["text_a"]]
    rows[2]["negatives"] = ["so bad"]
    rows[3]["pic"] = rows[1]["pic"]
    return rows


def test_an_image_is_read_alone_before_its_texts(tmp_path: Path) -> None:
    source = source_for(tmp_path, rows_with_others())
    task = task_of(source)
    task.check(source, labeled=True)
    dataset = dataset_of(source, task)
    layouts = dataset.layouts(np.arange(4))
    example = dataset.example(1, layouts[1])
    task.label(example, source, np.random.default_rng())
    assert example.sub_lengths == (2 + BOXES + 1, 8, 4, 8) and len(example) == layouts[1]["length"]
    assert example.regions is not None and example.regions.places.tolist() == [2, 3, 4, 5]
    where, targets = example.labels["find"]
    assert where.tolist() == [0, 6, 14, 18] and targets[:, 0].tolist() == [0, 1, 2, 2]
    other = dataset.example(3, layouts[3])
    task.label(other, source, np.random.default_rng())
    assert other.labels["find"][1][0, 1] == targets[0, 1]
    with pytest.raises(UserError, match="one row per step: nothing to compare; raise `batch`"):
        task.check_step(source, 1)


def test_the_loss_is_that_of_numpy(tmp_path: Path) -> None:
    source = source_for(tmp_path, rows_with_others())
    task = task_of(source, temperature=0.5)
    model = model_of(task, **UNIMO)
    built, batch = built_of(dataset_of(source, task))
    with torch.no_grad():
        vectors = model(batch, ("find",))["find"].scores
    items = np.array([x.example.item for row in built for x in row])
    order = np.argsort(items[batch.groups["find"]], kind="stable")
    head: Any = model.heads["find"]
    groups = torch.from_numpy(items)[batch.groups["find"]][order]
    vectors = vectors[order]
    found = head.step_losses(vectors, batch.labels["find"][1][order], groups)
    unit = vectors.double().numpy()
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    images, texts = [0, 2, 6, 9], [1, 3, 4, 5, 7, 8, 10]
    scores = np.exp(unit[images] @ unit[texts].T / 0.5)
    belong = np.zeros((4, 7), bool)
    belong[[0, 2], [0, 4]] = True
    belong[1] = [1, 1, 1, 1, 0, 0, 1]  # the texts of both its rows, and what it was found for
    belong[3] = belong[1]
    belong[0, 3] = True  # the same words as its own
    own = [0, 1, 4, 6]
    to_text = -np.log((scores * belong).sum(1) / scores.sum(1))
    to_image = -np.log(((scores * belong).sum(0) / scores.sum(0))[own])
    assert found.losses.tolist() == pytest.approx(((to_text + to_image) / 2).tolist(), rel=1e-5)
    assert found.correct.tolist() == [belong[i, scores[i].argmax()] for i in range(4)]


def test_recalls_count_the_best_of_the_relevant() -> None:
    scores = np.array([[3.0, 2, 1], [1, 1, 0]])
    relevant = np.array([[False, True, True], [True, False, False]])
    found = recalls("text", scores, relevant)
    assert found == {"text_recall@1": 0.0, "text_recall@5": 1.0, "text_recall@10": 1.0}
    assert recalls("text", scores[:, ::-1], relevant)["text_recall@1"] == 0.5
    assert recalls("text", scores, ~relevant)["text_recall@1"] == 0.5


def test_recalls_are_those_of_ranked_candidates() -> None:
    """Also with ties, and with scores that are no numbers."""
    rng = np.random.default_rng(1)
    scores = rng.integers(0, 5, (40, 15)) / 4
    scores[rng.random(scores.shape) < 0.1] = np.nan
    relevant = rng.random(scores.shape) < 0.2
    relevant[np.arange(40), rng.integers(0, 15, 40)] = True
    queries = np.repeat(np.arange(40), 15)
    ranked = rank(queries, scores.ravel(), relevant.ravel())
    assert recalls("text", scores, relevant) == recalls_of("text", ranked)


def test_the_mean_over_streams_of_two_widths_is_refused(tmp_path: Path) -> None:
    source = source_for(tmp_path, image_rows(2))
    with pytest.raises(UserError, match="find.pooling: mean, but ernie_vil has vectors of another"):
        model_of(task_of(source, pooling="mean"), **VIL)


@pytest.mark.slow
@BOTH
def test_they_find_each_other(encoder: dict[str, Any], tmp_path: Path) -> None:
    """Held-out recalls beat chance by five standard errors."""
    train, held = (source_for(tmp_path, image_rows(n, s)) for n, s in ((160, 1), (100, 2)))
    task = task_of(train)
    model = model_of(task, **encoder).train()
    _, batch = built_of(dataset_of(train, task))
    optimizer, head = torch.optim.Adam(model.parameters(), lr=4e-3), model.heads["find"]
    losses_of: Any = head.step_losses
    for _ in range(40):
        vectors = model(batch)["find"].scores
        loss = losses_of(vectors, batch.labels["find"][1], batch.groups["find"]).losses
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
    scores = task.metrics(predictions(model.eval(), held, task)["find"], held)
    for name in ("text_recall@10", "image_recall@10"):  # by chance little over 0.1
        share = scores[name]
        assert share - 0.15 > 5 * np.sqrt(share * (1 - share) / 100), scores
