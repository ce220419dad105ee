"""Ranking by group: trained as pairs, scored as scikit-learn scores each group. Images and texts by
the circle loss: which pairs stand beside a row's own, and ERNIE-ViL's loss restated in numpy."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.data.sources.table import TableSource
from palm_ds.data.stream.windows import LONGEST, DocumentDataset, DocumentSettings, DocumentWindows
from palm_ds.data.tasks.task import build
from palm_ds.tasks.metrics.ranking import pn_ratio
from palm_ds.tasks.ranking import Ranking
from palm_ds.tasks.shared.image_text import image_numbers
from tests.helpers.small_images import BOTH, BOXES, PICTURE, UNIMO, asked_rows
from tests.helpers.text_tables import (
    built_of,
    dataset_of,
    learned,
    make_task,
    model_of,
    small_tokenizer,
    source_of,
)

ROWS = [
    {"qid": 7, "text_a": "so ?", "text_b": "good", "label": 2},
    {"qid": 7, "text_a": "so ?", "text_b": "bad x", "label": 0},
    {"qid": 3, "text_a": "very ?", "text_b": "", "label": 1},
]


task_of = partial(make_task, Ranking, "answers")


def ranked_rows(groups: int, rng: np.random.Generator) -> list[dict]:
    """Candidates of groups in random order; the grades of some groups are all 0."""
    rows = [
        {"qid": f"q{group}", "text_a": f"{group}", "text_b": "x", "label": int(grade)}
        for group in range(groups)
        for grade in rng.integers(0, 1 if group % 4 == 0 else 4, rng.integers(2, 9))
    ]
    return [rows[i] for i in rng.permutation(len(rows))]


@pytest.mark.parametrize("relevant_from", [1, 3])
@pytest.mark.parametrize("by", ["qid", "text_a", "named"])
def test_scores_are_computed_per_group(tmp_path: Path, relevant_from: int, by: str) -> None:
    from sklearn.metrics import average_precision_score, f1_score, ndcg_score, roc_auc_score

    rng = np.random.default_rng(2)
    rows = ranked_rows(13, rng)
    if by == "text_a":
        rows = [{k: v for k, v in row.items() if k != "qid"} for row in rows]
    task = task_of(relevant_from=relevant_from, k=3, group="qid" if by == "named" else "")
    found = rng.normal(size=len(rows))
    made = {i: {"score": x, "label": int(x > 0)} for i, x in enumerate(found)}
    scores = task.metrics(made, source_of(tmp_path, rows))
    expected = {"mrr": [], "map": [], "ndcg@3": []}
    for group in range(13):
        mine = [i for i, row in enumerate(rows) if row["text_a"] == str(group)]
        grades = np.array([rows[i]["label"] for i in mine])
        relevant = grades >= relevant_from
        if grades.any():
            expected["ndcg@3"].append(ndcg_score([grades], [found[mine]], k=3))
        if relevant.any():
            order = np.argsort(-found[mine])
            expected["mrr"].append(1 / (1 + np.flatnonzero(relevant[order])[0]))
            expected["map"].append(average_precision_score(relevant, found[mine]))
    means = {name: float(np.mean(values)) for name, values in expected.items()}
    relevant = [row["label"] >= relevant_from for row in rows]
    assert list(scores) == ["mrr", "map", "ndcg@3", "pn_ratio", "auc", "f1"]
    means["pn_ratio"] = pn_ratio([row["text_a"] for row in rows], found, [r["label"] for r in rows])
    means |= {"f1": f1_score(relevant, found > 0), "auc": roc_auc_score(relevant, found)}
    assert scores == pytest.approx(means)


def test_the_baseline_knows_the_share_of_relevant_rows(tmp_path: Path) -> None:
    loss, right = task_of().baseline(np.array([1, 0]), source_of(tmp_path, ROWS))
    assert loss == pytest.approx(-np.log([3 / 5, 2 / 5]))
    assert right.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("grades", "said"),
    [
        ([0, 0, 0], "no candidate is relevant, .* grades are from 0 to 0, `relevant_from` is 1"),
        ([1, 2, 1], "every candidate is relevant, "),
    ],
)
def test_grades_that_order_nothing_are_said(tmp_path: Path, grades, said) -> None:
    rows = [{**row, "label": grade} for row, grade in zip(ROWS, grades, strict=True)]
    source = source_of(tmp_path, rows)
    assert re.search(said, task_of().describe(source))
    summary = f"{sum(map(bool, grades))} relevant (grade 1 or more)"
    assert summary in task_of().describe_rows(source, 64)


def test_grades_that_order_candidates_need_no_note(tmp_path: Path) -> None:
    assert task_of().describe(source_of(tmp_path, ROWS)) == ""


def test_groups_that_are_not_scored_are_counted(tmp_path: Path) -> None:
    source = source_of(tmp_path, [*ROWS, {**ROWS[0], "qid": 9, "label": 0}])
    note = "1 of 3 groups have no relevant candidate; MRR and MAP leave them out"
    assert task_of().describe(source) == f"answers: {note}"


def test_metrics_of_the_users_own_get_grades(tmp_path: Path) -> None:
    assert task_of().true_labels(source_of(tmp_path, ROWS)) == [2, 0, 1]


def test_a_missing_group_column_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tasks.answers: .* has no column 'question'"):
        task_of(group="question").check(source_of(tmp_path, ROWS), labeled=False)


def test_windows_of_a_long_candidate_have_the_question(tmp_path: Path) -> None:
    """One relevance: the odds of the mean probability, whose order is that of the means."""
    long = {"qid": 1, "text_a": "so ?", "text_b": "a b c " * 20, "label": 1}
    source = source_of(tmp_path, [long, ROWS[0]])
    task = task_of()
    windows = DocumentWindows.of(DocumentSettings(stride=20, readings=1), 32, 8)
    dataset = DocumentDataset.of(dataset_of(source, task, max_length=LONGEST), windows)
    layouts = dataset.layouts(np.arange(2))
    assert dataset.counts(layouts).tolist() == [3, 1]
    window = dataset.example(0, layouts[0])
    for number in range(3):
        layouts["window"] = number
        window = dataset.example(0, layouts[0])
        text = " ".join(small_tokenizer().tokens(window.input_ids))
        assert re.fullmatch(r"\[CLS\]( [abc])+ \[SEP\] so \? \[SEP\]( \[PAD\])*", text)
        types = window.token_type_ids[: int((window.input_ids > 0).sum())]
        assert types.tolist() == [0] * (len(types) - 3) + [1] * 3
        assert [x.tolist() for x in window.labels["answers"]] == [[0], [1]]
    pieces = [task.decode(np.array([[0.0, x]]), window, source) for x in (-40.0, 1.0, -2.0)]
    (joined,) = task.gather({0: pieces}, source).values()
    mean = np.mean([1 / (1 + np.exp(-x)) for x in (-40.0, 1.0, -2.0)])
    assert joined["score"] == pytest.approx(np.log(mean / (1 - mean)), abs=1e-9)
    assert joined["label"] == 0 and joined["probs"][1] == pytest.approx(mean, abs=1e-5)
    far = [task.decode(np.array([[0.0, x]]), window, source) for x in (-60.0, -62.0)]
    (joined,) = task.gather({0: far}, source).values()
    assert -62 < joined["score"] < -60
    assert task.gather({1: pieces[:1]}, source) == {1: pieces[0]}


@pytest.mark.parametrize("group", ["", "text_a"])
def test_images_and_texts_are_found_by_each_other(tmp_path: Path, group: str) -> None:
    """Recalls in both directions, over all pairs of 4 images and 8 texts."""
    rows = [
        {"text_a": f"t{text}", "pic": f"{image}.npz", "label": int(text // 2 == image)}
        for text in range(8)
        for image in range(4)
    ]
    source = source_of(tmp_path, rows, columns={"image": "pic"})
    task = task_of(images=True, group=group)
    scores = np.random.default_rng(3).normal(size=(8, 4))
    made = {i: {"score": float(x)} for i, x in enumerate(scores.ravel())}
    found = task.metrics(made, source)
    firsts = scores.argmax(1) == np.arange(8) // 2
    assert found["image_recall@1"] == pytest.approx(firsts.mean())
    texts = np.argsort(-scores, 0)
    for k in (1, 5):
        hits = [any(texts[place, image] // 2 == image for place in range(k)) for image in range(4)]
        assert found[f"text_recall@{k}"] == pytest.approx(np.mean(hits))
    assert found["image_recall@10"] == 1 and len(task.columns_of(source)) == 1
    by_text = [1 / (1 + (row > row[text // 2]).sum()) for text, row in enumerate(scores)]
    places = [min(np.flatnonzero(texts[:, image] // 2 == image)) for image in range(4)]
    expected = np.mean(by_text) if group else np.mean([1 / (1 + place) for place in places])
    assert found["mrr"] == pytest.approx(expected)


# The circle loss ---------------------------------------------------------------------------------


def circle_of(source: TableSource, **values: Any) -> Ranking:
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
    task = circle_of(source, negative_images=2, negative_texts=2)
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
    task = circle_of(source)
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
    task = circle_of(source, margin=margin, scale=scale)
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
    circle, plain = circle_of(source), circle_of(source, loss="classes")
    other = circle_of(source, loss="classes", negative_images=2, k=3)
    assert plain.input_key() == other.input_key() != circle.input_key()
    with pytest.raises(
        UserError, match=r"rank\.loss: 'circle', but the head is that of tasks.rank"
    ):
        circle.with_head_of(plain)


def test_what_is_wrong_with_a_circle_loss_is_said(tmp_path: Path) -> None:
    source = asked_source(tmp_path, 4)
    with pytest.raises(UserError, match="circle compares images and texts; set images: true"):
        circle_of(source, images=False)
    with pytest.raises(UserError, match="5 negative images and texts; .* give an even number"):
        circle_of(source, negative_texts=1)
    with pytest.raises(UserError, match=r"rank\.max_length: 40 tokens .* raise `length` to 200"):
        dataset_of(source, circle_of(source, max_length=40)).layouts(np.arange(4))
    with pytest.raises(UserError, match=r"rank\.max_length: missing; .*`length` tokens holds 5"):
        circle_of(source, max_length=0).check(source, labeled=True)
    single = named_source(tmp_path)
    few = TableSource(single.table, np.array([0, 1, 4]), single.tokenizer, "few")
    with pytest.raises(UserError, match="few has texts of fewer than 2 images; the circle loss"):
        circle_of(few).check(few, labeled=True)


@pytest.mark.slow
def test_the_circle_loss_is_learned(tmp_path: Path) -> None:
    """Held-out pairs are told from rows that do not belong together by five standard errors."""
    source = asked_source(tmp_path, 240)
    task = circle_of(source, negative_images=2)
    model = learned(source, task, steps=40, lr=4e-3, **UNIMO)
    held = asked_source(tmp_path, 200, seed=2)
    _, batch = built_of(dataset_of(held, task.for_prediction()))
    with torch.no_grad():
        scores = model(batch, ("rank",))["rank"].scores[:, 0].numpy()
    built, _ = built_of(dataset_of(held, task.for_prediction()))
    items = [x.example.item for row in built for x in row]
    right = np.mean((scores > np.median(scores)) == task.belongs(held)[items])
    assert right - 0.5 > 5 * math.sqrt(0.25 / 200)
