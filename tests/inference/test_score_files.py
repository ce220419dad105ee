"""Scores from files only: every form of predictions, scikit-learn's values, clear errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.data.reader import TableSettings
from palm_ds.inference.score_files import ScoringOptions, score_files

LABELS = ["a", "b", "b", "a", "c", "a"]
FOUND = ["a", "b", "a", "a", "c", "c"]
SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": "He won in 1066 at Hastings.",
                    "qas": [
                        {
                            "id": "q1",
                            "question": "When?",
                            "answers": [{"text": "1066", "answer_start": 10}],
                        },
                        {
                            "id": "q2",
                            "question": "Where?",
                            "answers": [{"text": "at Hastings", "answer_start": 15}],
                        },
                    ],
                }
            ]
        }
    ]
}


def write(path: Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def gold(folder: Path, labels: list[Any] = LABELS) -> str:
    rows = [{"id": f"r{i}", "text_a": "x", "label": label} for i, label in enumerate(labels)]
    return write(folder / "gold.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def lines(name: str, values: list[Any]) -> str:
    return "".join(json.dumps({"index": i, name: value}) + "\n" for i, value in enumerate(values))


def score(folder: Path, right: str, predictions: Any, **rules: Any) -> dict[str, float]:
    read = TableSettings(lost_answers="keep", **rules.pop("read", {}))
    file = write(folder / "predictions", predictions)
    options = ScoringOptions(kind=rules.pop("kind", ""), settings=rules)
    return score_files([right], file, options, read).metrics


@pytest.mark.parametrize(
    "written",
    [
        lines("label", FOUND),
        "".join(sorted(lines("label", FOUND).splitlines(True), reverse=True)),
        "index\tprediction\n" + "".join(f"{i}\t{x}\n" for i, x in enumerate(FOUND)),
        "index,prediction\r\n" + "".join(f'{i},"{x}"\r\n' for i, x in enumerate(FOUND)),
        '\ufeff"Id","Prediction"\n' + "".join(f"r{i},{x}\n" for i, x in enumerate(FOUND)),
        "id;prediction\n" + "".join(f"r{i};{x}\n" for i, x in enumerate(FOUND)),
        "prediction\tid\n" + "".join(f"{x}\tr{i}\n" for i, x in enumerate(FOUND)),
        "prediction\n" + "".join(f"{x}\n" for x in FOUND),
        "\r\n".join(FOUND),
    ],
    ids=[
        *(
            "lines",
            "lines in another order",
            "table",
            "commas",
            "ids",
            "semicolons",
            "ids after",
            "with a name",
        ),
        "column",
    ],
)
def test_class_predictions_in_every_form(tmp_path, written) -> None:
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    found = score(tmp_path, gold(tmp_path), written, kind="classification", positive="a")
    assert found["accuracy"] == pytest.approx(accuracy_score(LABELS, FOUND))
    assert found["f1"] == pytest.approx(f1_score(LABELS, FOUND, labels=["a"], average="macro"))
    assert found["macro_f1"] == pytest.approx(f1_score(LABELS, FOUND, average="macro"))
    assert found["matthews"] == pytest.approx(matthews_corrcoef(LABELS, FOUND))


@pytest.mark.parametrize("kind", ["classification", "matching"])
def test_classes_may_be_numbers(tmp_path: Path, kind: str) -> None:
    """As other programs write them, and as JSON has them in the table."""
    found = score(tmp_path, gold(tmp_path, [0, 1, 1, 0]), lines("label", [0, 1, 0, 0]), kind=kind)
    assert (found["accuracy"], found["f1"]) == (0.75, pytest.approx(2 / 3))


@pytest.mark.parametrize(
    ("kind", "labels", "found"),
    [
        ("classification", ["a", "", "b", None, "a"], ["a", "b", "b", "a", "b"]),
        ("regression", [1, "", 2, None, 3], [1, 9, 2, 9, 4]),
        ("multi_label", ["a", "", ["b"], None, []], ["a", "b", "b", "a", "none"]),
    ],
)
def test_rows_without_a_label_are_not_scored(tmp_path, kind, labels, found) -> None:
    name = {"regression": "value", "multi_label": "labels"}.get(kind, "label")
    given = write(tmp_path / "found", lines(name, found))
    options = ScoringOptions(kind=kind)
    scores = score_files([gold(tmp_path, labels)], given, options, TableSettings())
    assert scores.notes == ("not scored: 2 rows without a label",)
    kept = [row for row in range(5) if labels[row] not in ("", None)]
    written = lines(name, [found[row] for row in kept])
    again = score(tmp_path, gold(tmp_path, [labels[row] for row in kept]), written, kind=kind)
    assert scores.metrics == again
    with pytest.raises(UserError, match=r"gold\.jsonl: no row has a label"):
        score_files([gold(tmp_path, [""] * 5)], given, options, TableSettings())


def test_truths_are_compared_whatever_format_they_come_from(tmp_path) -> None:
    labels = [True, False, True]
    assert score(tmp_path, gold(tmp_path, labels), "True\nFalse\nFalse\n", kind="classification")[
        "accuracy"
    ] == pytest.approx(2 / 3)
    found = score(tmp_path, gold(tmp_path, labels), "True\nFalse\nTrue\n", kind="multi_label")
    assert found["exact_match"] == 1


def test_several_classes(tmp_path) -> None:
    from sklearn.metrics import accuracy_score, f1_score

    right, found = [["x", "y"], [], ["y"]], [["x"], ["y"], ["y"]]
    cells = [np.array([[c in row for c in "xy"] for row in rows]) for rows in (right, found)]
    scores = score(tmp_path, gold(tmp_path, right), lines("labels", found), kind="multi_label")
    assert scores["micro_f1"] == pytest.approx(f1_score(*cells, average="micro"))
    assert scores["macro_f1"] == pytest.approx(f1_score(*cells, average="macro"))
    assert scores["exact_match"] == pytest.approx(accuracy_score(*cells))
    written = "index\tprediction\n0\tx\n1\ty\n2\ty\n"
    assert score(tmp_path, gold(tmp_path, right), written, kind="multi_label") == scores


def test_numbers(tmp_path) -> None:
    right, found = [1.0, 2.5, 4.0, 3.0], [1.5, 2.0, 5.0, 2.0]
    scores = score(tmp_path, gold(tmp_path, right), lines("value", found), kind="regression")
    assert scores["pearson"] == pytest.approx(np.corrcoef(right, found)[0, 1])
    assert scores["mse"] == pytest.approx(np.mean(np.subtract(right, found) ** 2))


def test_tags_in_two_files_or_in_two_columns(tmp_path) -> None:
    conll = "a\tB-X\nb\tI-X\nc\tO\n\nd\tO\ne\tB-Y\n"
    right = write(tmp_path / "gold.conll", conll)
    tags = [["B-X", "I-X", "O"], ["B-Y", "B-Y"]]
    cells = "index;prediction\n" + "".join(f"{i};{json.dumps(x)}\n" for i, x in enumerate(tags))
    cells = cells.replace('"', '""').replace(";[", ';"[').replace("]\n", ']"\n')
    table = "index,prediction\n0,B-X I-X O\n1,B-Y B-Y\n"
    for written in (lines("tags", tags), "a B-X\nb I-X\nc O\n\nd B-Y\ne B-Y\n", table, cells):
        found = score(tmp_path, right, written, kind="tagging")
        assert (found["precision"], found["recall"]) == (pytest.approx(2 / 3), 1.0)
        assert found["accuracy"] == 0.8
    both = "a B-X B-X\nb I-X I-X\nc O O\n\nd O B-Y\ne B-Y B-Y\n"
    file = write(tmp_path / "both.conll", both)
    scored = score_files([file], file, ScoringOptions(kind="tagging"), TableSettings())
    assert scored.metrics == found
    assert scored.record()["report"]["classes"]["X"]["f1"] == 1.0
    with pytest.raises(
        UserError, match=r'predictions:2: tags: tag 2: "B_Y" is not a tag; expected'
    ):
        score(tmp_path, right, lines("tags", [tags[0], ["B-Y", "B_Y"]]), kind="tagging")
    plain = score(tmp_path, right, lines("tags", tags), kind="tagging", scheme="none")
    assert plain == {"accuracy": 0.8}


def test_spans_of_characters(tmp_path) -> None:
    text = "Rome and Paris"
    rome, paris = {"type": "x", "start": 0, "end": 4}, {"type": "y", "start": 9, "end": 14}
    rows = [{"text_a": text, "spans": [rome, paris]}, {"text_a": text, "spans": []}]
    right = write(tmp_path / "gold.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    found = score(tmp_path, right, lines("spans", [[rome], [paris]]), kind="tagging")
    assert found == {"f1": 0.5, "precision": 0.5, "recall": 0.5}
    for wrong in ([{"type": "x"}], 5, [7], [{**rome, "type": []}], [{**rome, "end": "4"}]):
        with pytest.raises(UserError, match=r"predictions:2: spans: expected \[.*, got "):
            score(tmp_path, right, lines("spans", [[rome], wrong]), kind="tagging")


def test_answers(tmp_path) -> None:
    right = write(tmp_path / "squad.json", SQUAD)
    written = {"q2": "Hastings", "q1": "1066"}
    found = score(tmp_path, right, written, kind="reading")
    assert (found["f1"], found["exact"]) == (pytest.approx((1 + 2 / 3) / 2), 0.5)
    rows = [{"index": i, "id": f"q{i + 1}", "text": written[f"q{i + 1}"]} for i in range(2)]
    ours = "".join(json.dumps(row) + "\n" for row in rows)
    assert score(tmp_path, right, ours, kind="reading") == found


def test_candidates(tmp_path) -> None:
    rows = [("a", 0, 0.1), ("a", 1, 0.4), ("a", 0, 0.6), ("b", 1, 0.9), ("b", 0, 0.2)]
    texts = [{"qid": q, "text_a": "t", "text_b": "c", "label": y} for q, y, _ in rows]
    right = write(tmp_path / "gold.jsonl", "".join(json.dumps(row) + "\n" for row in texts))
    for name, values in (("score", [s for *_, s in rows]), ("probs", [[0, s] for *_, s in rows])):
        found = score(tmp_path, right, lines(name, values), kind="ranking")
        assert found["mrr"] == found["map"] == 0.75
    made = [{"index": i, "score": s, "label": y} for i, (_, y, s) in enumerate(rows)]
    labeled = "".join(json.dumps(each) + "\n" for each in made)
    assert score(tmp_path, right, labeled, kind="ranking")["f1"] == 1.0
    cells = "index\tprediction\n" + "".join(f"{i}\t{s}\n" for i, (*_, s) in enumerate(rows))
    assert score(tmp_path, right, cells, kind="ranking")["mrr"] == 0.75  # predict.py --tsv


MISTAKES = {
    "missing": ("label", LABELS[:5], "no prediction for {gold}:6 (5 predictions, 6 rows)"),
    "extra": ("label", [*LABELS, "a"], "predictions:7: no row has index 6; {gold}: 6 rows"),
    "wrong key": ("answer", LABELS, "predictions:1: no label; it has index, answer"),
}


def test_a_gold_file_without_a_header(tmp_path) -> None:
    right = write(tmp_path / "gold.tsv", "one\ta\ntwo\tb\n")
    read = {"header": False, "columns": {"text_a": 0, "label": 1}}
    for kind in ("classification", "matching", "multiple_choice"):
        assert score(tmp_path, right, "a\na\n", kind=kind, read=read)["accuracy"] == 0.5


def test_classes_are_those_of_the_predicting_task(tmp_path) -> None:
    from sklearn.metrics import f1_score

    right = gold(tmp_path, ["a", "b", "b", "a", "a", "a"])
    plain = score(tmp_path, right, lines("label", list("ababaa")), kind="classification")
    noted = {"kind": "classification", "labels": list("cba"), "positive": "a"}
    about = {"tasks": {"t": ["predictions"]}, "settings": {"t": noted}}
    write(tmp_path / "about.json", about)
    found = score(tmp_path, right, lines("label", list("ababaa")), kind="classification")
    classes = {"labels": list("abc"), "zero_division": 0}
    actual, guessed = list("abbaaa"), list("ababaa")
    assert found["macro_f1"] == pytest.approx(f1_score(actual, guessed, average="macro", **classes))
    assert found["f1"] == pytest.approx(f1_score(actual, guessed, pos_label="a"))
    assert "macro_f1" not in plain
    assert plain["f1"] == pytest.approx(f1_score(actual, guessed, pos_label="b"))


@pytest.mark.parametrize("kind", ["classification", "matching"])
def test_probabilities_are_scored_if_the_order_of_their_classes_is_known(
    tmp_path: Path, kind: str
) -> None:
    """That of the labels in the table may be another one, which would turn the AUC around."""
    found = [("pos", 0.9), ("neg", 0.2), ("pos", 0.7), ("neg", 0.4)]
    right = gold(tmp_path, [label for label, _ in found])
    rows = [{"index": i, "label": label, "probs": [p, 1 - p]} for i, (label, p) in enumerate(found)]
    written = "".join(json.dumps(row) + "\n" for row in rows)
    unknown = score(tmp_path, right, written, kind=kind)
    assert unknown["accuracy"] == 1.0 and "auc" not in unknown
    known = score(tmp_path, right, written, kind=kind, labels=["pos", "neg"])
    assert known["auc"] == 1.0
    wrong = score(tmp_path, right, written, kind=kind, labels=["neg", "pos"])
    assert wrong["auc"] == 0.0
    asked = {"kind": kind, "recall_at_precision": 0.9}
    with pytest.raises(
        UserError, match=r"tasks.task.recall_at_precision: nothing names the cl.*or"
    ):
        score(tmp_path, right, written, **asked)
    assert score(tmp_path, right, written, labels=["pos", "neg"], **asked)["recall_at_precision"]


def test_ids_of_several_rows_match_no_prediction(tmp_path) -> None:
    rows = [
        {"id": i, "text_a": "x", "label": label} for i, label in zip((1, 2, 1), "aba", strict=True)
    ]
    right = write(tmp_path / "gold.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    message = (
        r"gold.jsonl:3: has the id '1' of .*gold.jsonl:1, but predictions by id need different"
    )
    with pytest.raises(UserError, match=message):
        score(tmp_path, right, "id,prediction\n1,a\n2,b\n1,a\n", kind="classification")
    assert score(tmp_path, right, "a\nb\na\n", kind="classification")["accuracy"] == 1


def test_predictions_of_another_task(tmp_path) -> None:
    with pytest.raises(UserError, match="predicted are x, y, the labels are a, b, c$"):
        score(tmp_path, gold(tmp_path), "x\ny\n" * 3, kind="classification")
    assert score(tmp_path, gold(tmp_path, ["a"]), "x\n", kind="classification")["accuracy"] == 0


@pytest.mark.parametrize("mistake", MISTAKES)
def test_rows_and_predictions_must_match(tmp_path, mistake) -> None:
    name, values, message = MISTAKES[mistake]
    right = gold(tmp_path)
    with pytest.raises(UserError) as error:
        score(tmp_path, right, lines(name, values), kind="classification")
    assert message.format(gold=right) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "written", "message"),
    [
        ("classification", '{"index": 0, "label": "a"}\n{"index": 0, "label": "b"}\n', "a second"),
        ("classification", '{"index": 0, "label": "a"}\n{"label": "b"}\n', ":2: has no `index`"),
        ("classification", '{"index": "x", "label": "a"}\n', ":1: index: 'x' is not a row number"),
        ("classification", '{"index": 0, "label": "a"}\n{"index": 1,\n', ":2: not JSON"),
        ("classification", "[" * 200_000, ":1: not JSON: nested too deeply"),
        ("classification", "", "no predictions"),
        ("classification", "0\ta\n1\tb\n", ":1: the columns are 0, a; expected `index` or `id`"),
        ("classification", "id,label\n0,a\n", ":1: the columns are id, label; expected `index`"),
        ("classification", "index\tprediction\n0\ta\n1\n", ":3: 1 cell, but the header has 2"),
        ("classification", "\n".join([*LABELS, "a"]), ":7: more predictions than rows"),
        ("regression", lines("value", ["a"] * 6), ":1: value: 'a' is not a number"),
        ("ranking", lines("probs", [[]] * 6), "is not a number"),
    ],
)
def test_a_mistake_is_one_line_with_its_place(tmp_path, kind, written, message) -> None:
    labels = LABELS if kind == "classification" else [1, 0, 1, 1, 0, 0]
    with pytest.raises(UserError) as error:
        score(tmp_path, gold(tmp_path, labels), written, kind=kind)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "clasification"}, 'did you mean "classification"?'),
        ({"kind": "reading", "score": "squad"}, "tasks.task.score"),
        ({"kind": "tagging", "scheme": "BIOX"}, "unknown tagging scheme"),
        ({"kind": "classification", "scheme": "BIO"}, "tasks.task.scheme: unknown key"),
        ({"kind": "knowledge_masking"}, "known: class_pairs, classification"),
        ({}, "give --kind: one of class_pairs, classification, "),
    ],
)
def test_unknown_options(tmp_path, values, message) -> None:
    with pytest.raises(UserError) as error:
        score(tmp_path, gold(tmp_path), "a\n" * 6, **values)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_predictions_that_say_nothing_of_a_task(tmp_path) -> None:
    """Of pairs that all belong together."""
    found = "".join(
        json.dumps({"index": i, "label": "other", "logits": [1.0, 0.0], "probs": [0.7, 0.3]}) + "\n"
        for i in range(len(LABELS))
    )
    with pytest.raises(UserError, match="nothing to score in predictions of this task"):
        score(tmp_path, gold(tmp_path), found, kind="image_text_matching")


@pytest.mark.parametrize(
    ("kind", "row", "found", "message"),
    [
        ("tagging", {"tokens": ["a"], "tags": ["O"]}, {"tags": None}, "tags: expected a list"),
        ("matching", {"text_a": "x", "text_b": "y"}, {"probs_neg": 0.5}, "no probs"),
        ("retrieval", {"query": "x", "positive": "y"}, {"scores": None}, "nothing to score"),
        ("retrieval", {"query": "x", "positive": "y"}, {"scores": [1, None]}, "None is not a num"),
        ("masked_words", {"text_a": "x"}, {"words": ["x"]}, "nothing to score"),
    ],
)
def test_values_of_another_kind_are_named(tmp_path, kind, row, found, message) -> None:
    right = write(tmp_path / "gold.jsonl", json.dumps(row) + "\n")
    rules = {"strategy": "pairwise"} if kind == "matching" else {}
    with pytest.raises(UserError, match=message):
        score(tmp_path, right, json.dumps({"index": 0, **found}) + "\n", kind=kind, **rules)


def test_soft_labels_may_be_numbers_and_their_probabilities_of_an_unknown_order(tmp_path) -> None:
    right = write(tmp_path / "gold.jsonl", '{"text_a": "x", "label": {"2": 1.0, "0": 0.5}}\n')
    found = '{"index": 0, "best": 2, "probs": [0.9, 0.1]}\n'
    assert score(tmp_path, right, found, kind="multi_label") == {"soft_accuracy": 1.0}
    known = score(tmp_path, right, found, kind="multi_label", labels=["2", "0"])
    assert known["cosine"] == pytest.approx(0.95 / np.hypot(0.9, 0.1) / np.hypot(1, 0.5))


def test_tags_of_the_wrong_length(tmp_path) -> None:
    right = write(tmp_path / "gold.conll", "a\tB-X\nb\tI-X\n\nd\tO\n")
    with pytest.raises(UserError, match=r"predictions:1: 1 tags, but .*gold.conll:1 has 2"):
        score(tmp_path, right, lines("tags", [["O"], ["O"]]), kind="tagging")
