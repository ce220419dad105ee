"""Several labels per row: equal to BertForSequenceClassification, cells split, scores by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score
from transformers import BertForSequenceClassification

from palm_ds.common.errors import UserError
from palm_ds.data.tasks.task import build
from palm_ds.tasks.multi_label import MultiLabel
from tests.helpers.text_tables import (
    bert_config,
    built_of,
    dataset_of,
    learned,
    model_of,
    opened,
    padded,
    predictions,
    same_weights,
    source_of,
)

ROWS = [
    {"text_a": "so good", "label": ["sport", "arts"]},
    {"text_a": "very bads ?", "label": []},
    {"text_a": "", "label": ["law"]},
    {"text_a": "x y z", "label": ["arts"]},
]
TARGETS = torch.tensor([[1.0, 0, 1], [0, 0, 0], [0, 1, 0], [1, 0, 0]])


def task_of(**values) -> MultiLabel:
    task = build("topics", {"kind": "multi_label", "source": "s", **values})
    assert isinstance(task, MultiLabel)
    return task


def test_logits_and_loss_equal_transformers(tmp_path: Path) -> None:
    source = source_of(tmp_path, ROWS)
    task = task_of(threshold=0.4).resolved(source)
    assert task.labels == ("arts", "law", "sport")
    assert task.targets(source).tolist() == TARGETS.tolist()
    config = bert_config(num_labels=3, problem_type="multi_label_classification")
    theirs = BertForSequenceClassification(config).eval()
    model = model_of(task)
    same_weights(model, theirs, "topics")
    with torch.no_grad():
        expected = theirs(**padded([[row["text_a"]] for row in ROWS]).arguments, labels=TARGETS)
    made = predictions(model, source, task)["topics"]
    logits = torch.tensor([made[item]["logits"] for item in range(4)])
    torch.testing.assert_close(logits, expected.logits, atol=1e-5, rtol=0)
    probs = expected.logits.sigmoid()
    torch.testing.assert_close(
        torch.tensor([made[i]["probs"] for i in range(4)]), probs, atol=1e-5, rtol=0
    )
    for item in range(4):
        named = [x for x, p in zip(task.labels, probs[item], strict=True) if p >= 0.4]
        assert made[item]["labels"] == named
    _, batch = built_of(dataset_of(source, task))
    with torch.no_grad():
        output = model(batch)["topics"]
    torch.testing.assert_close(output.loss_sum / 4, expected.loss, atol=1e-5, rtol=0)
    assert output.correct == ((probs >= 0.4) == (TARGETS > 0)).all(-1).sum()


def test_scores_equal_scikit_learns_over_labelled_rows(tmp_path: Path) -> None:
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


def test_cells_of_text_are_split(tmp_path: Path) -> None:
    file = tmp_path / "train.tsv"
    file.write_text("text_a\tlabel\ngood\tsport; arts\nbad\tno\nx\tlaw\n")
    task = task_of(separator=";", nothing="no").resolved(opened(file))
    assert task.labels == ("arts", "law", "sport")
    assert task.targets(opened(file)).tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    task.check(opened(file), labelled=True)


def test_the_baseline_knows_class_frequencies(tmp_path: Path) -> None:
    source = source_of(tmp_path, ROWS)
    task = task_of().resolved(source)
    share = np.array([3, 2, 2]) / 6
    loss, right = task.baseline(TARGETS.numpy(), source)
    expected = -(TARGETS.numpy() * np.log(share) + (1 - TARGETS.numpy()) * np.log(1 - share))
    assert loss == pytest.approx(expected.mean(1))
    assert right.tolist() == [0, 0, 0, 1]  # a share of one half is predicted
    assert [len(x) for x in task.baseline(np.empty(0, int), source)] == [0, 0]


def test_a_table_without_labels_is_predicted(tmp_path: Path) -> None:
    source = source_of(tmp_path, [{"text_a": "good"}, {"text_a": "x " * 200}])
    task = task_of(labels=["a", "b"])
    task.check(source, labelled=False)
    made = predictions(model_of(task), source, task)["topics"]
    assert [len(made[item]["probs"]) for item in (0, 1)] == [2, 2]


def test_it_learns(tmp_path: Path) -> None:
    rows = [
        {"text_a": f"{c} {a} {b}", "label": [x for x in (a, b) if x in ("good", "bad")]}
        for a in ("good", "so")
        for b in ("bad", "very")
        for c in "abcd"
    ]
    source = source_of(tmp_path, rows)
    task = task_of(dropout=0.0).resolved(source)
    made = predictions(learned(source, task), source, task)["topics"]
    assert task.metrics(made, source)["exact_match"] == 1.0


def test_another_separator_is_remarked_on(tmp_path: Path) -> None:
    rows = [{"text_a": "a", "label": label} for label in ("x;y", "y", "x")]
    source = source_of(tmp_path, rows)
    assert "'x;y' is one class; is `separator` right?" in task_of().describe(source)
    assert task_of(separator=";").describe(source) == ""


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text_a": "x", "label": ["a", "c"]}], r"jsonl:1: label: unknown label 'c'"),
        (
            [{"text_a": "x", "label": "a"}, {"text_a": "x", "label": "a,B"}],
            r"jsonl:2: label: unknown label 'B'",
        ),
        ([{"text_a": "x"}], r"tasks.topics: .* has no column 'label'"),
    ],
)
def test_bad_rows_are_reported_with_their_place(tmp_path: Path, rows, message) -> None:
    with pytest.raises(UserError, match=message) as raised:
        task_of(labels=["a", "b"]).check(source_of(tmp_path, rows), labelled=True)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"threshold": 0}, "tasks.topics.threshold: 0.0 is not between"),
        ({"threshold": 1}, "tasks.topics.threshold"),
        ({"separator": ""}, "tasks.topics.separator is empty"),
        ({"labels": ["a", "a"]}, "tasks.topics.labels: duplicate name"),
    ],
)
def test_bad_settings_are_refused(values, message) -> None:
    with pytest.raises(UserError, match=message):
        task_of(**values)


def test_a_table_without_any_class_is_an_error(tmp_path: Path) -> None:
    source = source_of(tmp_path, [{"text_a": "x", "label": []}])
    with pytest.raises(UserError, match="tasks.topics: .* has no label in column 'label'"):
        task_of().resolved(source)
    assert json.loads(json.dumps(vars(task_of())))["threshold"] == 0.5
