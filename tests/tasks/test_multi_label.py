"""Several labels per row: equal to BertForSequenceClassification, cells split, scores by hand."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.data.tasks.interfaces import StoredPrediction
from palm_ds.tasks.classification import Classification
from palm_ds.tasks.multi_label import MultiLabel
from tests.helpers.text_tables import make_task, opened, source_of

ROWS = [
    {"text_a": "so good", "label": ["sport", "arts"]},
    {"text_a": "very bads ?", "label": []},
    {"text_a": "", "label": ["law"]},
    {"text_a": "x y z", "label": ["arts"]},
]
TARGETS = torch.tensor([[1.0, 0, 1], [0, 0, 0], [0, 1, 0], [1, 0, 0]])


task_of = partial(make_task, MultiLabel, "topics")


def test_scores_equal_scikit_learns_over_labeled_rows(tmp_path: Path) -> None:
    from sklearn.metrics import f1_score

    rows = [*ROWS, {"text_a": "y", "label": ["weather"]}]
    source = source_of(tmp_path, rows)
    task = task_of(labels=["arts", "law", "sport"])
    found = [["arts"], [], ["law", "arts"], ["arts"], ["law"]]
    scores = task.metrics({i: {"labels": x} for i, x in enumerate(found)}, source)
    table = np.array([[name in x for name in task.labels] for x in found[:4]]).astype(int)
    truth = TARGETS.numpy().astype(int)
    assert next(iter(scores)) == "micro_f1"
    assert scores["micro_f1"] == pytest.approx(f1_score(truth, table, average="micro"))
    assert scores["macro_f1"] == pytest.approx(
        f1_score(truth, table, average="macro", zero_division=0)
    )
    assert scores["exact_match"] == 0.5
    assert (scores["precision"], scores["recall"]) == (3 / 4, 3 / 4)
    assert task.metrics({4: {"labels": []}}, source) == {}
    probs = np.random.default_rng(1).uniform(size=(5, 3))
    made = {i: {"labels": x, "probs": probs[i].tolist()} for i, x in enumerate(found)}
    products = (probs[:4] * truth).sum(1)
    norms = np.linalg.norm(probs[:4], axis=1) * np.maximum(np.linalg.norm(truth, axis=1), 1e-9)
    assert task.metrics(made, source)["cosine"] == pytest.approx((products / norms).mean())


def test_cells_of_text_are_split(tmp_path: Path) -> None:
    file = tmp_path / "train.tsv"
    file.write_text("text_a\tlabel\ngood\tsport; arts\nbad\tno\nx\tlaw\n")
    task = task_of(separator=";", nothing="no").resolved(opened(file))
    assert task.labels == ("arts", "law", "sport")
    assert task.targets(opened(file)).tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    task.check(opened(file), labeled=True)


def test_lists_in_cells_are_json(tmp_path: Path) -> None:
    file = tmp_path / "train.tsv"
    file.write_text('text_a\tlabel\ngood\t["sport, x", "arts"]\nbad\t[]\nx\tlaw\n')
    task = task_of().resolved(opened(file))
    assert task.labels == ("arts", "law", "sport, x")
    assert task.targets(opened(file)).tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    file.write_text("text_a\tlabel\ngood\t['sport', 'arts']\n")
    message = (
        r"train.tsv:2: label is \"\['sport', 'arts'\]\", a list as Python prints it; write JSON"
    )
    with pytest.raises(UserError, match=message):
        task.check(opened(file), labeled=True)


def test_a_listed_class_may_have_the_name_of_no_class(tmp_path: Path) -> None:
    """A list without classes is empty, so that `none` in it is one."""
    rows = [{"text_a": "a", "label": x} for x in (["law", "none"], ["none"], [], "none")]
    source = source_of(tmp_path, rows)
    task = task_of().resolved(source)
    assert task.labels == ("law", "none")
    assert task.targets(source).tolist() == [[1, 1], [0, 1], [0, 0], [0, 0]]
    stored = StoredPrediction(values={"labels": ["none"]}, place="p:1")
    scored, made = task.prepared(source, [stored] * len(rows))
    assert scored.metrics(made, source)["recall"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("value", [[0.0, 1.0, 1.0], [0, 0], [True, False, False]])
def test_a_number_for_each_class_is_no_list_of_names(tmp_path: Path, value: list[float]) -> None:
    """As transformers' models of several labels have it; 0.0 and 1.0 would be the classes."""
    source = source_of(tmp_path, [{"text_a": "a", "label": value}, {"text_a": "b", "label": ["x"]}])
    message = r"1: label: .*: a 0 or 1 for each class; tasks.topics expects the names of those"
    with pytest.raises(UserError, match=message):
        task_of().resolved(source).check(source, labeled=True)


def test_the_baseline_knows_class_frequencies(tmp_path: Path) -> None:
    source = source_of(tmp_path, ROWS)
    task = task_of().resolved(source)
    share = np.array([3, 2, 2]) / 6
    loss, right = task.baseline(TARGETS.numpy(), source)
    expected = -(TARGETS.numpy() * np.log(share) + (1 - TARGETS.numpy()) * np.log(1 - share))
    assert loss == pytest.approx(expected.mean(1))
    assert right.tolist() == [0, 0, 0, 1]  # a share of one half is predicted
    assert [len(x) for x in task.baseline(np.empty(0, int), source)] == [0, 0]


def test_stored_probabilities_are_scored_where_their_classes_are_known(tmp_path: Path) -> None:
    source = source_of(tmp_path, ROWS)
    task = task_of(labels=["arts", "law", "sport"])
    stored = [
        StoredPrediction(values={"labels": ["arts"], "probs": [0.9, 0.1, 0.2]}, place="p:1")
    ] * len(ROWS)
    read, made = task.prepared(source, stored)
    assert "cosine" in read.metrics(made, source)
    report = read.report(made, source)
    assert report and report.record()["calibration"]["bins"][-1]["accuracy"] == 0.5  # arts: 0.9
    unknown, made = task_of().prepared(source, stored)  # of which classes they are
    assert "cosine" not in unknown.metrics(made, source)
    wrong = [StoredPrediction(values={"labels": [], "probs": ["x", 0.1, 0.2]}, place="p:1")]
    with pytest.raises(UserError, match="probs: expected a number for each class"):
        read.metrics(task.prepared(source, wrong * len(ROWS))[1], source)


def test_another_separator_is_remarked_on(tmp_path: Path) -> None:
    rows = [{"text_a": "a", "label": label} for label in ("x;y", "y", "x")]
    source = source_of(tmp_path, rows)
    assert "'x;y' is one class; is `separator` right?" in task_of().describe(source)
    assert task_of(separator=";").describe(source) == ""


def test_a_table_without_any_class_is_an_error(tmp_path: Path) -> None:
    source = source_of(tmp_path, [{"text_a": "x", "label": []}])
    with pytest.raises(UserError, match="tasks.topics: .* has no label in column 'label'"):
        task_of().resolved(source)
    assert json.loads(json.dumps(asdict(task_of())))["threshold"] == 0.5


WORTH = [{"text_a": "a", "label": {"two": 1, "three": 0.3}}, {"text_a": "b", "label": {"no": 0.6}}]


def test_soft_labels_say_what_classes_are_worth(tmp_path: Path) -> None:
    rows = [*WORTH, {"text_a": "c", "label": {"two": 0, "no": 1}}]
    source = source_of(tmp_path, rows)
    task = task_of().resolved(source)
    task.check(source, labeled=True)
    assert task.soft and task.labels == ("no", "three", "two")
    assert task.targets(source) == pytest.approx(
        np.array([[0, 0.3, 1], [0.6, 0, 0], [1, 0, 0]], np.float32)
    )
    share = (task.targets(source).sum(0) + 1) / 5
    loss, _ = task.baseline(task.targets(source), source)
    expected = -(0.6 * np.log(share[0]) + 0.4 * np.log(1 - share[0]) + np.log(1 - share[1:]).sum())
    assert loss[1] == pytest.approx(expected / 3)
    made = {
        0: {"best": "three", "probs": [0.1, 0.9, 0.8]},
        1: {"best": "no", "probs": [0.9, 0, 0.1]},
    }
    scores = task.metrics(made, source)
    assert list(scores) == ["soft_accuracy", "cosine"]
    assert scores["soft_accuracy"] == pytest.approx((0.3 + 0.6) / 2)
    stored = [StoredPrediction(values={"cell": x}, place="p:1") for x in ("two", "no", "what")]
    scored, read = task_of().prepared(source := source_of(tmp_path, rows), stored)
    assert scored.metrics(read, source)["soft_accuracy"] == pytest.approx(1.6 / 3)
    assert task.true_labels(source)[1] == {"no": 0.6}
    assert not task_of().resolved(source_of(tmp_path, ROWS)).soft
    assert task.describe_labels(source) == ""
    listed = source_of(tmp_path, ROWS)
    assert task_of().resolved(listed).describe_labels(listed) == "arts 2, law 1, sport 1"


def test_what_a_class_is_worth_is_a_number_up_to_1(tmp_path: Path) -> None:
    rows = [*WORTH, {"text_a": "c", "label": {"two": 3}}]
    with pytest.raises(UserError, match=":3: label: a class is worth 3; expected .* from 0 to 1"):
        source_of(tmp_path, rows)
    source, one = source_of(tmp_path, WORTH), make_task(Classification, "one", labels=["no", "two"])
    with pytest.raises(UserError, match="2 labels, but tasks.one expects one; .*multi_label"):
        one.check(source, labeled=True)
