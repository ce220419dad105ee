"""What holds for a fine-tuning task of any kind: predictions and loss are transformers', rows
without labels are predicted, stored predictions have the same scores, it learns, its head is shared
with its own kind only, and mistakes in settings and rows are one line with their place."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertForMultipleChoice, BertForSequenceClassification

from palm_ds.common.errors import UserError
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.interfaces import StoredPrediction
from palm_ds.data.tasks.task import build
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

Row = dict[str, Any]
NAMES = {
    "classification": "mood",
    "regression": "degree",
    "multi_label": "topics",
    "matching": "match",
    "multiple_choice": "exam",
    "ranking": "answers",
    "reading": "qa",
    "masked_words": "words",
    "generation": "titles",
    "tagging": "slots",
}


def task_of(kind: str, **values: Any) -> Any:
    short = {"max_target": 8} if kind == "generation" else {}
    return build(NAMES[kind], {"kind": kind, "source": "s", **short, **values})


# transformers ----------------------------------------------------------------------------------


def classes(task: Any, logits: torch.Tensor) -> Row:
    return {
        "label": task.labels[int(logits.argmax())],
        "logits": logits.tolist(),
        "probs": logits.softmax(-1).tolist(),
    }


def several(task: Any, logits: torch.Tensor) -> Row:
    probs = logits.sigmoid().tolist()
    named = [name for name, p in zip(task.labels, probs, strict=True) if p >= task.threshold]
    return {"labels": named, "logits": logits.tolist(), "probs": probs}


def number(task: Any, logits: torch.Tensor) -> Row:
    return {"value": float(logits[0]) * (task.deviation or 1.0) + task.mean}


def ranked(_task: Any, logits: torch.Tensor) -> Row:
    found = {"label": int(logits.argmax()), "score": float(logits[1] - logits[0])}
    return found | {"logits": logits.tolist(), "probs": logits.softmax(-1).tolist()}


def chosen(_task: Any, logits: torch.Tensor) -> Row:
    found = {"label": str(int(logits.argmax())), "logits": logits.tolist()}
    return found | {"probs": logits.softmax(-1).tolist()}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows, what transformers calls their labels, and what its scores of a row predict."""

    kind: str
    rows: Sequence[Row]
    targets: Sequence[Any]
    predicts: Callable[[Any, torch.Tensor], Row]
    values: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


MOODS = [
    {"text_a": "so good", "text_b": "very good", "label": "yes"},
    {"text_a": "so bad ?", "text_b": "", "label": "no"},
    {"text_a": "", "text_b": "x y z", "label": "perhaps"},
    {"text_a": "very bads", "text_b": "good good good", "label": "yes"},
]
DEGREES = [
    {"text_a": "so good", "text_b": "good", "label": 4.5},
    {"text_a": "bad", "text_b": "very good ?", "label": 1},
    {"text_a": "", "text_b": "x", "label": "2.5"},
]
NUMBERS = np.array([4.5, 1, 2.5])
TOPICS = [
    {"text_a": "so good", "label": ["sport", "arts"]},
    {"text_a": "very bads ?", "label": []},
    {"text_a": "", "label": ["law"]},
    {"text_a": "x y z", "label": ["arts"]},
]
PAIRS = [
    {"text_a": "so good", "text_b": "good", "label": "1"},
    {"text_a": "x y", "text_b": "bad", "label": "0"},
    {"text_a": "z", "text_b": "", "label": "1"},
]
EXAMS = [
    {"text_a": "so ?", "choices": ["good", "bad x", "y"], "label": 1},
    {"text_a": "very bads ?", "choices": ["a b c", "x"], "label": 0},
    {"text_a": "", "choices": ["z", "", "y", "w v"], "label": 3},
]
GRADES = [
    {"qid": 7, "text_a": "so ?", "text_b": "good", "label": 2},
    {"qid": 7, "text_a": "so ?", "text_b": "bad x", "label": 0},
    {"qid": 3, "text_a": "very ?", "text_b": "", "label": 1},
]
NUMBER = {"num_labels": 1, "problem_type": "regression"}
SEVERAL = {"num_labels": 3, "problem_type": "multi_label_classification"}
CASES = {
    "classification": Case(
        kind="classification",
        rows=MOODS,
        targets=[2, 0, 1, 2],
        predicts=classes,
        config={"num_labels": 3},
    ),
    "regression": Case(
        kind="regression",
        rows=DEGREES,
        targets=NUMBERS,
        predicts=number,
        values={"scale": False},
        config=NUMBER,
    ),
    "regression, scaled": Case(
        kind="regression",
        rows=DEGREES,
        targets=(NUMBERS - NUMBERS.mean()) / NUMBERS.std(),
        predicts=number,
        config=NUMBER,
    ),
    "multi_label": Case(
        kind="multi_label",
        rows=TOPICS,
        targets=[[1.0, 0, 1], [0.0, 0, 0], [0.0, 1, 0], [1.0, 0, 0]],
        predicts=several,
        values={"threshold": 0.4},
        config=SEVERAL,
    ),
    "matching": Case(
        kind="matching", rows=PAIRS, targets=[1, 0, 1], predicts=classes, config={"num_labels": 2}
    ),
    "multiple_choice": Case(kind="multiple_choice", rows=EXAMS, targets=[1, 0, 3], predicts=chosen),
    "ranking": Case(
        kind="ranking", rows=GRADES, targets=[1, 0, 1], predicts=ranked, config={"num_labels": 2}
    ),
    "ranking, relevant from 2": Case(
        kind="ranking",
        rows=GRADES,
        targets=[1, 0, 0],
        predicts=ranked,
        values={"relevant_from": 2},
        config={"num_labels": 2},
    ),
}


def row_of(theirs: Any, row: Row, target: Any) -> Any:
    """What transformers makes of a row alone: it needs equally many choices in a batch."""
    if "choices" in row:
        found = padded([(row["text_a"], choice) for choice in row["choices"]]).arguments
        found = {name: values[None] for name, values in found.items()}
    else:
        found = padded([[row[name] for name in ("text_a", "text_b") if name in row]]).arguments
    label = torch.as_tensor(np.asarray(target))
    label = label.float() if label.is_floating_point() else label
    with torch.no_grad():
        return theirs(**found, labels=label[None])


def right(prediction: Row, logits: torch.Tensor, target: Any) -> float:
    if "labels" in prediction:
        return float(((logits.sigmoid() >= 0.4) == (torch.tensor(target) > 0)).all())
    return math.nan if "value" in prediction else float(int(logits.argmax()) == target)


@pytest.mark.parametrize("name", CASES)
def test_predictions_and_loss_equal_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    source = source_of(tmp_path, case.rows)
    task = task_of(case.kind, **case.values).resolved(source)
    task.check(source, labeled=True)
    kind = BertForMultipleChoice if "choices" in case.rows[0] else BertForSequenceClassification
    theirs = kind(bert_config(**case.config)).eval()
    model = model_of(task)
    same_weights(model, theirs, task.name)
    made = predictions(model, source, task)[task.name]
    losses, correct = [], 0.0
    for item, (row, target) in enumerate(zip(case.rows, case.targets, strict=True)):
        expected = row_of(theirs, row, target)
        wanted = case.predicts(task, expected.logits[0])
        assert made[item].keys() == wanted.keys()
        for key, value in wanted.items():
            numeric = key in ("logits", "probs", "value", "score")
            assert made[item][key] == (pytest.approx(value, abs=1e-5) if numeric else value)
        losses.append(expected.loss)
        correct += right(made[item], expected.logits[0], target)
    _, batch = built_of(dataset_of(source, task))
    assert batch.count(task.name) == len(case.rows)
    with torch.no_grad():
        output = model(batch)[task.name]
    torch.testing.assert_close(output.loss_sum, torch.stack(losses).sum(), atol=1e-5, rtol=0)
    assert float(output.correct) == pytest.approx(correct, nan_ok=True)
    scores = task.metrics(made, source)
    assert scores.get("accuracy", correct / len(losses)) == pytest.approx(
        correct / len(losses), nan_ok=True
    )
    stored = [StoredPrediction(values=json.loads(json.dumps(made[i])), place="p") for i in made]
    read, again = task.prepared(source, stored)
    assert read.metrics(again, source) == scores


# Rows without labels ---------------------------------------------------------------------------

BARE: dict[str, tuple[Row, Sequence[Row]]] = {
    "classification": ({"labels": ["no", "yes"]}, MOODS),
    "regression": ({}, DEGREES),
    "multi_label": ({"labels": ["a", "b"]}, TOPICS),
    "matching": ({"labels": ["0", "1"]}, PAIRS),
    "multiple_choice": ({"answers": "letter"}, EXAMS),
    "ranking": ({}, GRADES),
}


@pytest.mark.parametrize("kind", BARE)
def test_a_table_without_labels_is_predicted(kind: str, tmp_path: Path) -> None:
    values, labeled = BARE[kind]
    rows = [{name: x for name, x in row.items() if name != "label"} for row in labeled]
    rows.append({**rows[0], "text_a": "x " * 200})
    source, task = source_of(tmp_path, rows), task_of(kind, **values)
    task.check(source, labeled=False)
    made = predictions(model_of(task), source, task)[task.name]
    assert sorted(made) == list(range(len(rows)))
    assert task.metrics(made, source) == {}
    json.dumps(made, allow_nan=False)


# Learning --------------------------------------------------------------------------------------


def exams() -> list[Row]:
    rng, rows = np.random.default_rng(0), []
    for text in "abcdefghijkl":
        choices = ["good", *rng.choice(["bad", "so", "very"], rng.integers(1, 4), replace=False)]
        order = rng.permutation(len(choices))
        label = int(np.flatnonzero(order == 0)[0])
        rows.append({"text_a": text, "choices": [choices[i] for i in order], "label": label})
    return rows


# {case: (kind, settings, rows, the least of each score)}
LEARNED: dict[str, tuple[str, Row, list[Row], dict[str, float]]] = {
    "classification": (
        "classification",
        {},
        [
            {"text_a": f"{a} {mood} {b}", "label": mood}
            for mood in ("good", "bad")
            for a in "abcd"
            for b in "xyz"
        ],
        {"accuracy": 1.0},
    ),
    "regression": (
        "regression",
        {"low": 100, "high": 130},
        [
            {"text_a": f"{c} {word}", "label": 100 + 10 * number}
            for number, word in enumerate(("bad", "so", "very", "good"))
            for c in "abcdef"
        ],
        {"pearson_and_spearman": 0.9},
    ),
    "multi_label": (
        "multi_label",
        {},
        [
            {"text_a": f"{c} {a} {b}", "label": [x for x in (a, b) if x in ("good", "bad")]}
            for a in ("good", "so")
            for b in ("bad", "very")
            for c in "abcd"
        ],
        {"exact_match": 1.0},
    ),
    "matching": (
        "matching",
        {},
        [
            {"text_a": x, "text_b": y, "label": int(y == "good")}
            for x in "abcdef"
            for y in ("good", "bad", "so")
        ],
        {"accuracy": 1.0},
    ),
    "matching, pairwise": (
        "matching",
        {"strategy": "pairwise"},
        [
            {"text_a": x, "text_b": f"{y} good", "text_b_neg": f"{y} bad"}
            for x in "abcdef"
            for y in "abc"
        ],
        {"accuracy": 1.0},
    ),
    "multiple_choice": ("multiple_choice", {}, exams(), {"accuracy": 1.0}),
    "ranking": (
        "ranking",
        {},
        [
            {"qid": q, "text_a": q, "text_b": f"{q} {x}", "label": int(x == "good")}
            for q in "abcdefg"
            for x in ("bad", "good", "so")
        ],
        {"mrr": 1.0},
    ),
}


@pytest.mark.parametrize("name", LEARNED)
def test_it_learns(name: str, tmp_path: Path) -> None:
    kind, values, rows, least = LEARNED[name]
    source = source_of(tmp_path, rows)
    task = task_of(kind, dropout=0.0, **values).resolved(source)
    made = predictions(learned(source, task), source, task)[task.name]
    scores = task.metrics(made, source)
    assert all(scores[metric] >= value for metric, value in least.items()), scores
    assert scores.get("mse", 0) < 20


# Shared heads ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NAMES)
def test_a_head_is_shared_with_its_own_kind_only(kind: str) -> None:
    other = task_of("classification" if kind != "classification" else "regression")
    with pytest.raises(UserError, match=f"share: '{other.name}' (is another kind|does not write)"):
        task_of(kind).with_head_of(other)
    assert task_of(kind).with_head_of(task_of(kind)) == task_of(kind)


# Mistakes --------------------------------------------------------------------------------------

EXAM = {"text_a": "x", "choices": ["no", "yes", "so"]}
BAD_SETTINGS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "classification": [
        ({"labels": ["a", "b"], "positive": "c"}, r"tasks.mood.positive: 'c' is not a label"),
        ({"labels": ["a", "b", "a"]}, r"tasks.mood.labels: duplicate name"),
        ({"labels": ["a"]}, r"'a' is the only label"),
        ({"labels": ["a", "b "]}, r"tasks.mood.labels: 'b ' has spaces around it"),
        ({"labels": ["a", ""]}, r"tasks.mood.labels: '' is empty; name each class"),
        ({"smoothing": 1.0}, r"tasks.mood.smoothing: expected a number below 1, got 1.0"),
        ({"class_weights": {"a": -1}}, r"tasks.mood.class_weights.a: expected 0 or more, got -1"),
        ({"labels": ["a", "b"], "class_weights": {"c": 1}}, r"class_weights: 'c' is not a label"),
        ({"class_weights": "balance"}, r"tasks.mood.class_weights"),
        ({"dorpout": 0.1}, r"tasks.mood.dorpout: unknown key; did you mean \"dropout\"\?"),
    ],
    "regression": [
        ({"low": 5, "high": 1}, "tasks.degree: low 5.0 is not below high 1.0"),
        ({"deviation": -1}, "tasks.degree.deviation: expected 0 or more, got -1"),
        ({"low": "one"}, "tasks.degree.low"),
    ],
    "multi_label": [
        ({"threshold": 0}, "tasks.topics.threshold: expected a number above 0, got 0"),
        ({"threshold": 1}, "tasks.topics.threshold"),
        ({"separator": ""}, "tasks.topics.separator is empty"),
        ({"labels": ["a", "a"]}, "tasks.topics.labels: duplicate name"),
    ],
    "matching": [
        ({"strategy": "listwise"}, "tasks.match.strategy"),
        ({"margin": 0}, "tasks.match.margin: expected a number above 0, got 0"),
        ({"margin": 2}, "tasks.match.margin: expected at most 1, got 2"),
        ({"labels": ["a", "b", "c"]}, "matching has exactly two classes; .*`kind: classification`"),
        ({"labels": ["a", "b"], "strategy": "pairwise"}, "pairwise matching has no labels"),
        ({"texts": ["q", "p", "n"]}, "tasks.match.texts: 3 columns; pointwise matching"),
        ({"texts": ["q"], "strategy": "pairwise"}, "tasks.match.texts: 1 column; pairwise"),
    ],
    "ranking": [
        ({"k": 0}, "tasks.answers.k: expected a number above 0, got 0"),
        ({"relevant_from": 0}, "tasks.answers.relevant_from: expected a number above 0, got 0"),
        ({"texts": ["text_b"]}, "tasks.answers.texts: name two columns"),
    ],
    "masked_words": [
        ({"rate": 0}, "tasks.words.rate: expected a number above 0, got 0"),
        ({"mask_rate": 0.9, "random_rate": 0.2}, "tasks.words: mask_rate 0.9 and random_rate 0.2"),
        ({"units": ["word"]}, "tasks.words.units: unknown key"),
    ],
    "generation": [
        ({"max_target": 2}, r"tasks.titles.max_target: expected 3 or more, got 2"),
        ({"max_source": 4}, "tasks.titles.max_source: 4; it must be 0 or at least 8"),
        ({"longest_span": 0}, "tasks.titles.longest_span: expected a number above 0, got 0"),
        ({"generate": {"min_tokens": 7}}, "titles.generate.min_tokens: 7 is not below .* 7"),
        ({"noise_rate": 2.0}, "tasks.titles.noise_rate: expected at most 1, got 2.0"),
    ],
    "reading": [
        ({"stride": 0}, r"tasks.qa.stride: expected a number above 0, got 0"),
        ({"max_query": 0}, r"tasks.qa.max_query: expected a number above 0, got 0"),
        ({"n_best": -1}, r"tasks.qa.n_best: expected a number above 0, got -1"),
        ({"max_answer": -1}, r"tasks.qa.max_answer: expected 0 or more, got -1"),
        ({"texts": ["context"]}, r"tasks.qa.texts: expected two columns, question"),
        ({"score": "squad"}, r"tasks.qa.score: .*\"squad\""),
        ({"answer": "last"}, r"tasks.qa.answer: .*\"last\""),
        ({"doc_stride": 8}, r"tasks.qa.doc_stride: unknown key; did you mean \"stride\"\?"),
    ],
}
BAD_ROWS: dict[str, tuple[str, Row, list[tuple[str | list[Row], str]]]] = {
    "classification": (
        "classification",
        {"labels": ["no", "yes"]},
        [
            (
                "text_a\tlabel\ngood\tyes\nbad\tnope\n",
                r":3: label: unknown label 'nope'.*has no, yes",
            ),
            (
                "text_a\tlabel\ngood\tyse\n",
                r':2: label: unknown label \'yse\'; did you mean "yes"\?',
            ),
            ("text_a\tlable\ngood\tyes\n", r"tasks.mood: .* has no column 'label'"),
            ("label\tqid\nyes\t1\n", r"tasks.mood: .* has no column 'text_a'"),
        ],
    ),
    "regression": (
        "regression",
        {"scale": False},
        [
            (
                "text_a\tlabel\nx\t1\ny\thigh\n",
                r":3: label: 'high' is not a number; .* such as 3.5",
            ),
            ("text_a\tlabel\nx\t1e300\n", r":2: label: 1e300 is beyond 1e\+18"),
            ("text_a\tlabel\nx\tnan\n", r":2: label: 'nan' is not a number"),
            ("text_a\tlabel\nx\t1,5\n", r":2: label: '1,5' is not a number"),
            ("text_a\nx\n", r"tasks.degree: .* has no column 'label'"),
        ],
    ),
    "multi_label": (
        "multi_label",
        {"labels": ["a", "b"]},
        [
            ([{"text_a": "x", "label": ["a", "c"]}], r"jsonl:1: label: unknown label 'c'"),
            (
                [{"text_a": "x", "label": "a"}, {"text_a": "x", "label": "a,B"}],
                r"jsonl:2: label: unknown label 'B'",
            ),
            ([{"text_a": "x"}], r"tasks.topics: .* has no column 'label'"),
        ],
    ),
    "matching": (
        "matching",
        {"labels": ["0", "1"]},
        [
            ("text_a\tlabel\nx\t1\n", r"has no column 'text_b'"),
            ("text_a\ttext_b\tlabel\nx\ty\t1\nx\ty\t2\n", r":3: label: unknown label '2'"),
            ("text_a\ttext_b\nx\ty\n", r"has no column 'label'"),
        ],
    ),
    "matching, pairwise": (
        "matching",
        {"strategy": "pairwise"},
        [
            ("text_a\ttext_b\nx\ty\n", r"has no column 'text_b_neg'"),
            ("text_a\ttext_b\ttext_b_neg\nx\ty\tz\nx\ty\t\n", r":3: text_b_neg is empty"),
        ],
    ),
    "ranking": (
        "ranking",
        {},
        [
            ("qid\ttext_a\ttext_b\tlabel\n1\tx\ty\t0\n1\tx\tz\t-1\n", r":3: label: -1 is negative"),
            ("qid\ttext_a\ttext_b\tlabel\n1\tx\ty\tyes\n", r":2: label: 'yes' is not a number"),
            ("qid\ttext_a\tlabel\n1\tx\t0\n", r"tasks.answers: .* has no column 'text_b'"),
            ("qid\ttext_a\ttext_b\n1\tx\ty\n", r"tasks.answers: .* has no column 'label'"),
            ("text_a\ttext_b\tlabel\n\ty\t0\n", r":2: text_a is empty"),
        ],
    ),
    "multiple_choice": (
        "multiple_choice",
        {"answers": "number", "count_from": 0},
        [
            (
                [EXAM | {"label": 1}, EXAM | {"label": 4}],
                r":2: label: '4' is not one of the 3 choices; .* 0 to 2",
            ),
            ([EXAM | {"label": 1}, EXAM | {"label": ["0", "1"]}], r":2: label: 2 labels"),
        ],
    ),
    "multiple_choice, from 1": (
        "multiple_choice",
        {"answers": "number", "count_from": 1},
        [([EXAM | {"label": 1}, EXAM | {"label": 0}], r":2: label: '0' is not .* expects 1 to 3")],
    ),
    "multiple_choice, letters": (
        "multiple_choice",
        {"answers": "letter"},
        [
            (
                [EXAM | {"label": "A"}, EXAM | {"label": "D"}],
                r":2: label: 'D' is not .* expects A to C",
            )
        ],
    ),
    "multiple_choice, texts": (
        "multiple_choice",
        {"answers": "text"},
        [
            (
                [EXAM | {"label": "no"}, EXAM | {"label": "maybe"}],
                r":2: label: 'maybe' .* expects one of them",
            )
        ],
    ),
}
BAD_ROWS["regression, scaled"] = ("regression", {}, BAD_ROWS["regression"][2])


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [(kind, *each) for kind, cases in BAD_SETTINGS.items() for each in cases],
)
def test_bad_settings_are_one_line(kind: str, values: Row, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        task_of(kind, **values)
    assert "\n" not in str(raised.value)


def table_of(folder: Path, rows: str | list[Row]) -> TableSource:
    if not isinstance(rows, str):
        return source_of(folder, rows)
    (folder / "train.tsv").write_text(rows)
    return opened(folder / "train.tsv")


@pytest.mark.parametrize(
    ("kind", "values", "rows", "message"),
    [(kind, values, *each) for kind, values, cases in BAD_ROWS.values() for each in cases],
)
def test_bad_rows_are_reported_with_their_place(
    kind: str, values: Row, rows: str | list[Row], message: str, tmp_path: Path
) -> None:
    source = table_of(tmp_path, rows)
    with pytest.raises(UserError, match=message) as raised:
        task_of(kind, **values).resolved(source).check(source, labeled=True)
    assert "\n" not in str(raised.value)
