"""Masked words of rows: whole words, 80/10/10, losses of BertForMaskedLM, task groups."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from transformers import BertForMaskedLM

from palm_ds.common.errors import UserError
from palm_ds.data.tasks.task import Task, build
from palm_ds.tasks.masked_words import MaskedWords
from palm_ds.text.display import token_texts
from palm_ds.text.tokenizer import SPECIALS, Tokenizer, load_tokenizer
from tests.helpers.byte_level_bpe import bpe_folder
from tests.helpers.hf_names import from_names
from tests.helpers.text_tables import (
    bert_config,
    built_of,
    dataset_of,
    learned,
    make_task,
    model_of,
    predictions,
    small_tokenizer,
    source_of,
)

MASK, SPECIAL = 4, 5
ROWS = [
    {"text_a": "so goods bads ? xyz", "text_b": "very good", "label": "1"},
    {"text_a": "a b c d e f g h", "text_b": "", "label": "0"},
    {"text_a": "good", "text_b": "x", "label": "1"},
]


task_of = partial(make_task, MaskedWords, "words")


def examples_of(source, *tasks: Task, max_length: int = 64) -> list:
    built, _ = built_of(dataset_of(source, *tasks, max_length=max_length))
    return sorted((example for row in built for _, example in row), key=lambda each: each.item)


def test_scores_and_perplexity_equal_transformers(tmp_path: Path) -> None:
    source = source_of(tmp_path, ROWS)
    task = task_of()
    theirs = BertForMaskedLM(bert_config()).eval()
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    state, _ = from_names(theirs.state_dict(), "bert")
    model = model_of(task)
    state = {name.replace("heads.masked_words.", "heads.words."): x for name, x in state.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["backbone.pooler.dense.weight", "backbone.pooler.dense.bias"]
    assert unexpected == []
    made = predictions(model, source, task)["words"]
    loss = count = right = 0
    for example in examples_of(source, task):
        where, targets = example.labels["words"]
        labels = torch.full((1, len(example)), -100)
        labels[0, where] = torch.from_numpy(targets)
        ids, segments = (
            torch.from_numpy(x)[None] for x in (example.input_ids, example.token_type_ids)
        )
        with torch.no_grad():
            expected = theirs(input_ids=ids, token_type_ids=segments, labels=labels)
        words = expected.logits[0, where].argmax(-1)
        assert made[example.item]["word_id"] == words.tolist()
        assert made[example.item]["words"] == small_tokenizer().tokens(words.numpy())
        mean = float(expected.loss)
        assert made[example.item]["loss"] == pytest.approx(mean * len(where), abs=1e-5)
        loss, count = loss + mean * len(where), count + len(where)
        right += int((words == torch.from_numpy(targets)).sum())
    scores = task.metrics(made, source)
    assert list(scores) == ["accuracy", "perplexity"]
    assert scores["accuracy"] == right / count
    assert scores["perplexity"] == pytest.approx(math.exp(loss / count), rel=1e-5)


def test_whole_words_are_masked(tmp_path: Path) -> None:
    source = source_of(tmp_path, ROWS)
    example = examples_of(source, task_of())[0]
    tokens = small_tokenizer().tokens(example.unmasked_ids)
    assert tokens[1:9] == ["so", "good", "##s", "bad", "##s", "?", "x", "##y"]
    units = task_of().units(example, source)
    assert units.tolist() == [-1, 0, 1, 1, 2, 2, 3, 4, 4, 4, -1, 5, 6, -1]
    each = task_of(whole_words=False).units(example, source)
    assert each.tolist() == [-1, *range(9), -1, 9, 10, -1]


def test_words_of_vocabularies_without_a_continuation_prefix(tmp_path: Path) -> None:
    tokens = [*SPECIALS, "▁so", "▁good", "s", "▁", "光", "荣", "?", "▁'", "t", "1"]
    backend = Backend(models.Unigram([(token, -1.0) for token in tokens], unk_id=1))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    source = source_of(tmp_path, [{"text_a": "so goods光荣? 't so1"}])
    source = replace(source, tokenizer=Tokenizer(backend))
    (example,) = examples_of(source, task_of())
    found = source.tokenizer.tokens(example.unmasked_ids)[1:-1]
    assert found == ["▁so", "▁good", "s", "光", "荣", "?", "▁'", "t", "▁so", "1"]
    assert task_of().units(example, source)[1:-1].tolist() == [0, 1, 1, 2, 3, 4, 5, 5, 6, 6]


def test_words_of_byte_level_vocabularies(tmp_path: Path) -> None:
    """Their bytes of Chinese are written as letters."""
    folder = bpe_folder(tmp_path / "bpe", {}, ["so goods", "光", "荣", "so 42", "。"])
    source = source_of(tmp_path, [{"text_a": "so goods,光荣。 42"}])
    source = replace(source, tokenizer=load_tokenizer(folder))
    (example,) = examples_of(source, task_of())
    found = [text for text, _ in token_texts(source.tokenizer, example.unmasked_ids)][1:-1]
    assert found == ["so", "goods", ",", "光", "荣", "。", "42"]
    assert task_of().units(example, source)[1:-1].tolist() == list(range(7))


def test_the_masking_rate_and_replacements(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    rows = [{"text_a": " ".join(rng.choice(list("abcdefgh"), 40))} for _ in range(400)]
    source = source_of(tmp_path, rows)
    hidden = same = masked = 0
    for example in examples_of(source, task_of()):
        where, targets = example.labels["words"]
        assert (example.unmasked_ids[where] == targets).all()
        assert (targets >= SPECIAL).all()
        untouched = np.setdiff1d(np.arange(len(example)), where)
        assert (example.input_ids[untouched] == example.unmasked_ids[untouched]).all()
        hidden += len(where)
        masked += int((example.input_ids[where] == MASK).sum())
        same += int((example.input_ids[where] == targets).sum())
    deviation = math.sqrt(0.8 * 0.2 / hidden)
    assert hidden / (400 * 40) == pytest.approx(0.15, abs=0.002)
    assert masked / hidden == pytest.approx(0.8, abs=4 * deviation)
    assert same / hidden == pytest.approx(0.1 + 0.1 / 64, abs=4 * deviation)


@pytest.mark.parametrize("max_length", [64, 12])
def test_every_text_with_a_word_has_a_masked_one(tmp_path: Path, max_length: int) -> None:
    source = source_of(tmp_path, [*ROWS, {"text_a": "x " * 50, "text_b": "?", "label": "0"}])
    for rate in (0.01, 0.99):
        for example in examples_of(source, task_of(rate=rate), max_length=max_length):
            assert len(example.labels["words"][0]) >= 1
            assert len(example) <= max_length


def test_a_text_without_words_has_no_labels(tmp_path: Path) -> None:
    source = source_of(tmp_path, [{"text_a": ""}, {"text_a": "good"}])
    assert [sorted(e.labels) for e in examples_of(source, task_of())] == [[], ["words"]]
    assert sorted(predictions(model_of(task_of()), source, task_of())["words"]) == [1]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("classification", {"labels": ["0", "1"]}),
        ("matching", {"strategy": "pairwise"}),
        ("multiple_choice", {"answers": "number"}),
    ],
)
def test_words_are_masked_in_another_tasks_input(tmp_path, kind, values) -> None:
    rows = [{**row, "text_b_neg": "bad", "choices": ["yes", "so goods"]} for row in ROWS]
    source = source_of(tmp_path, rows)
    first = build("first", {"kind": kind, "source": "s", **values})
    plain = {example.item: example for example in examples_of(source, first)}
    for example in examples_of(source, first, task_of()):
        assert sorted(example.labels) == ["first", "words"]
        assert (example.unmasked_ids == plain[example.item].input_ids).all()
        assert example.sub_lengths == plain[example.item].sub_lengths
        where, targets = example.labels["words"]
        assert (example.unmasked_ids[where] == targets).all()
        assert (targets >= SPECIAL).all()
    model = model_of(first, task_of())
    made = predictions(model, source, first, task_of())
    assert sorted(made["first"]) == sorted(made["words"]) == [0, 1, 2]


def test_held_out_masks_are_fixed_and_training_masks_vary_by_epoch(tmp_path: Path) -> None:
    source = source_of(tmp_path, ROWS)
    first, second = (examples_of(source, task_of())[1] for _ in range(2))
    assert (first.input_ids == second.input_ids).all()
    dataset = dataset_of(source, task_of(), fixed=False)
    shown = {
        tuple(dataset.example(n, layout).labels["words"][0])
        for n, layout in enumerate(dataset.layouts(np.arange(30)))
    }
    assert len(shown) > 5


def test_unigrams_are_the_baseline(tmp_path: Path) -> None:
    source = source_of(tmp_path, [{"text_a": "x x x y"}])
    x, y = (small_tokenizer().encode_words([word])[0][0] for word in "xy")
    loss, right = task_of().baseline(np.array([x, y]), source)
    total = small_tokenizer().size + 4
    assert loss == pytest.approx(-np.log([4 / total, 2 / total]))
    assert right.tolist() == [1, 0]


def test_it_learns(tmp_path: Path) -> None:
    rows = [{"text_a": f"{word} {word} {word}"} for word in "abcdefgh"]
    source = source_of(tmp_path, rows)
    task = task_of(mask_rate=1.0, random_rate=0.0)
    scores = task.metrics(predictions(learned(source, task), source, task)["words"], source)
    assert scores["accuracy"] > 0.8
    assert scores["perplexity"] < 4


def test_missing_columns_are_named(tmp_path: Path) -> None:
    source = source_of(tmp_path, [{"text_a": "x"}])
    with pytest.raises(UserError, match="tasks.words: .* has no column 'context'"):
        task_of(texts=["context"]).check(source, labeled=False)
