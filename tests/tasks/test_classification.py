"""Classification: equal to BertForSequenceClassification, labels inferred and checked, weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score
from torch.nn import functional as F  # noqa: N812
from transformers import BertForSequenceClassification

from palm_ds.common.errors import UserError
from palm_ds.data.tasks.task import build
from palm_ds.tasks.classification import Classification
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
    {"text_a": "so good", "text_b": "very good", "label": "yes"},
    {"text_a": "so bad ?", "text_b": "", "label": "no"},
    {"text_a": "", "text_b": "x y z", "label": "perhaps"},
    {"text_a": "very bads", "text_b": "good good good", "label": "yes"},
]


def task_of(**values) -> Classification:
    task = build("mood", {"kind": "classification", "source": "s", **values})
    assert isinstance(task, Classification)
    return task


def test_logits_and_loss_equal_transformers(tmp_path: Path) -> None:
    source = source_of(tmp_path, ROWS)
    task = task_of().resolved(source)
    assert task.labels == ("no", "perhaps", "yes")
    theirs = BertForSequenceClassification(bert_config(num_labels=3)).eval()
    model = model_of(task)
    same_weights(model, theirs, "mood")
    labels = torch.tensor([2, 0, 1, 2])
    rows = padded([(row["text_a"], row["text_b"]) for row in ROWS])
    with torch.no_grad():
        expected = theirs(**rows.arguments, labels=labels)
    made = predictions(model, source, task)["mood"]
    logits = torch.tensor([made[item]["logits"] for item in range(4)])
    torch.testing.assert_close(logits, expected.logits, atol=1e-5, rtol=0)
    probs = torch.tensor([made[item]["probs"] for item in range(4)])
    torch.testing.assert_close(probs, expected.logits.softmax(-1), atol=1e-5, rtol=0)
    assert [made[i]["label"] for i in range(4)] == [
        task.labels[i] for i in expected.logits.argmax(-1)
    ]
    _, batch = built_of(dataset_of(source, task))
    with torch.no_grad():
        output = model(batch)["mood"]
    torch.testing.assert_close(output.loss_sum / 4, expected.loss, atol=1e-5, rtol=0)
    assert output.correct == (expected.logits.argmax(-1) == labels).sum()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weights_and_smoothing_equal_torchs_in_training(tmp_path, smoothing) -> None:
    source = source_of(tmp_path, ROWS)
    task = task_of(class_weights={"yes": 0.5, "no": 3}, smoothing=smoothing, dropout=0.0)
    task = task.resolved(source)
    model = model_of(task)
    head = model.heads["mood"]
    rows, targets = torch.randn(7, 16), torch.tensor([0, 1, 2, 2, 1, 0, 2])
    logits = head.logits(rows)  # type: ignore[operator]
    weight = torch.tensor([3.0, 1.0, 0.5])
    model.train()
    expected = F.cross_entropy(logits, targets, weight, reduction="sum", label_smoothing=smoothing)
    torch.testing.assert_close(head(rows, targets).loss_sum, expected)
    model.eval()  # held-out losses are comparable between runs with and without
    expected = F.cross_entropy(logits, targets, reduction="sum")
    torch.testing.assert_close(head(rows, targets).loss_sum, expected)


def test_balanced_weights_make_all_classes_count_the_same(tmp_path: Path) -> None:
    rows = [{"text_a": "x", "label": i} for i in [0] * 6 + [1] * 3 + [2]]
    task = task_of(class_weights="balanced").resolved(source_of(tmp_path, rows))
    weights = task.class_weights
    assert isinstance(weights, dict)
    assert weights == pytest.approx({"0": 10 / 18, "1": 10 / 9, "2": 10 / 3}, abs=1e-6)
    assert build("mood", {"kind": "classification", "source": "s", "class_weights": weights})


def test_numeric_classes_are_sorted_as_numbers(tmp_path: Path) -> None:
    rows = [{"text_a": "x", "label": label} for label in (10, 9, -1, 9)]
    assert task_of().resolved(source_of(tmp_path, rows)).labels == ("-1", "9", "10")


def test_scores_skip_rows_without_a_label(tmp_path: Path) -> None:
    rows = [{"text_a": "x", "label": x} for x in ("no", "yes", "?", "yes", "no")]
    source = source_of(tmp_path, rows)
    task = task_of(labels=["no", "yes"])
    assert task.targets(source).tolist() == [0, 1, -1, 1, 0]
    made = {i: {"label": x} for i, x in enumerate(["no", "yes", "yes", "no", "yes"])}
    scores = task.metrics(made, source)
    assert list(scores) == ["accuracy", "f1", "matthews"]
    assert scores["accuracy"] == 0.5
    assert scores["f1"] == pytest.approx(f1_score([0, 1, 1, 0], [0, 1, 0, 1]))
    other = task_of(labels=["no", "yes"], positive="no").metrics(made, source)
    assert other["f1"] == pytest.approx(f1_score([1, 0, 0, 1], [1, 0, 1, 0]))
    assert task.metrics({2: {"label": "no"}}, source) == {}
    loss, right = task.baseline(np.array([0, 1]), source)
    assert loss == pytest.approx([np.log(2)] * 2)
    assert right.sum() == 1


def test_a_table_without_labels_is_predicted(tmp_path: Path) -> None:
    source = source_of(tmp_path, [{"text_a": "good"}, {"text_a": ""}, {"text_a": "bad"}])
    task = task_of(labels=["no", "yes"])
    task.check(source, labelled=False)
    made = predictions(model_of(task), source, task)["mood"]
    assert sorted(made) == [0, 1, 2]
    assert task.metrics(made, source) == {}


def test_long_texts_are_truncated_and_keep_their_label(tmp_path: Path) -> None:
    rows = [{"text_a": "x " * 300, "text_b": "y " * 20, "label": "yes"}, ROWS[0]]
    source = source_of(tmp_path, rows)
    task = task_of(labels=["no", "yes"])
    built, batch = built_of(dataset_of(source, task, max_length=32))
    assert batch.count("mood") == 2
    (long,) = (e for row in built for _, e in row if e.item == 0)
    assert len(long) == 32
    words = small_words(long.input_ids)
    assert (words.count("x"), words.count("y")) == (15, 14)  # the longer is cut first
    short = task_of(labels=["no", "yes"], max_length=9)
    assert short.layout(np.array([[0]]), np.empty((1, 0)), source, 32)["length"][0] == 9


def small_words(ids) -> list[str]:
    from tests.helpers.text_tables import small_tokenizer

    return small_tokenizer().tokens(ids)


def test_it_learns(tmp_path: Path) -> None:
    rows = [
        {"text_a": f"{a} {mood} {b}", "label": mood}
        for mood in ("good", "bad")
        for a in "abcd"
        for b in "xyz"
    ]
    source = source_of(tmp_path, rows)
    task = task_of(dropout=0.0).resolved(source)
    made = predictions(learned(source, task), source, task)["mood"]
    assert task.metrics(made, source)["accuracy"] == 1.0


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("text_a\tlabel\ngood\tyes\nbad\tnope\n", r":3: label: unknown label 'nope'.*has no, yes"),
        ("text_a\tlabel\ngood\tyse\n", r':2: label: unknown label \'yse\'; did you mean "yes"\?'),
        ("text_a\tlable\ngood\tyes\n", r"tasks.mood: .* has no column 'label'"),
        ("label\tqid\nyes\t1\n", r"tasks.mood: .* has no column 'text_a'"),
    ],
)
def test_bad_rows_are_reported_with_their_place(tmp_path, lines, message) -> None:
    file = tmp_path / "dev.tsv"
    file.write_text(lines)
    with pytest.raises(UserError, match=message) as raised:
        task_of(labels=["no", "yes"]).check(opened(file), labelled=True)
    assert "\n" not in str(raised.value)


def test_several_labels_in_a_row_are_refused(tmp_path: Path) -> None:
    source = source_of(tmp_path, [ROWS[0], {**ROWS[1], "label": ["yes", "no"]}])
    with pytest.raises(UserError, match=r"jsonl:2: label: 2 labels, .*`kind: multi_label`"):
        task_of(labels=["no", "yes"]).check(source, labelled=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"labels": ["a", "b"], "positive": "c"}, r"tasks.mood.positive: 'c' is not a label"),
        ({"labels": ["a", "b", "a"]}, r"tasks.mood.labels: duplicate name"),
        ({"labels": ["a"]}, r"'a' is the only label"),
        ({"labels": ["a", "b "]}, r"tasks.mood.labels: 'b ' has spaces around it"),
        ({"labels": ["a", ""]}, r"tasks.mood.labels: '' is empty; name each class"),
        ({"smoothing": 1.0}, r"tasks.mood.smoothing: 1.0 is not"),
        ({"class_weights": {"a": -1}}, r"class_weights: a weight is negative"),
        ({"labels": ["a", "b"], "class_weights": {"c": 1}}, r"class_weights: 'c' is not a label"),
        ({"class_weights": "balance"}, r"tasks.mood.class_weights"),
        ({"dorpout": 0.1}, r"tasks.mood.dorpout: unknown key; did you mean \"dropout\"\?"),
    ],
)
def test_bad_settings_are_refused(values, message) -> None:
    with pytest.raises(UserError, match=message):
        task_of(**values)


def test_odd_labels_are_remarked_on_when_a_run_starts(tmp_path: Path) -> None:
    source = source_of(tmp_path, [{**ROWS[0], "label": f"{i / 7:.3f}"} for i in range(12)])
    assert (
        "mood: labels: 12 different numbers"
        in dataset_of(source, task_of().resolved(source)).describe()
    )
    source = source_of(tmp_path, ROWS)
    assert dataset_of(source, task_of().resolved(source)).describe() == ""


def test_a_single_class_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'yes' is the only label; there must be two or more"):
        task_of().resolved(source_of(tmp_path, [ROWS[0], ROWS[3]]))
