"""Tags of words: the output has the input's form for any sentence length and scheme."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.data.reader import TableSettings, open_table
from palm_ds.data.sources.table import TableSource, split_rows
from palm_ds.data.stream.decode import decoded, gathered
from palm_ds.data.stream.task_group_dataset import (
    TaskGroupDataset,
    build_examples,
    collate_built,
    refs,
)
from palm_ds.data.tasks.example import Example
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.heads.crf import CRFHead
from palm_ds.model.heads.heads import ClassHead
from palm_ds.model.multi_task_model import Model
from palm_ds.tasks.classification import Classification
from palm_ds.tasks.metrics.chunks import SCHEMES, check_scheme, chunks, convert
from palm_ds.tasks.shared.tag_schemes import allowed, labels_of
from palm_ds.tasks.tagging import Tagging
from palm_ds.text.tokenizer import wordpiece

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def source_of(path: Path | str, settings: dict[str, Any] | None = None) -> TableSource:
    """A table with a tokenizer that knows its commonest words and all characters."""
    table = open_table(str(path), TableSettings(**(settings or {})))
    counts: Counter[str] = Counter()
    for i in range(len(table)):
        row = table[i]
        words = row["tokens"] if "tokens" in row else row["text_a"].split()
        counts.update(word.lower() for word in words)
    common = [word for word, _ in counts.most_common(300) if word.isalnum()]
    characters = sorted({c for word in counts for c in word} | set(LETTERS))
    pieces = [*characters, *(f"##{c}" for c in characters)]
    vocabulary = dict.fromkeys([*SPECIALS, *pieces, *common])
    return split_rows(table, 0.0, wordpiece(list(vocabulary), lower=True), "small")[0]


@pytest.fixture
def rows(tmp_path: Path) -> Callable[..., TableSource]:
    """rows({"tokens": ...}, ...): a source with these rows."""

    def make(*every: dict[str, Any]) -> TableSource:
        path = tmp_path / "t.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in every), encoding="utf-8")
        return source_of(path)

    return make


def tagging(source: TableSource | None = None, **keys: Any) -> Tagging:
    task = Tagging(name="slots", source="small", **keys)
    return task.resolved(source) if source else task


def examples(task: Tagging, source: TableSource, max_length: int = 512) -> list[Example]:
    items = task.items(source, max_length)
    made = []
    for layout in task.layout(items, np.empty((len(items), 0)), source, max_length):
        example = task.example(layout, source, np.random.default_rng(0))
        task.label(example, source, np.random.default_rng(0))
        assert len(example) == layout["length"] <= (task.max_length or max_length)
        made.append(example)
    return made


def oracle(task: Tagging, targets: np.ndarray) -> np.ndarray:
    """The scores of a head that knows the labels."""
    scores = np.full((len(targets), len(task.labels)), -9.0, np.float32)
    scores[np.arange(len(targets)), targets] = 0.0
    return np.column_stack([targets, scores]).astype(np.float32) if task.crf else scores


def predictions(
    task: Tagging,
    source: TableSource,
    made: Sequence[Example],
    scores: Callable[[Tagging, np.ndarray], np.ndarray] = oracle,
) -> dict[int, dict[str, Any]]:
    pieces: dict[int, list[dict[str, Any]]] = {}
    for example in made:
        given = scores(task, example.labels[task.name][1])
        piece = task.decode(given, example, source)
        pieces.setdefault(example.item, []).append(piece)
    return task.gather(pieces, source)


def there_and_back(task: Tagging, source: TableSource, max_length: int = 512) -> dict[int, Any]:
    return predictions(task, source, examples(task, source, max_length))


# ---- real data ----

MSRA = {"header": False, "columns": {"id": 0, "tokens": 1, "tags": 2}}
CONLL = {"format": "conll"}
TAGGED = [
    ("en/wikigold/wikigold.conll.txt", CONLL, "IOB1", 9),
    ("en/wnut17/emerging.dev.conll", CONLL, "BIO", 13),
    ("zh/msra_ner_sample/test.tsv", MSRA, "BIO", 7),
    pytest.param("en/wnut17/wnut17train.conll", CONLL, "BIO", 13, marks=pytest.mark.slow),
    pytest.param("zh/msra_ner_sample/train.tsv", MSRA, "BIO", 7, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("path", "settings", "scheme", "count"), TAGGED)
def test_real_tags_come_back_as_they_were(
    shared: Path, path: str, settings: dict[str, Any], scheme: str, count: int
) -> None:
    source = source_of(shared / "data/finetune" / path, settings)
    for task in (
        tagging(source),
        tagging(source, max_length=16, crf=True, trained_scheme="BIOES", constrain=True),
    ):
        assert task.scheme == scheme
        assert len(task.labels) == (count if task.trained_scheme == scheme else count * 2 - 1)
        assert ("characters" if "msra" in path else "words") == task.units
        task.check(source, labeled=True)
        made = examples(task, source)
        assert (len(made) > len(source)) == bool(task.max_length)
        found = predictions(task, source, made)
        assert list(found) == list(range(len(source)))
        for item, prediction in found.items():
            assert prediction["tags"] == source.row(item)["tags"], source.where(item)
            assert set(prediction) == {"tags", "probs"}
        scores = task.metrics(found, source)
        assert next(iter(scores)) == "f1"
        assert set(scores.values()) == {1.0}


@pytest.mark.parametrize(
    ("path", "spans", "out", "moved"),
    [
        pytest.param("en/restaurant8k/train_0.json", 7635, 59, 5, marks=pytest.mark.slow),
        ("en/restaurant8k/test.json", 3477, 18, 4),
        ("zh/cluener/dev.json", 3072, 0, 0),
    ],
)
def test_real_spans_come_back_as_they_were(
    shared: Path, path: str, spans: int, out: int, moved: int
) -> None:
    source = source_of(shared / "data/finetune" / path)
    wanted = [source.row(i)["spans"] for i in range(len(source))]
    assert sum(map(len, wanted)) == spans
    for task in (tagging(source), tagging(source, max_length=16, crf=True)):
        task.check(source, labeled=True)
        found = there_and_back(task, source)
        same = sum(span in found[i]["spans"] for i, row in enumerate(wanted) for span in row)
        assert same == spans - out - moved
        assert sum(len(each["spans"]) for each in found.values()) == spans - out
        scores = task.metrics(found, source)
        assert scores["recall"] == pytest.approx(same / spans)
        assert scores["accuracy"] == 1.0
        assert task.describe(source).startswith(f"slots: {out} spans" if out else "")


def test_real_tags_are_learned_by_every_word_at_least_once(shared: Path) -> None:
    source = source_of(shared / "data/finetune/en/wnut17/emerging.dev.conll", CONLL)
    task = tagging(source, max_length=16)
    learned: dict[int, set[int]] = {}
    for example in examples(task, source):
        positions, targets = example.labels["slots"]
        seen = task._seen(example, source)
        assert np.array_equal(positions, seen.positions)
        words = source.row(example.item)["tags"]
        assert [task.labels[i] for i in targets] == [words[i] for i in seen.words]
        learned.setdefault(example.item, set()).update(seen.words.tolist())
    assert all(learned[i] == set(range(len(source.row(i)["tags"]))) for i in range(len(source)))


# ---- schemes ----


@pytest.mark.parametrize("written", SCHEMES)
@pytest.mark.parametrize("trained", ["BIO", "BIOES", "IOE1"])
def test_any_scheme_can_be_trained_in_any_other(
    rows: Callable[..., TableSource], written: str, trained: str
) -> None:
    every = [
        ["B-x", "I-x", "O", "B-y", "B-x"],
        ["O", "B-y", "I-y", "I-y", "O"],
        ["B-x", "B-x", "I-x", "O", "B-y"] if written != "IO" else ["O"] * 5,
    ]
    source = rows(*({"tokens": list("abcde"), "tags": convert(tags, written)} for tags in every))
    task = tagging(source, scheme=written, trained_scheme=trained)
    assert set(task.labels) == set(labels_of({"x", "y"}, trained))
    found = there_and_back(task, source)
    assert [found[i]["tags"] for i in range(3)] == [convert(tags, written) for tags in every]


@pytest.mark.parametrize("spans", [False, True])
def test_chunks_that_the_head_merges_are_counted_and_not_found(
    rows: Callable[..., TableSource], spans: bool
) -> None:
    every = [["B-x", "B-x", "O"], ["B-x", "I-x", "B-y"]]
    ends = [[(0, 1, "x"), (2, 3, "x")], [(0, 3, "x"), (4, 5, "y")]]
    source = rows(
        *(
            {
                "text_a": "a b c",
                "spans": [dict(zip(("start", "end", "type"), e, strict=True)) for e in each],
            }
            if spans
            else {"tokens": list("abc"), "tags": tags}
            for tags, each in zip(every, ends, strict=True)
        )
    )
    task = tagging(source, trained_scheme="IO")
    found = there_and_back(task, source)
    assert [found[i]["tags"] for i in (0, 1)] == [["B-x", "I-x", "O"], every[1]]
    scores = task.metrics(found, source)
    assert scores["precision"] == pytest.approx(2 / 3) and scores["recall"] == 0.5
    assert scores["accuracy"] == pytest.approx(5 / 6)
    report = task.report(found, source)
    assert report and report.record()["classes"]["x"]["recall"] == pytest.approx(1 / 3)
    assert task.describe(source) == (
        "slots: 1 chunks directly follow another of their type; the head learns IO, which merges "
        "the two, and scores count both as not found"
    )
    assert tagging(source).describe(source) == ""


@pytest.mark.parametrize(
    ("tags", "as_bioes", "note"),
    [
        (["B-x", "L-x", "O", "U-y"], ["B-x", "E-x", "O", "S-y"], "L as E, U as S (BIOES)"),
        (["B-x", "M-x", "E-x", "S-y"], ["B-x", "I-x", "E-x", "S-y"], "M as I (BIOES)"),
    ],
)
def test_bilou_and_bmes_are_read_as_bioes(
    rows: Any, tags: list[str], as_bioes: list[str], note: str
) -> None:
    source = rows({"tokens": ["a", "b", "c", "d"], "tags": tags})
    task = tagging(source)
    assert task.scheme == "BIOES" and task.labels == labels_of({"x", "y"}, "BIOES")
    assert task.describe(source) == f"slots: tags: {note}, also in predictions"
    found = there_and_back(task, source)
    assert found[0]["tags"] == as_bioes and task.metrics(found, source)["f1"] == 1.0
    named = tagging(source, labels=tuple(dict.fromkeys([*tags, "O"])))
    assert {*as_bioes} <= {*named.labels} <= {*task.labels}
    assert {*Tagging.imported(tags)["labels"]} == {*as_bioes}
    assert Tagging.imported(tags)["scheme"] == "BIOES"


@pytest.mark.parametrize("scheme", sorted({*SCHEMES} - {"IO"}))  # IOB1 may write all that IO does
def test_the_scheme_is_detected_from_the_rows(
    rows: Callable[..., TableSource], scheme: str
) -> None:
    tags = ["B-x", "B-x", "I-x", "O", "B-y", "I-y", "I-y", "B-x"]
    source = rows({"tokens": list("abcdefgh"), "tags": convert(tags, scheme)})
    assert tagging(source).scheme == scheme


@pytest.mark.parametrize("scheme", SCHEMES)
def test_allowed_transitions_are_those_the_scheme_writes(scheme: str) -> None:
    labels = labels_of({"x", "y"}, scheme)
    assert labels[-1] == "O"
    found = allowed(labels, scheme)
    expected = np.zeros_like(found)
    stack: list[tuple[str, ...]] = [()]
    for _ in range(4):  # every sequence of up to four tags that the scheme writes
        stack = [(*before, tag) for before in stack for tag in labels]
        for tags in stack:
            if check_scheme(tags, scheme) is None:
                number = [labels.index(tag) for tag in tags]
                expected[0, number[0]] = expected[1, number[-1]] = True
                for a, b in zip(number, number[1:], strict=False):
                    expected[2 + a, b] = True
    assert np.array_equal(found, expected)


def test_tags_without_chunks_are_used_as_they_are(rows: Callable[..., TableSource]) -> None:
    source = rows(
        {"tokens": ["the", "film"], "tags": ["DT", "NN"]}, {"tokens": ["go"], "tags": ["VB"]}
    )
    task = tagging(source, constrain=True, crf=True)
    assert (task.scheme, task.labels) == ("none", ("DT", "NN", "VB"))
    found = there_and_back(task, source)
    assert [found[i]["tags"] for i in (0, 1)] == [["DT", "NN"], ["VB"]]
    assert json.loads(json.dumps(found)) == {"0": found[0], "1": found[1]}
    found[1]["tags"] = ["NN"]
    assert task.metrics(found, source) == {"accuracy": pytest.approx(2 / 3)}
    report = task.report(found, source)
    assert report and report.record()["confusion"] == {
        "DT": {"DT": 1},
        "NN": {"NN": 1},
        "VB": {"NN": 1},
    }


def test_rows_that_break_the_scheme_are_read_by_conlleval_and_reported(
    rows: Callable[..., TableSource],
) -> None:
    source = rows(
        {"tokens": ["a", "b"], "tags": ["B-x", "B-x"]},
        {"tokens": ["a", "b"], "tags": ["O", "I-x"]},
        {"tokens": ["a", "b"], "tags": ["B-y", "I-x"]},
    )
    task = tagging(source)
    assert task.scheme == "BIO"
    assert "2 rows violate BIO" in task.describe(source)
    assert "t.jsonl:2, tag 2: I-x for B-x" in task.describe(source)
    found = there_and_back(task, source)
    assert found[2]["tags"] == ["B-y", "B-x"]
    assert task.metrics(found, source)["f1"] == 1.0


def test_types_have_their_own_scores(rows: Callable[..., TableSource]) -> None:
    """Compared with scikit-learn's, with chunks of one word."""
    from sklearn.metrics import classification_report

    rng = np.random.default_rng(5)
    every = rng.choice(["S-x", "S-y", "S-z", "O"], (2, 40), p=[0.5, 0.2, 0.1, 0.2]).tolist()
    source = rows({"tokens": ["a"] * 40, "tags": every[0]})
    task = tagging(source, scheme="BIOES")
    predicted = {0: {"tags": every[1]}}
    kinds = ["S-x", "S-y", "S-z"]
    report: Any = classification_report(*every, labels=kinds, output_dict=True)
    found = task.report(predicted, source)
    assert found is not None and list(found.tables()) == ["Classes"]
    by_type = found.record()
    for kind, scores in [*by_type["classes"].items(), *by_type["averages"].items()]:
        theirs = report[f"S-{kind}" if kind in "xyz" else f"{kind} avg"]
        for key, value in scores.items():
            assert value == pytest.approx(theirs[key.replace("f1", "f1-score")]), (kind, key)
    probs = {0: {**predicted[0], "probs": [0.75] * 40}}
    calibrated = task.report(probs, source)
    right = np.mean(np.equal(*every))
    assert calibrated and calibrated.record()["calibration"] == {
        "ece": pytest.approx(abs(right - 0.75)),
        "bins": [
            {
                "low": pytest.approx(0.7),
                "high": pytest.approx(0.8),
                "confidence": 0.75,
                "accuracy": right,
                "rows": 40,
            }
        ],
    }
    scores = task.metrics(predicted, source)
    assert list(scores) == ["f1", "precision", "recall", "accuracy"]
    assert scores["f1"] == pytest.approx(report["micro avg"]["f1-score"])
    assert scores["precision"] == pytest.approx(report["micro avg"]["precision"])
    assert scores["recall"] == pytest.approx(report["micro avg"]["recall"])


def test_a_task_on_the_same_head_may_have_rows_in_another_scheme(
    rows: Callable[..., TableSource],
) -> None:
    first = tagging(rows({"tokens": ["a", "b"], "tags": ["B-x", "I-x"]}))
    source = rows({"tokens": ["a", "b"], "tags": ["S-x", "O"]})
    other = (
        Tagging(name="other", source="small", share="slots").with_head_of(first).resolved(source)
    )
    assert (other.labels, other.trained_scheme, other.scheme) == (first.labels, "BIO", "BIOES")
    assert there_and_back(other, source)[0]["tags"] == ["S-x", "O"]
    with pytest.raises(
        UserError, match="tasks.other.crf: differs from that of tasks.slots, which owns"
    ):
        Tagging(name="other", source="small", share="slots", crf=True).with_head_of(first)
    with pytest.raises(UserError, match="tasks.other.share: 'i' is another kind of task"):
        Tagging(name="other", source="small").with_head_of(Classification(name="i", source="small"))


# ---- windows ----


def test_words_near_a_border_are_predicted_in_the_window_with_most_context(
    rows: Callable[..., TableSource],
) -> None:
    tags = ["O"] * 40
    source = rows({"tokens": ["a"] * 40, "tags": [*tags[:-1], "B-x"]})
    task = tagging(source, max_length=22, overlap=10)
    made = examples(task, source)
    assert [(e.source_offsets[1], e.source_offsets[-2]) for e in made] == [
        (0, 19),
        (10, 29),
        (20, 39),
    ]

    def by_context(task: Tagging, targets: np.ndarray) -> np.ndarray:
        """Confident in the middle of a window, wrong within five words of its borders."""
        right = oracle(task, np.zeros(20, np.int64))
        right[:5] = right[-5:] = oracle(task, np.full(5, 2))
        return right

    found = predictions(task, source, made, by_context)[0]["tags"]
    wrong = {i for i, tag in enumerate(found) if tag != "B-x"}
    assert wrong == {*range(5), *range(35, 40)}


def test_a_word_longer_than_a_window_is_in_one_window(rows: Callable[..., TableSource]) -> None:
    words = ["b" * 30, "a", "c" * 30, "d" * 30, "a", "e" * 5]
    tags = ["B-x", "I-x", "O", "B-x", "O", "B-y"]
    source = rows({"tokens": words, "tags": tags})
    task = tagging(source, max_length=10)
    assert there_and_back(task, source)[0]["tags"] == tags


def test_empty_words_and_rows_have_their_tags(rows: Callable[..., TableSource]) -> None:
    source = rows(
        {"tokens": ["a", "\x07", "\u200b", "b"], "tags": ["O", "B-x", "I-x", "O"]},
        {"tokens": [], "tags": []},
        {"tokens": ["\x07"], "tags": ["B-x"]},
    )
    for crf in (False, True):
        task = tagging(source, crf=crf, constrain=True)
        found = there_and_back(task, source)
        assert [found[i]["tags"] for i in range(3)] == [["O", "B-x", "I-x", "O"], [], ["B-x"]]
        assert len(found[0]["probs"]) == 4
        assert task.metrics(found, source)["f1"] == 1.0


@pytest.mark.parametrize("max_length", [0, 10])
def test_predictions_follow_the_scheme_on_request(
    rows: Callable[..., TableSource], max_length: int
) -> None:
    """Compared with plain Viterbi over the words' scores and allowed transitions."""
    rng = np.random.default_rng(3)
    size = 24
    tags = ["O", "B-x", "I-x", "E-x", "S-y", "O"] * (size // 6)
    source = rows({"tokens": list(LETTERS[:size]), "tags": tags})
    task = tagging(source, constrain=True, max_length=max_length)
    assert task.scheme == "BIOES"
    every = rng.normal(size=(size, len(task.labels))).astype(np.float32)
    pieces = []
    for example in examples(task, source):
        scores = every[task._seen(example, source).words]
        pieces.append(task.decode(scores, example, source))
    found = task.gather({0: pieces}, source)[0]
    assert check_scheme(found["tags"], "BIOES") is None
    assert [task.labels[i] for i in every.argmax(1)] != found["tags"]
    shares = torch.log_softmax(torch.from_numpy(every), 1).numpy()
    score = sum(shares[i, task.labels.index(tag)] for i, tag in enumerate(found["tags"]))
    assert score == pytest.approx(_best_allowed(shares, task.labels), abs=1e-3)
    np.testing.assert_allclose(
        found["probs"],
        [np.exp(shares[i, task.labels.index(tag)]) for i, tag in enumerate(found["tags"])],
        atol=2e-6,
    )


def _best_allowed(shares: np.ndarray, labels: Sequence[str]) -> float:
    may = allowed(labels, "BIOES")
    best = {i: shares[0, i] for i in range(len(labels)) if may[0, i]}
    for row in shares[1:]:
        best = {
            b: row[b] + max(score for a, score in best.items() if may[2 + a, b])
            for b in range(len(labels))
            if any(may[2 + a, b] for a in best)
        }
    return max(score for i, score in best.items() if may[1, i])


# ---- texts without tokens, and other tasks ----


def test_a_plain_text_is_split_into_words_and_spans_refer_to_it(
    rows: Callable[..., TableSource],
) -> None:
    text = "a table, for two at 5pm"
    source = rows({"text_a": text, "spans": [{"start": 13, "end": 16, "type": "people"}]})
    task = tagging(source)
    bare = rows({"text_a": text})
    task.check(bare, labeled=False)
    found = predictions(task, bare, examples(task, bare))[0]
    assert found["tokens"] == ["a", "table", ",", "for", "two", "at", "5pm"]
    assert found["tags"] == [task.labels[0]] * 7  # without a label the first one is the target
    assert found["spans"][0] == {"start": 0, "end": 1, "type": "people"}
    assert task.metrics({0: found}, bare) == {}


def test_another_task_may_build_the_input(rows: Callable[..., TableSource]) -> None:
    tokens, tags = ["fly", "to", "paris\x07texas", "\x07", "now"], ["O", "O", "B-city", "O", "B-t"]
    source = rows({"text_a": " ".join(tokens), "tokens": tokens, "tags": tags, "label": "f"})
    task = tagging(source)
    for texts in (("tokens",), ("text_a",)):
        intent = Classification(name="intent", source="small", texts=texts, labels=("f", "g"))
        layout = intent.layout(np.array([[0]]), np.empty((1, 0)), source, 64)[0]
        example = intent.example(layout, source, np.random.default_rng(0))
        intent.label(example, source, np.random.default_rng(0))
        task.label(example, source, np.random.default_rng(0))
        assert example.labels["intent"][0].tolist() == [0]
        found = predictions(task, source, [example])[0]
        assert found["tags"] == tags
        assert found["probs"][3] == (0.0 if texts == ("text_a",) else pytest.approx(0.9995, 1e-3))


def test_words_truncated_by_another_task_are_tagged_o(rows: Callable[..., TableSource]) -> None:
    tokens = ["a"] * 20
    source = rows({"tokens": tokens, "tags": ["B-x"] * 20, "label": "f"})
    intent = Classification(name="i", source="small", texts=("tokens",), max_length=8)
    layout = intent.layout(np.array([[0]]), np.empty((1, 0)), source, 64)[0]
    example = intent.example(layout, source, np.random.default_rng(0))
    task = tagging(source, crf=True, constrain=True)
    task.label(example, source, np.random.default_rng(0))
    assert predictions(task, source, [example])[0]["tags"] == ["B-x"] * 6 + ["O"] * 14


def test_a_text_with_other_words_is_refused(rows: Callable[..., TableSource]) -> None:
    source = rows({"text_a": "quite another", "tokens": ["a", "b"], "tags": ["O", "B-x"]})
    intent = Classification(name="intent", source="small")
    layout = intent.layout(np.array([[0]]), np.empty((1, 0)), source, 64)[0]
    example = intent.example(layout, source, np.random.default_rng(0))
    with pytest.raises(UserError, match=r"t.jsonl:1: tasks.slots: its words .* put it first"):
        tagging(source).label(example, source, np.random.default_rng(0))


# ---- mistakes ----

GOOD = {"tokens": ["a", "b"], "tags": ["O", "B-x"]}
WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"tokens": ["a"], "tags": ["B_x"]}, {}, r't.jsonl:2: tags: tag 1: "B_x" is not a tag'),
    ({"tokens": ["a"], "tags": ["x"]}, {}, r't.jsonl:2: tags: tag 1: "x" is not a tag'),
    (
        {"tokens": ["a"], "tags": ["E-x"]},
        {"scheme": "BIO"},
        r't.jsonl:2: tags: tag 1: "E-x" is not a tag of BIO; its tags are B-TYPE, I-TYPE and O',
    ),
    (
        {"tokens": ["a"], "tags": ["B-z"]},
        {"labels": ("B-x", "I-x", "O")},
        r"t.jsonl:2: tags, word 1: unknown tag 'B-z'; did you .*; tasks.slots has B-x, I-x",
    ),
    (
        {"tokens": ["a"], "tags": ["B-x"]},
        {"labels": ("B-x", "x")},
        r'tasks.slots.labels: tag 2: "x" is not a tag',
    ),
    ({"tokens": ["a"], "tags": ["B-x"]}, {"label_column": "label"}, "no column 'label'"),
    ({"tokens": ["a"], "tags": ["B-x"]}, {"texts": ("text_a",)}, "no column 'text_a'"),
]


@pytest.mark.parametrize(("row", "keys", "message"), WRONG)
def test_rows_that_cannot_be_learned_are_named(
    rows: Callable[..., TableSource], row: dict[str, Any], keys: dict[str, Any], message: str
) -> None:
    source = rows(GOOD, row)
    with pytest.raises(UserError, match=message) as caught:
        tagging(source, **keys).check(source, labeled=True)
    assert "\n" not in str(caught.value)


def test_unknown_tags_are_named_but_do_not_prevent_predictions(
    rows: Callable[..., TableSource],
) -> None:
    task = tagging(rows(GOOD))
    held = rows(GOOD, {"tokens": ["a", "b", "c"], "tags": ["O", "B-place", "I-place"]})
    with pytest.raises(UserError, match=r"t.jsonl:2: tags, word 2: unknown tag 'B-place'"):
        task.check(held, labeled=True)
    task.check(held, labeled=False)
    found = predictions(task, held, examples(task, held))
    assert len(found[1]["tags"]) == 3
    assert task.metrics(found, held)["f1"] == 1.0  # of the row that it knows


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"scheme": "BIEO"}, "tasks.slots.scheme: unknown tagging scheme"),
        ({"trained_scheme": "x"}, "tasks.slots.trained_scheme: unknown tagging scheme"),
        ({"units": "letters"}, "tasks.slots.units: no .letters.; known: characters, words"),
        ({"texts": ("a", "b")}, "tagging reads one"),
        ({"labels": ("O", "O")}, "duplicate tag"),
        (
            {"labels": np.array(["B-X", "O"])},
            r"labels: expected a list of names, such as .*, got arr",
        ),
        ({"overlap": -1}, "tasks.slots.overlap: expected 0 or more, got -1"),
    ],
)
def test_invalid_keys_are_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tagging(None, **keys)


def test_only_o_tags_are_an_error(rows: Callable[..., TableSource]) -> None:
    source = rows({"tokens": ["a"], "tags": ["O"]})
    with pytest.raises(UserError, match="has no tag but O in column 'tags'"):
        tagging(source)
    with pytest.raises(UserError, match="overlap: 30 tokens, but windows have only 30"):
        tagging(rows(GOOD), overlap=30).items(source, 32)


# ---- through a model ----


@pytest.mark.parametrize("crf", [False, True])
def test_a_small_model_learns_tags_that_follow_from_words(
    rows: Callable[..., TableSource], crf: bool
) -> None:
    """Packed rows, windows, loss, scores, predictions: everything, as in a run."""
    rng = np.random.default_rng(0)
    every = []
    for _ in range(48):
        words = rng.choice(["to", "from", "paris", "new", "york", "now"], rng.integers(1, 12))
        tags = [
            {"paris": "B-city", "new": "B-city", "york": "I-city"}.get(word, "O") for word in words
        ]
        every.append({"tokens": words.tolist(), "tags": tags})
    source = rows(*every)
    task = tagging(source, crf=crf, max_length=8, dropout=0.0)
    dataset = TaskGroupDataset("slots", (task,), 0, source, seed=1, max_length=24, fixed=True)
    torch.manual_seed(0)
    config = EncoderConfig(
        vocab_size=source.vocabulary.size, hidden_size=32, num_layers=1, num_heads=2,
        max_positions=24, task_types=0, dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    backbone = build_encoder(config)
    head = task.head(backbone)
    assert isinstance(head, CRFHead if crf else ClassHead)
    model = Model(backbone, {"slots": head}, {"slots": "slots"})
    numbers = np.arange(dataset.num_items)
    layouts = dataset.layouts(numbers)
    examples = refs(0, numbers, layouts)
    packed = [examples[i : i + 3] for i in range(0, len(layouts), 3)]
    built = build_examples([dataset], packed)
    batch = collate_built([dataset], built, 24, source.vocabulary.pad)
    assert batch.count("slots") == (len(layouts) if crf else len(batch.labels["slots"][0]))
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(30):
        optimizer.zero_grad()
        (model(batch)["slots"].loss_sum / batch.count("slots")).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        scores = {"slots": model.logits(batch, "slots")}
        correct = int(model(batch)["slots"].correct)
    pieces = list(decoded(built, scores, {"slots": task}, [source]))
    found = gathered(pieces, {"slots": task}, [source])
    _, made = found["slots"]
    assert list(made) == list(range(48))
    assert task.metrics(made, source)["f1"] > 0.95
    assert correct > 0.8 * batch.count("slots")
    assert chunks(made[0]["tags"]) == chunks(every[0]["tags"])
    losses, right = task.baseline(batch.labels["slots"][1].numpy(), source)
    assert np.isfinite(losses).all()
    assert np.isnan(right).all() == crf


@pytest.mark.parametrize("odd", ["B_PER", "b-per", "PER-B", "B:PER"])
def test_tags_in_another_notation_are_not_classes_in_silence(odd: str, rows) -> None:
    found = rows({"tokens": ["a", "b", "c"], "tags": ["O", odd, "O"]})
    with pytest.raises(UserError, match=f"'{odd}' seems to be a tag of chunks; .*`scheme: none`"):
        Tagging(name="slots", source="small").resolved(found)
    assert set(tagging(found, scheme="none").labels) == {"O", odd}


def test_types_that_look_alike_are_remarked_on(rows) -> None:
    found = rows(*({"tokens": ["a", "b"], "tags": [x, "O"]} for x in ("B-PER", "B-Per")))
    assert "'PER' and 'Per' look alike" in tagging(found).describe(found)
    found = rows({"tokens": ["a", "b"], "tags": [0, 1]})
    assert "numbers (0, 1) are classes of their own" in tagging(found).describe(found)


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ({"tags": ["B-X", "O"]}, {"tokens": ["a", "b"]}),
        ({"spans": [{"start": 0, "end": 1, "type": "X"}]}, {"text_a": "a b"}),
    ],
    ids=["tags", "spans"],
)
def test_rows_without_tags_are_kept_for_a_teacher(label, words, tmp_path: Path) -> None:
    """Those with spans have labels, also if they have none in their text."""
    (role, value), file = next(iter(label.items())), tmp_path / "rows.jsonl"
    nothing = ["O", "O"] if role == "tags" else []
    lines = [{**words, role: each} for each in (value, None, nothing)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match=f"rows.jsonl:2: {role} is null"):
        source_of(file)
    source = source_of(file, {"missing_labels": "keep"})
    task = tagging(source)
    assert task.labels == ("B-X", "I-X", "O") and task.describe(source) == ""
    assert task.labeled(source).tolist() == [True, False, True]
    task.check(source, labeled=False)
    with pytest.raises(UserError, match=f"rows.jsonl:2: {role}"):
        task.check(source, labeled=True)
