"""Ranking by group: trained as pairs, scored as scikit-learn scores each group."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.data.stream.windows import LONGEST, DocumentDataset, DocumentSettings, DocumentWindows
from palm_ds.tasks.metrics.ranking import pn_ratio
from palm_ds.tasks.ranking import Ranking
from tests.helpers.text_tables import dataset_of, make_task, small_tokenizer, source_of

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


def test_a_missing_group_column_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tasks.answers: .* has no column 'question'"):
        task_of(group="question").check(source_of(tmp_path, ROWS), labelled=False)


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
