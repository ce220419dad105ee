"""Texts truncated as in BERT, several of a row longest first; labels inferred, sorted and checked;
heads shared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from palm_ds.common.errors import UserError
from palm_ds.data.reader import open_table
from palm_ds.data.sources.table import TableSource
from palm_ds.data.stream.task_group_dataset import make_datasets
from palm_ds.data.tasks.task import build
from palm_ds.runtime.deepspeed.ds_config import make_ds_config
from palm_ds.tasks.classification import Classification
from palm_ds.tasks.matching import Matching
from palm_ds.tasks.multi_label import MultiLabel
from palm_ds.tasks.shared.text_task import ClassesTask, level, tokenize
from palm_ds.train.recipe.recipe import Recipe, make_recipe
from palm_ds.train.setup.build import build_model
from palm_ds.train.setup.resolve import resolve
from palm_ds.train.setup.sources import check_tables, open_data
from tests.helpers.text_tables import opened, source_of
from tests.helpers.word_tables import open_source, write_table, write_texts, write_vocabulary


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory) -> Path:
    return write_vocabulary(tmp_path_factory.mktemp("vocabulary"))


def task(**values: Any) -> Any:
    return build("t", {"kind": "classification", "source": "s", **values})


def one_token_at_a_time(lengths: list[int], most: int) -> list[int]:
    """BERT's _truncate_seq_pair (google-research/bert run_classifier.py): while it is too long, the
    longer text loses its last token; of equally long ones the later."""
    kept = list(lengths)
    while sum(kept) > most:
        longest = max(kept)
        kept[max(i for i, n in enumerate(kept) if n == longest)] -= 1
    return kept


@given(
    lengths=st.lists(st.lists(st.integers(0, 40), min_size=3, max_size=3), min_size=1, max_size=9),
    texts=st.integers(1, 3),
    most=st.integers(0, 90),
)
def test_texts_are_truncated_one_token_at_a_time(lengths, texts, most) -> None:
    rows = [row[:texts] for row in lengths]
    found = level(np.array(rows), most)
    assert found.tolist() == [one_token_at_a_time(row, most) for row in rows]


def test_every_row_may_have_its_own_maximum_length() -> None:
    rows = np.array([[9, 9], [9, 9], [0, 3]])
    assert level(rows, np.array([5, 18, 2])).tolist() == [[3, 2], [9, 9], [0, 2]]


@pytest.mark.parametrize("max_length", [0, 8, 13])
def test_an_example_is_cls_text_sep_text_sep(vocabulary, tmp_path, max_length) -> None:
    source = open_source(write_texts(tmp_path / "t.tsv", 30, pairs=True), vocabulary)
    made = task(max_length=max_length).resolved(source)
    datasets, _ = make_datasets(
        ["t"], {"t": made}, {"t": 0}, {"s": [("s", source, 1.0)]}, seed=1, length=24, fixed=True
    )
    ids = source.vocabulary
    lengths = []
    for layout in datasets[0].layouts(np.arange(30)):
        item = int(layout["item"])
        example = datasets[0].example(item, layout)
        assert example.item == item and len(example) == layout["length"]
        texts = [source.encoded(name).read(item).ids.tolist() for name in ("text_a", "text_b")]
        room = (max_length or 24) - 3
        kept = one_token_at_a_time([len(text) for text in texts], room)
        first, second = (text[:n] for text, n in zip(texts, kept, strict=True))
        assert example.input_ids.tolist() == [ids.cls, *first, ids.sep, *second, ids.sep]
        assert example.token_type_ids.tolist() == [0] * (len(first) + 2) + [1] * (len(second) + 1)
        at, target = example.labels["t"]
        assert at.tolist() == [0]
        assert made.labels[target[0]] == source.row(item)["label"]
        lengths.append(len(example))
    assert max(lengths) == (max_length or 24)  # some were cut


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (["b", "a", "b"], ("a", "b")),
        (["10", "9", "1"], ("1", "9", "10")),
        (["0.5", "-1", "2"], ("-1", "0.5", "2")),
        (["2", "x", "10"], ("2", "10", "x")),
    ],
)
def test_labels_are_those_of_the_training_rows_in_order(
    vocabulary, tmp_path, found, expected
) -> None:
    path = write_table(tmp_path / "t.tsv", [["w1", x] for x in found], "text_a", "label")
    source = open_source(path, vocabulary)
    assert task().resolved(source).labels == expected
    assert task(labels=["z", "y"]).resolved(source).labels == ("z", "y")


def test_numbers_and_truths_of_other_formats_are_labels_too(vocabulary, tmp_path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"text_a": "w1", "label": 1}\n{"text_a": "w2", "label": 0}\n')
    source = open_source(path, vocabulary)
    made = task().resolved(source)
    assert made.labels == ("0", "1")
    assert made.targets(source).tolist() == [1, 0]


@pytest.mark.parametrize("kind", [Classification, MultiLabel, Matching])
def test_truths_are_the_same_classes_in_every_format(tmp_path, kind: type[ClassesTask]) -> None:
    """pandas writes True in CSV, spreadsheets TRUE, JSON has true."""
    written = {"t.csv": "True,False", "s.csv": "TRUE,FALSE", "t.jsonl": "true,false"}
    tables = {}
    for name, values in written.items():
        file, (yes, no) = tmp_path / name, values.split(",")
        if name.endswith("csv"):
            file.write_text(f"text_a,text_b,label\ngood,x,{yes}\nbad,x,{no}\n")
        else:
            line = '{"text_a": "good", "text_b": "x", "label": %s}\n'
            file.write_text(line % yes + line % no)
        tables[name] = opened(file)
    for name, source in tables.items():
        made = replace(kind(source="s"), name="t").resolved(source)
        yes, no = written[name].split(",")
        assert made.labels == (no, yes)
        expected = made.targets(source).tolist()
        for other in tables.values():
            made.check_labels(other)
            assert made.targets(other).tolist() == expected
            assert made.describe_labels(other) == f"{no} 1, {yes} 1"
    both = TableSource.of_labels(open_table([str(tmp_path / name) for name in written]))
    made = replace(kind(source="s"), name="t").resolved(both)
    assert made.labels == ("FALSE", "TRUE")
    assert made.targets(both).tolist() == 3 * made.targets(tables["t.csv"]).tolist()
    numbers = tmp_path / "n.csv"
    numbers.write_text("text_a,text_b,label\ngood,x,1.0\nbad,x,0.0\n")
    of_numbers = replace(kind(source="s"), name="t").resolved(opened(numbers))
    assert of_numbers.labels == ("0.0", "1.0")
    numbers.write_text("text_a,text_b,label\ngood,x,1\nbad,x,0\n")
    assert of_numbers.targets(opened(numbers)).tolist() == expected
    old = replace(made, labels=("True", "true"))  # of a model from before they were one
    assert old.targets(tables["t.jsonl"])[0].tolist() in (1, [0, 1])


@pytest.mark.parametrize("names", [[0, 1], [False, True], np.array(["no", "yes"]), "no", None])
@pytest.mark.parametrize("kind", [Classification, MultiLabel, Matching])
def test_names_of_labels_are_a_list_of_texts(kind: type[ClassesTask], names: Any) -> None:
    with pytest.raises(UserError, match=rf"^{kind.__name__}.labels: expected a list of names, suc"):
        kind(labels=names)


def test_classes_may_be_named_by_numbers() -> None:
    Classification(labels=["0", "1"], positive=1, class_weights={0: 2.0})  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^Classification.positive: '2' is not a label; known: "):
        Classification(labels=["0", "1"], positive=2)  # type: ignore[arg-type]


def test_an_unknown_label_is_reported_with_its_place(vocabulary, tmp_path) -> None:
    path = write_table(tmp_path / "t.tsv", [["w1", "good"], ["w2", "godo"]], "text_a", "label")
    source = open_source(path, vocabulary)
    made = task(labels=["good", "bad"])
    with pytest.raises(UserError) as error:
        made.check(source, labeled=True)
    assert f"{path}:3: " in str(error.value)
    assert "unknown label 'godo'; did you mean \"good\"" in str(error.value)
    assert "tasks.t has good, bad" in str(error.value)


def test_as_many_labels_as_rows_suggest_a_wrong_column(vocabulary, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("palm_ds.tasks.shared.text_task.MOST_LABELS", 20)
    path = write_table(tmp_path / "t.tsv", [["w1", n] for n in range(21)], "text_a", "label")
    with pytest.raises(UserError, match="21 different labels in column 'label' of t; is this the"):
        task().resolved(open_source(path, vocabulary))


def test_rows_without_labels_cannot_be_trained_on(vocabulary, tmp_path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"text_a": "w1"}\n')
    with pytest.raises(UserError, match="t has no column 'label'"):
        task().resolved(open_source(path, vocabulary))


def dataset_of(made: Any, source: TableSource, length: int) -> Any:
    sources = {"s": [("s", source, 1.0)]}
    return make_datasets(["t"], {"t": made}, {"t": 0}, sources, seed=1, length=length)[0][0]


@pytest.mark.parametrize(
    ("max_length", "error"),
    [
        (65, "65 tokens, but rows hold 64; raise `length` or lower it"),
        (7, "tasks.t.max_length: 7; it must be 0 or at least 8"),
        (-1, "tasks.t.max_length: -1; it must be 0 or at least 8"),
    ],
)
def test_impossible_lengths_are_errors(vocabulary, tmp_path, max_length, error) -> None:
    source = open_source(write_texts(tmp_path / "t.tsv", 9), vocabulary)
    made = task(max_length=max_length).resolved(source)
    with pytest.raises(UserError, match=error):
        dataset_of(made, source, 64).layouts(np.arange(3))


def test_other_columns_may_be_its_texts(vocabulary, tmp_path) -> None:
    source = open_source(write_texts(tmp_path / "t.tsv", 9, pairs=True), vocabulary)
    made = task(texts=["text_b"]).resolved(source)
    dataset = dataset_of(made, source, 64)
    for n, layout in enumerate(dataset.layouts(np.arange(3))):
        example = dataset.example(n, layout)
        text = source.encoded("text_b").read(int(layout["item"])).ids
        assert example.input_ids[1:-1].tolist() == text.tolist()
    with pytest.raises(UserError, match="tasks.t: t has no column 'text_c'"):
        dataset_of(task(texts=["text_c"], labels=["c0", "c1"]), source, 64).layouts(np.arange(3))


# One head for two tasks ------------------------------------------------------------------------


def shared_recipe(folder: Path, vocabulary: Path, **second: Any) -> Recipe:
    source = {"tokenizer": str(vocabulary)}
    values = {
        "backbone": {"preset": "tiny", "max_positions": 32},
        "length": 32,
        "batch": "4 examples",
        "held_out": 0.0,
        "sources": {
            name: {"table": str(folder / f"{name}.tsv"), **source} for name in ("one", "two")
        },
        # the task that shares comes first, but the owner of its head is resolved before it
        "tasks": {
            "second": {"kind": "classification", "source": "two", "share": "first", **second},
            "first": {"kind": "classification", "source": "one"},
        },
        "stages": [{"first": "1 epochs", "second": "1 epochs"}],
    }
    return make_recipe(values, "recipe.yaml")


def write_labels(path: Path, *labels: str) -> None:
    write_table(path, [["w1", label] for label in labels], "text_a", "label")


def test_tasks_that_share_a_head_share_its_labels(vocabulary, tmp_path) -> None:
    """Inferred separately, a class would have different numbers."""
    write_labels(tmp_path / "one.tsv", "c", "a", "b")
    write_labels(tmp_path / "two.tsv", "c", "b", "b")
    made = shared_recipe(tmp_path, vocabulary)
    data = open_data(made)
    resolved = resolve(made, data)
    built: dict[str, Any] = dict(resolved.built_tasks)
    first, second = built["first"], built["second"]
    assert first.labels == second.labels == ("a", "b", "c")
    assert second.targets(data.train["two"][0][1]).tolist() == [2, 1, 1]
    check_tables(resolved, data)
    assert resolve(resolved, data).tasks == resolved.tasks
    ds_config = make_ds_config({})
    model = build_model(resolved, ds_config, data.vocabulary, device=torch.device("cpu"))
    assert list(model.heads) == ["first"] and model.head_of["second"] == "first"


@pytest.mark.parametrize(
    ("labels", "second", "error"),
    [
        (("c", "d"), {}, "unknown label 'd'.*tasks.second has a, b, c"),
        (("c", "b"), {"labels": ["b", "c"]}, "second.labels: differ from those of tasks.first"),
        (("1", "2"), {"kind": "regression"}, "another kind of task .Classification, not Regr"),
        (("c", "b"), {"head_lr": 1e-3}, "head_lr: its head belongs to tasks.first; set it there"),
        (("c", "b"), {"smoothing": 0.1}, "second.smoothing: its head belongs to tasks.first"),
        (("c", "b"), {"class_weights": "balanced"}, "second.class_weights: its head belongs to"),
    ],
    ids=["another label", "another order", "another kind", "another rate", "smoothing", "balanced"],
)
def test_heads_that_cannot_be_shared_are_errors(
    vocabulary, tmp_path, labels, second, error
) -> None:
    write_labels(tmp_path / "one.tsv", "c", "a", "b")
    write_labels(tmp_path / "two.tsv", *labels)
    with pytest.raises(UserError, match=error):
        made = shared_recipe(tmp_path, vocabulary, **second)
        data = open_data(made)
        check_tables(resolve(made, data), data)


ROWS = [["so " * 9, "good", ""], ["bad"], ["so " * 40, "so " * 30]]


def test_tokens_of_each_text(tmp_path: Path) -> None:
    source = source_of(tmp_path, [{"text_a": "x"}] * len(ROWS))
    texts = tokenize(ROWS, source, "texts")
    assert texts.counts.tolist() == [3, 1, 2] and list(texts.of(2)) == [4, 5]
    added, items = np.array([2, 2, 5]), np.array([0, 1, 2])
    assert texts.cut(items, added, source, 100, 100).tolist() == [
        [11, 3, 2],
        [3, 0, 0],
        [45, 35, 0],
    ]
    assert texts.cut(items, added, source, 20, 30)[2].tolist() == [15, 15, 0]
    assert texts.cut(items[:1], added[:1], source, 8, 100).tolist() == [[8, 3, 2]]
    with pytest.raises(UserError, match=r":3: 2 texts leave fewer than 8 tokens for each in"):
        texts.cut(items, added, source, 20, 15)
