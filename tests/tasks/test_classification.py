"""Classification: equal to BertForSequenceClassification, labels inferred and checked, weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from palm_ds.common.errors import UserError
from palm_ds.data.stream.windows import (
    LONGEST,
    DocumentDataset,
    DocumentSettings,
    DocumentWindows,
)
from palm_ds.data.tasks.task import build
from palm_ds.tasks.classification import Classification
from tests.helpers.text_tables import built_of, dataset_of, make_task, model_of, source_of

ROWS = [
    {"text_a": "so good", "text_b": "very good", "label": "yes"},
    {"text_a": "so bad ?", "text_b": "", "label": "no"},
    {"text_a": "", "text_b": "x y z", "label": "perhaps"},
    {"text_a": "very bads", "text_b": "good good good", "label": "yes"},
]


task_of = partial(make_task, Classification, "mood")


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


def test_numeric_classes_are_sorted_as_numbers_before_names(tmp_path: Path) -> None:
    names = ("nan", *map(str, range(-1, 30)), "inf")  # NaN is neither below nor above a number
    rows = [{"text_a": "x", "label": label} for label in names]
    labels = task_of().resolved(source_of(tmp_path, rows)).labels
    assert labels == (*map(str, range(-1, 30)), "inf", "nan")


def test_scores_skip_rows_without_a_label(tmp_path: Path) -> None:
    from sklearn.metrics import f1_score

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


def test_scores_at_a_precision_and_a_threshold(tmp_path: Path) -> None:
    rows = [{"text_a": "x", "label": x} for x in ("no", "yes", "?", "yes", "no")]
    source = source_of(tmp_path, rows)
    shares = (0.1, 0.9, 0.99, 0.3, 0.6)
    made = {i: {"label": "no", "probs": [1 - share, share]} for i, share in enumerate(shares)}
    task = task_of(labels=["no", "yes"], recall_at_precision=0.6, precision_at_threshold=0.55)
    scores = task.metrics(made, source)
    assert (scores["recall_at_precision"], scores["precision_at_threshold"]) == (1.0, 0.5)
    other = task_of(labels=["no", "yes"], recall_at_precision=0.9, positive="no")
    assert other.metrics(made, source)["recall_at_precision"] == 0.5
    with pytest.raises(UserError, match="mood.recall_at_precision: name the class of it in `posi"):
        task_of(labels=["a", "b", "c"], recall_at_precision=0.9)
    assert task.metrics({2: {"label": "no"}}, source) == {}
    loss, right = task.baseline(np.array([0, 1]), source)
    assert loss == pytest.approx([np.log(2)] * 2)
    assert right.sum() == 1


def test_the_auc_of_a_sure_classifier_is_that_of_its_scores(tmp_path: Path) -> None:
    """Probabilities within a millionth of 1 are still told apart."""
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(0)
    actual = rng.random(200) < 0.3
    scores = rng.normal(np.where(actual, 19, 17), 1.5)
    source = source_of(tmp_path, [{"text_a": "x", "label": int(x)} for x in actual])
    task = task_of().resolved(source)
    made = {
        i: task.decode(np.array([[0.0, x]]), None, source)  # type: ignore[arg-type]
        for i, x in enumerate(scores)
    }
    expected = roc_auc_score(actual, scores)
    assert task.metrics(made, source)["auc"] == pytest.approx(expected)
    other = task_of(positive="0").resolved(source)
    assert other.metrics(made, source)["auc"] == pytest.approx(expected)


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


def test_windows_of_a_document_have_its_label_and_one_prediction(tmp_path: Path) -> None:
    """As in ERNIE-Doc's code: the class of the highest mean probability of its windows."""
    source = source_of(tmp_path, [{"text_a": "x " * 70, "label": "yes"}])
    task = task_of(labels=["no", "yes"])
    windows = DocumentWindows.of(DocumentSettings(stride=20), 32, 8)
    dataset = DocumentDataset.of(dataset_of(source, task, max_length=LONGEST), windows)
    (layout,) = dataset.layouts(np.arange(1))
    assert dataset.counts(layout[None]).tolist() == [6]
    labels = []
    for layout["window"] in range(6):
        found = dataset.example(0, layout).labels.get("mood", (np.array([]), np.array([])))
        labels.append([x.tolist() for x in found])
    assert labels == [[[], []]] * 3 + [[[31], [1]]] * 3
    pieces = [{"label": "no", "logits": [1.0, 0.0], "probs": [0.7, 0.3]}] * 2
    pieces.append({"label": "yes", "logits": [0.0, 4.0], "probs": [0.02, 0.98]})
    (gathered,) = task.gather({0: pieces}, source).values()
    assert gathered["label"] == "yes" and sum(gathered["probs"]) == pytest.approx(1, abs=1e-3)
    assert task.gather({0: pieces[:1]}, source) == {0: pieces[0]}


def small_words(ids) -> list[str]:
    from tests.helpers.text_tables import small_tokenizer

    return small_tokenizer().tokens(ids)


def test_several_labels_in_a_row_are_refused(tmp_path: Path) -> None:
    source = source_of(tmp_path, [ROWS[0], {**ROWS[1], "label": ["yes", "no"]}])
    with pytest.raises(UserError, match=r"jsonl:2: label: 2 labels, .*`kind: multi_label`"):
        task_of(labels=["no", "yes"]).check(source, labeled=True)


def test_classes_in_lists_of_one_are_read_as_doccano_writes_them(tmp_path: Path) -> None:
    rows = [{"text_a": "x", "label": ["pos, a"]}, {"text_a": "y", "label": ["neg"]}]
    source = source_of(tmp_path, rows)
    task = make_task(Classification, "one").resolved(source)
    assert task.labels == ("neg", "pos, a")
    task.check(source, labeled=True)
    assert task.true_labels(source) == ["pos, a", "neg"]
    assert task.describe_labels(source) == "neg 1, pos, a 1"
    nothing = source_of(tmp_path, [*rows, {"text_a": "z", "label": []}])
    with pytest.raises(UserError, match=r":3: label is an empty list; `read: {drop: {label: "):
        task.check(nothing, labeled=True)
    read = {"drop": {"label": ["[]"]}}
    assert len(source_of(tmp_path, [*rows, {"text_a": "z", "label": []}], **read)) == 2


def test_odd_labels_are_remarked_on_when_a_run_starts(tmp_path: Path) -> None:
    source = source_of(tmp_path, [{**ROWS[0], "label": f"{i / 7:.3f}"} for i in range(12)])
    assert (
        "mood: labels: 12 different numbers"
        in dataset_of(source, task_of().resolved(source)).describe()
    )
    source = source_of(tmp_path, ROWS)
    assert dataset_of(source, task_of().resolved(source)).describe() == ""


def test_a_question_beside_the_text_is_not_lost_silently(tmp_path: Path) -> None:
    """As in GLUE's QNLI, whose columns are question and sentence."""
    rows = [{"question": "so ?", "sentence": "good", "label": x} for x in ("yes", "no")]
    source = source_of(tmp_path, rows)
    note = "the column question is not read; `texts: [question, text_a]` reads it, too"
    assert note in task_of().resolved(source).describe(source)
    both = task_of(texts=["question", "text_a"]).resolved(source)
    assert both.describe(source) == "" and both.columns_of(source) == ("question", "text_a")


def test_a_single_class_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'yes' is the only label; there must be two or more"):
        task_of().resolved(source_of(tmp_path, [ROWS[0], ROWS[3]]))
