"""Texts written from others: what an example is, lengths, heads, training, and bad tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.data.task import build
from palm_ds.model.generation_head import GenerationHead
from palm_ds.tasks.generation import Generation
from tests.helpers.text_tables import (
    built_of,
    dataset_of,
    learned,
    model_of,
    predictions,
    small_tokenizer,
    source_of,
)

CLS, SEP, MASK = 2, 3, 4
ROWS = [
    {"source": "a b c d e", "target": "a b"},
    {"source": "good goods", "target": "very good so bad"},
    {"source": "x", "target": "y"},
    {"source": "j k l m n o p q r s t u v w x y z", "target": "j k l m n o p q r"},
]
PAIRS = [{"source": "a b c", "source_b": "d e f g h i j", "target": "k l"}]


def task_of(**values) -> Generation:
    values = {"noise_rate": 0.0, "max_target": 8, **values}
    task = build("titles", {"kind": "generation", "source": "s", **values})
    assert isinstance(task, Generation)
    return task


def ids(text: str) -> list[int]:
    return small_tokenizer().backend.encode(text, add_special_tokens=False).ids


def test_an_example_of_a_row(tmp_path: Path) -> None:
    dataset = dataset_of(source_of(tmp_path, ROWS), task_of())
    example = dataset.example(0, dataset.layouts(np.arange(1))[0])
    source, target = [CLS, *ids("a b c d e"), SEP], [CLS, *ids("a b"), SEP]
    assert example.input_ids.tolist() == [*source, *target, MASK, MASK, MASK]
    assert example.token_type_ids.tolist() == [0] * 7 + [3] * 7
    where, labels = example.labels["titles"]
    assert where.tolist() == [11, 12, 13] and labels.tolist() == target[1:] and example.item == 0


def test_a_cut_target_does_not_end(tmp_path: Path) -> None:
    """As in ERNIE's reader, so that the model does not learn to stop there."""
    dataset = dataset_of(source_of(tmp_path, ROWS), task_of(max_source=9))
    layout = dataset.layouts(np.arange(4))[3]
    example = dataset.example(3, layout)
    _, labels = example.labels["titles"]
    assert labels.tolist() == ids("j k l m n o p") and layout["target"] == 8
    assert example.input_ids[:9].tolist() == [CLS, *ids("j k l m n o p"), SEP]
    task = dataset.tasks[0]
    assert isinstance(task, Generation)
    assert task.cut_rows(dataset.source, 64) == 1
    assert task.describe_rows(dataset.source, 64) == "titles: 4 rows; 1 truncated"


def test_several_sources_have_segments_of_their_own(tmp_path: Path) -> None:
    dataset = dataset_of(source_of(tmp_path, PAIRS), task_of(max_source=10, target_segment=2))
    example = dataset.example(0, dataset.layouts(np.arange(1))[0])
    assert example.input_ids[:10].tolist() == [CLS, *ids("a b c"), SEP, *ids("d e f g"), SEP]
    assert example.token_type_ids.tolist() == [0] * 5 + [1] * 5 + [2] * 7
    swapped = dataset_of(source_of(tmp_path, PAIRS), task_of(texts=["source_b"], target_segment=2))
    example = swapped.example(0, swapped.layouts(np.arange(1))[0])
    assert example.input_ids[:9].tolist() == [CLS, *ids("d e f g h i j"), SEP]


@pytest.mark.parametrize("weight", [1.0, 0.5])
@pytest.mark.parametrize("max_length", [36, 64])
def test_layouts_know_the_lengths(tmp_path: Path, weight: float, max_length: int) -> None:
    source = source_of(tmp_path, ROWS * 3)
    dataset = dataset_of(source, task_of(word_weight=weight), max_length=max_length)
    layouts = dataset.layouts(np.arange(12))
    for n, layout in enumerate(layouts):
        assert len(dataset.example(n, layout)) == layout["length"] <= max_length
    built, batch = built_of(dataset)
    assert batch.visibility is not None
    assert batch.count("titles") == sum(
        int(layout["target"] - 1) * (2 if weight < 1 else 1) for layout in layouts
    )
    assert batch.real_tokens == layouts["length"].sum()


def test_it_learns_to_write_what_it_sees(tmp_path: Path) -> None:
    source = source_of(tmp_path, ROWS)
    task = task_of(smoothing=0.05, word_weight=0.7, target_segment=1)
    before = predictions(model_of(task), source, task)["titles"]
    after = predictions(learned(source, task, steps=80), source, task)["titles"]
    scores = [task.metrics(found, source) for found in (before, after)]
    assert scores[1]["token_accuracy"] == 1.0 and scores[0]["token_accuracy"] < 0.3
    assert scores[1]["perplexity"] < 1.3 < 10 < scores[0]["perplexity"]
    assert sum(each["tokens"] for each in after.values()) == 3 + 5 + 2 + 7


def test_the_loss_of_evaluation_is_that_of_the_predictions(tmp_path: Path) -> None:
    source, task = source_of(tmp_path, ROWS), task_of(target_segment=1)
    model = model_of(task)
    _, batch = built_of(dataset_of(source, task))
    with torch.no_grad():
        output = model(batch)["titles"]
    found = predictions(model, source, task)["titles"]
    assert sum(each["loss"] for each in found.values()) == pytest.approx(float(output.loss_sum))
    assert sum(each["right"] for each in found.values()) == int(output.correct)


def test_unigrams_of_the_targets_are_the_baseline(tmp_path: Path) -> None:
    source, task = source_of(tmp_path, ROWS), task_of()
    often, rare = ids("k")[0], ids("a")[0]
    loss, right = task.baseline(np.array([often, rare]), source)
    size, tokens = small_tokenizer().size, sum(len(ids(row["target"])) for row in ROWS)
    np.testing.assert_allclose(loss, -np.log([2 / (size + tokens), 2 / (size + tokens)]))
    two, _ = task.baseline(np.array([[often, 0], [often, 1]]), source)
    np.testing.assert_allclose(two, loss[0])


def test_its_head_is_one_for_masked_words(tmp_path: Path) -> None:
    assert isinstance(model_of(task_of()).heads["titles"], GenerationHead)
    other = replace(task_of(), name="other", smoothing=0.0)
    with pytest.raises(UserError, match="another `smoothing`"):
        task_of(smoothing=0.1).with_head_of(other)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_target": 2}, r"tasks.titles.max_target: 2 is less than 3"),
        ({"max_source": 4}, "tasks.titles.max_source: 4; it must be 0 or at least 8"),
        ({"longest_span": 0}, "tasks.titles.longest_span: 0 is less than 1"),
        ({"noise_rate": 2.0}, "tasks.titles.noise_rate: 2.0 is not from 0 to 1"),
    ],
)
def test_bad_settings(values: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        task_of(**values)


def test_bad_tables(tmp_path: Path) -> None:
    task = task_of()
    nothing = source_of(tmp_path, [{"source": "a", "label": "x"}])
    with pytest.raises(UserError, match="tasks.titles: .* has no column 'target'; it has"):
        task.check(nothing, labelled=True)
    task.check(nothing, labelled=False)  # to predict
    empty = source_of(tmp_path, [{"source": "a", "target": "b"}, {"source": "a", "target": " "}])
    with pytest.raises(UserError, match=r"jsonl:2: target is empty"):
        task.check(empty, labelled=True)
    with pytest.raises(UserError, match="has no column 'source'"):
        task.check(source_of(tmp_path, [{"text_a": "a", "target": "b"}]), labelled=True)
    dataset = dataset_of(source_of(tmp_path, ROWS), task_of(max_target=64), max_length=24)
    with pytest.raises(UserError, match="rows of 24 tokens leave no room for a source next to"):
        dataset.layouts(np.arange(4))


def test_ernie_s_columns_are_known(tmp_path: Path) -> None:
    source = source_of(tmp_path, [{"src": "a b", "tgt": "c"}])
    task_of().check(source, labelled=True)
    assert source.row(0) == {"source": "a b", "target": "c"}
