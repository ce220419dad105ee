"""Texts written from others: what an example is, lengths, heads, training, and bad tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.data.sources.table import TableSource
from palm_ds.data.tasks.task import build
from palm_ds.data.tasks.text_generation import GenerationLimits, banned_tokens, generate_texts
from palm_ds.model.generation.generate import DecodingSettings
from palm_ds.model.heads.heads import GenerationHead
from palm_ds.model.multi_task_model import Model
from palm_ds.tasks.generation import Generation
from tests.helpers.small_images import BOXES, PICTURE, UNIMO, asked_rows
from tests.helpers.text_tables import (
    built_of,
    dataset_of,
    learned,
    model_of,
    small_tokenizer,
    source_of,
)

CLS, SEP, MASK = 2, 3, 4
LIMITS = GenerationLimits(length=64, segments=2)
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
    assert task.describe_rows(dataset.source, 64) == (
        "titles: 4 rows; sources truncated: 1; targets truncated to 8 tokens: 1"
    )


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


def written(
    model: Model, source: TableSource, task: Generation, **settings: Any
) -> list[dict[str, Any]]:
    """The prediction for each row."""
    return generate_texts(
        model,
        task,
        range(len(source)),
        source,
        LIMITS,
        settings=replace(task.decoding, **settings),
        batch_tokens=256,
    )


def test_it_learns_to_write_what_it_sees(tmp_path: Path) -> None:
    source = source_of(tmp_path, ROWS)
    task = task_of(smoothing=0.05, word_weight=0.7, target_segment=1)
    model = learned(source, task, steps=80)
    for how in ({}, {"beams": 3}):
        found = written(model, source, task, **how)
        texts = [each["text"] for each in found]
        assert texts == [row["target"] for row in ROWS[:3]] + ["j k l m n o p"]  # max_target is 8
        assert all(-2 < each["score"] < 0 for each in found)
    scores = task.metrics(dict(enumerate(found)), source)
    assert list(scores) == ["rouge_l", "rouge_1", "rouge_2", "bleu_4"]
    assert scores["rouge_l"] == pytest.approx((3 + 14 / 16) / 4)


def test_an_unimo_learns_it_without_token_types(tmp_path: Path) -> None:
    """Where the target begins, its [CLS] alone says."""
    source, task = source_of(tmp_path, ROWS[:2]), task_of(smoothing=0.05)
    unimo = {"kind": "unimo", "token_types": 1, "position_offset": 2}
    model = learned(source, task, steps=40, lr=2e-2, **unimo)
    assert "backbone.segment.weight" not in model.state_dict()
    assert [each["text"] for each in written(model, source, task)] == ["a b", "very good so bad"]


def test_an_unimo_writes_as_in_its_own_code(tmp_path: Path) -> None:
    """Each token predicts the one after it, and [MASK] ends a text."""
    own = {"decoder": "next_token", "end": "mask", "positions": "restart"}
    source, task = source_of(tmp_path, ROWS[:2]), task_of(smoothing=0.05, **own)
    example = dataset_of(source, task).example(0, dataset_of(source, task).layouts(np.arange(1))[0])
    assert example.input_ids.tolist()[7:] == [CLS, *ids("a b"), MASK]
    unimo = {"kind": "unimo", "token_types": 1, "position_offset": 2}
    model = learned(source, task, steps=40, lr=2e-2, **unimo)
    for how in ({}, {"beams": 3}):
        found = written(model, source, task, **how)
        assert [each["text"] for each in found] == ["a b", "very good so bad"]


def test_a_prompt_is_the_source_of_the_example(tmp_path: Path) -> None:
    source = source_of(tmp_path, PAIRS)
    for values in ({}, {"positions": "restart"}):
        task = task_of(target_segment=1, **values)
        dataset = dataset_of(source, task)
        example = dataset.example(0, dataset.layouts(np.arange(1))[0])
        (prompt,) = task.prompts(np.arange(1), source, LIMITS)
        size = len(prompt.source.input_ids)
        assert prompt.source.input_ids.tolist() == example.input_ids[:size].tolist()
        assert example.input_ids[size] == CLS and example.position_ids is not None
        assert prompt.source.position_ids is not None
        assert prompt.source.position_ids.tolist() == example.position_ids[:size].tolist()
        assert prompt.position == example.position_ids[size]
        assert prompt.source.token_type_ids.tolist() == example.token_type_ids[:size].tolist()
        assert task.target_format(source.vocabulary, LIMITS).token_type == 1


def test_sources_are_cut_to_what_the_longest_target_leaves(tmp_path: Path) -> None:
    source = source_of(tmp_path, ROWS)
    task, limits = task_of(max_target=8), GenerationLimits(length=24, segments=2)
    prompts = task.prompts(np.arange(4), source, limits)
    assert [len(each.source.input_ids) for each in prompts] == [7, 5, 3, 24 - 8]
    assert task.cut_sources(source, limits) == 1
    few = task_of(max_source=8).prompts(np.arange(4), source, limits)
    assert max(len(each.source.input_ids) for each in few) == 8


def test_rows_without_targets_are_written_but_not_scored(tmp_path: Path) -> None:
    task = task_of(target_segment=1)
    source = source_of(tmp_path, [{"source": "a b c"}])
    found = written(model_of(task), source, task, min_tokens=2)
    assert len(found[0]["text"].replace(" ", "")) >= 2
    assert task.metrics({0: found[0]}, source) == {}


@pytest.mark.parametrize(
    ("score", "names"),
    [
        ("bleu", ["bleu_4", "rouge_l", "rouge_1", "rouge_2"]),
        ("dialogue", ["bleu_1", "bleu_2", "distinct_1", "distinct_2"]),
        ("answers", ["f1", "exact"]),
    ],
)
def test_scores_by_other_rules(score: str, names: list[str], tmp_path: Path) -> None:
    source = source_of(tmp_path, ROWS)
    texts = {i: {"text": row["target"]} for i, row in enumerate(ROWS)}
    scores = task_of(score=score).metrics(texts, source)
    assert list(scores) == names and scores[names[0]] == pytest.approx(1.0)
    assert task_of().tables(texts, source)["Texts"][1] == ["a b c d e", "a b", "a b"]


def test_settings_of_decoding() -> None:
    task = task_of(generate={"beams": 5, "length_penalty": 0.6}, evaluate_beams=2)
    assert task.decoding == DecodingSettings(max_tokens=7, beams=5, length_penalty=0.6)
    assert task.evaluation_decoding.beams == 2
    drawn = task.with_decoding({"beams": 1, "temperature": 0.9, "max_tokens": 3}).decoding
    assert (drawn.temperature, drawn.max_tokens, drawn.length_penalty) == (0.9, 3, 0.6)
    with pytest.raises(UserError, match='generate.beam: unknown key; did you mean "beams"'):
        task.with_decoding({"beam": 3})
    with pytest.raises(
        UserError, match="tasks.titles.generate.beams: expected a number above 0, got 0"
    ):
        task_of(generate={"beams": 0})
    with pytest.raises(UserError, match="evaluate_rows: expected 0 or more, got -1"):
        task_of(evaluate_rows=-1)


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
    with pytest.raises(UserError, match="`smoothing` and `word_weight` must be those of the task"):
        task_of(smoothing=0.1).with_head_of(other)


def test_bad_tables(tmp_path: Path) -> None:
    task = task_of()
    nothing = source_of(tmp_path, [{"source": "a", "label": "x"}])
    with pytest.raises(UserError, match="tasks.titles: .* has no column 'target'; it has"):
        task.check(nothing, labeled=True)
    task.check(nothing, labeled=False)  # to predict
    empty = source_of(tmp_path, [{"source": "a", "target": "b"}, {"source": "a", "target": " "}])
    with pytest.raises(UserError, match=r"jsonl:2: target is empty"):
        task.check(empty, labeled=True)
    with pytest.raises(UserError, match="has no column 'source'"):
        task.check(source_of(tmp_path, [{"text_a": "a", "target": "b"}]), labeled=True)
    dataset = dataset_of(source_of(tmp_path, ROWS), task_of(max_target=64), max_length=24)
    with pytest.raises(UserError, match="rows of 24 tokens leave no room for a source next to"):
        dataset.layouts(np.arange(4))


def test_ernie_s_columns_are_known(tmp_path: Path) -> None:
    source = source_of(tmp_path, [{"src": "a b", "tgt": "c"}])
    task_of().check(source, labeled=True)
    assert source.row(0) == {"source": "a b", "target": "c"}


def captions(folder: Path, rows: int) -> tuple[TableSource, Generation]:
    made = [{"pic": row["pic"], "caption": row["target"]} for row in asked_rows(rows)]
    source = source_of(folder, made, columns={**PICTURE, "target": "caption"})
    values = {"images": True, "decoder": "next_token", "end": "mask", "smoothing": 0.0}
    return source, task_of(**values).resolved(source)


def test_a_caption_is_written_from_an_image(tmp_path: Path) -> None:
    """[CLS] [SEP], the regions, and the target, whose positions go on behind the [SEP]."""
    source, task = captions(tmp_path, 3)
    task.check(source, labeled=True)
    dataset = dataset_of(source, task)
    example = dataset.example(1, dataset.layouts(np.arange(3))[1])
    target = [CLS, *ids(source.column("target")[1]), MASK]
    assert example.input_ids[:2].tolist() == [CLS, SEP]
    assert example.input_ids[2 + BOXES + 1 :].tolist() == target
    assert example.regions is not None and example.position_ids is not None
    assert example.regions.places.tolist() == [2, 3, 4, 5]
    assert example.position_ids.tolist() == [0, 1, 0, 0, 0, 0, 2, 3, 4, 5, 6]
    assert example.labels["titles"][0].tolist() == [6, 7, 8, 9]
    assert dataset.layouts(np.arange(3))["length"][1] == len(example) == 11
    _, batch = built_of(dataset)
    assert batch.count("titles") == 3 * 4
    with pytest.raises(UserError, match="backbone.kind: bert reads texts alone"):
        model_of(task)
    both = task_of(images=True, texts=["text_a"]).resolved(source)
    with pytest.raises(UserError, match="no column 'text_a'"):
        both.check(source, labeled=True)


def test_captions_are_those_of_the_likeliest_tokens(tmp_path: Path) -> None:
    """Decoding step by step over the cache equals a forward pass over what was written."""
    source, task = captions(tmp_path, 4)
    model = learned(source, task, steps=40, **UNIMO)
    texts = written(model, source, task)
    rows = [
        {"pic": row["pic"], "caption": each["text"]}
        for row, each in zip(asked_rows(4), texts, strict=True)
    ]
    repeated = source_of(tmp_path, rows, columns={**PICTURE, "target": "caption"})
    _, batch = built_of(dataset_of(repeated, task))
    with torch.no_grad():
        scores = model(batch, ("titles",))["titles"].scores
    banned = banned_tokens(source.vocabulary, scores.shape[1], MASK)
    scores[:, torch.from_numpy(banned)] = -torch.inf
    targets = batch.labels["titles"][1]
    assert (scores.argmax(1) == targets).all() and len(set(targets.tolist())) > 3
