"""The circle loss over images and texts: which pairs stand beside a row's own, what is learned of
them, and ERNIE-ViL's loss restated in numpy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.task import build
from palm_ds.tasks.ranking import Ranking
from palm_ds.tasks.shared.image_text import image_numbers
from tests.helpers.small_images import BOTH, BOXES, PICTURE, UNIMO, asked_rows
from tests.helpers.text_tables import built_of, dataset_of, learned, model_of, source_of


def task_of(source: TableSource, **values: Any) -> Ranking:
    given = {"kind": "ranking", "source": "s", "images": True, "loss": "circle", "dropout": 0.0}
    given |= {"negative_images": 4, "max_length": 12}
    task = build("rank", {**given, **values}).resolved(source)
    assert isinstance(task, Ranking)
    return task


def asked_source(folder: Path, rows: int, seed: int = 1) -> TableSource:
    """Every second row belongs together."""
    made = [{**row, "target": ""} for row in asked_rows(rows, seed)]
    return source_of(folder, made, columns={**PICTURE, "label": "grade"})


def named_source(folder: Path) -> TableSource:
    """Four rows of three images, which belong together, and one that does not."""
    names = ["a", "a", "b", "c", "b"]
    for name, row in zip("abc", asked_rows(3), strict=True):
        arrays: dict[str, Any] = {key: np.array(value) for key, value in row["pic"].items()}
        np.savez(folder / f"{name}.npz", **arrays)
    rows = [
        {"text_a": f"so {'abcde'[n]}", "pic": f"{name}.npz", "label": int(n < 4)}
        for n, name in enumerate(names)
    ]
    return source_of(folder, rows, columns=PICTURE)


def test_the_pairs_beside_a_row_are_of_other_images(tmp_path: Path) -> None:
    source = named_source(tmp_path)
    task = task_of(source, negative_images=2, negative_texts=2)
    assert task.training_items(source, 64)[:, 0].tolist() == [0, 1, 2, 3]
    pictures, places = image_numbers(source), np.arange(1000)
    items, uniform = (places % 5)[:, None], np.random.default_rng(1).random((1000, 1))
    found = task.layout(items, uniform, source, 96)
    texts, images = found["text"], found["image"]
    own = items[:, 0] < 4  # the others are scored alone
    assert (found["pairs"] == np.where(own, 5, 1)).all()
    assert (texts[:, 0] == items[:, 0]).all() and (images[:, 0] == items[:, 0]).all()
    texts, images, first = texts[own], images[own], items[own]
    assert (texts[:, 1:3] == first).all() and (images[:, 3:] == first).all()
    for drawn in (images[:, 1:3], texts[:, 3:]):
        assert (pictures[drawn] != pictures[first]).all() and (drawn < 4).all()
    # of the two other images of row 3 each is as likely, and of two texts of one, each
    drawn = np.bincount(images[first[:, 0] == 3, 1:3].ravel(), minlength=4) / 400
    assert np.abs(drawn - [0.25, 0.25, 0.5, 0]).max() < 0.1


def test_an_example_holds_its_pairs(tmp_path: Path) -> None:
    source = asked_source(tmp_path, 8)
    task = task_of(source)
    built, batch = built_of(dataset_of(source, task))
    (part,) = (x for row in built for x in row if x.example.item == 2)
    example, layout = part.example, part.ref.layout
    assert example.sub_lengths == (5 + BOXES + 1,) * 5 and example.regions is not None
    seen = example.regions.features.reshape(5, BOXES + 1, -1)[:, 1:]
    for image, features in zip(layout["image"], seen, strict=True):
        assert np.array_equal(features, source.regions(int(image)).features)
    texts = np.array_split(example.input_ids, np.cumsum(example.sub_lengths)[:-1])
    assert all(np.array_equal(text[:5], texts[0][:5]) for text in texts)
    at, targets = example.labels["rank"]
    assert targets.tolist() == [0, 1, 1, 2, 2] and at.tolist() == [9 * n for n in range(5)]
    assert batch.count("rank") == 8
    alone, _ = built_of(dataset_of(source, task.for_prediction()))
    assert all(len(x.example.sub_lengths) == 1 for row in alone for x in row)
    assert sum(len(row) for row in alone) == 8


def ernie_loss(scores: np.ndarray, margin: float, scale: float) -> float:
    """As ERNIE-ViL's program: of scores (examples, 1 + negatives) after the sigmoid, the mean of
    the circle losses against both halves of the negatives; summed over examples."""
    own, others = scores[:, :1], scores[:, 1:]
    losses = []
    for half in np.split(others, 2, axis=1):
        weight_own, weight = np.maximum(1 + margin - own, 0), np.maximum(half + margin, 0)
        positive = np.exp(-scale * weight_own * (own - (1 - margin))).sum(1)
        negative = np.exp(scale * weight * (half - margin)).sum(1)
        losses.append(np.log(1 + positive * negative))
    return float(np.mean(losses, 0).sum())


@BOTH
@pytest.mark.parametrize(("margin", "scale"), [(0.3, 32.0), (0.1, 8.0)])
def test_the_loss_is_that_of_ernies_program(
    encoder: dict[str, Any], margin: float, scale: float, tmp_path: Path
) -> None:
    source = asked_source(tmp_path, 8)
    task = task_of(source, margin=margin, scale=scale)
    model = model_of(task, **encoder)
    with torch.no_grad():
        model.heads["rank"].out.weight.mul_(20)  # type: ignore[union-attr,operator]
    _, batch = built_of(dataset_of(source, task))
    with torch.no_grad():
        output = model(batch, ("rank",))["rank"]
    groups, scores = batch.groups["rank"].numpy(), output.scores
    assert scores is not None
    probabilities = 1 / (1 + np.exp(-scores[:, 0].double().numpy()))
    several = [probabilities[groups == n] for n in range(8) if (groups == n).sum() > 1]
    assert len(several) == 4  # the others are alone, and have no loss
    expected = ernie_loss(np.array(several), margin, scale)
    assert float(output.loss_sum) == pytest.approx(expected, rel=1e-5)
    right = sum(part[0] >= part.max() for part in several)
    assert int(output.correct) == right
    loss, _ = task.baseline(batch.labels["rank"][1].numpy(), source)
    assert loss.sum() == pytest.approx(ernie_loss(np.full((4, 5), 0.5), margin, scale))


def test_other_tasks_do_not_read_its_pairs(tmp_path: Path) -> None:
    """Without the circle loss tasks share an encoder pass as before; nor is a head shared."""
    source = asked_source(tmp_path, 4)
    circle, plain = task_of(source), task_of(source, loss="classes")
    other = task_of(source, loss="classes", negative_images=2, k=3)
    assert plain.input_key() == other.input_key() != circle.input_key()
    with pytest.raises(
        UserError, match=r"rank\.loss: 'circle', but the head is that of tasks.rank"
    ):
        circle.with_head_of(plain)


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    source = asked_source(tmp_path, 4)
    with pytest.raises(UserError, match="circle compares images and texts; set images: true"):
        task_of(source, images=False)
    with pytest.raises(UserError, match="5 negative images and texts; .* give an even number"):
        task_of(source, negative_texts=1)
    with pytest.raises(UserError, match=r"rank\.max_length: 40 tokens .* raise `length` to 200"):
        dataset_of(source, task_of(source, max_length=40)).layouts(np.arange(4))
    with pytest.raises(UserError, match=r"rank\.max_length: missing; .*`length` tokens holds 5"):
        task_of(source, max_length=0).check(source, labelled=True)
    single = named_source(tmp_path)
    few = TableSource(single.table, np.array([0, 1, 4]), single.tokenizer, "few")
    with pytest.raises(UserError, match="few has texts of fewer than 2 images; the circle loss"):
        task_of(few).check(few, labelled=True)


@pytest.mark.slow
def test_it_is_learned(tmp_path: Path) -> None:
    """Held-out pairs are told from rows that do not belong together by five standard errors."""
    source = asked_source(tmp_path, 240)
    task = task_of(source, negative_images=2)
    model = learned(source, task, steps=40, lr=4e-3, **UNIMO)
    held = asked_source(tmp_path, 200, seed=2)
    _, batch = built_of(dataset_of(held, task.for_prediction()))
    with torch.no_grad():
        scores = model(batch, ("rank",))["rank"].scores[:, 0].numpy()
    built, _ = built_of(dataset_of(held, task.for_prediction()))
    items = [x.example.item for row in built for x in row]
    right = np.mean((scores > np.median(scores)) == task.belongs(held)[items])
    assert right - 0.5 > 5 * math.sqrt(0.25 / 200)
