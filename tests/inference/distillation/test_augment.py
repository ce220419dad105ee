"""Copies of rows: what changes, how often, and that they depend on seed and row alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.common.rng import keyed_generator
from palm_ds.data.reader import Table, open_table
from palm_ds.inference.distillation.augment import (
    UNKNOWN,
    AugmentSettings,
    augment,
    changed_text,
    guesser_of,
)
from palm_ds.inference.trained_model import TrainedModel
from palm_ds.text.tokenizer import wordpiece
from tests.helpers.saved_model import save_model

ROWS = [
    {"text_a": "they were walking and talking slowly", "label": "a"},
    {"text_a": "a charming and touching film, quickly forgotten", "label": "b"},
    {"text_a": "a beautiful but boring and tiring story", "label": "a"},
]


def made(folder: Path, rows=ROWS, guesser=None, **settings) -> list[dict]:
    file = folder / "more.jsonl"
    found = augment(Table.from_rows(rows), file, AugmentSettings(**settings), guesser)
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert found == len(lines)
    return lines


def test_rows_come_with_their_copies(tmp_path) -> None:
    lines = made(tmp_path, copies=4)
    assert [line["source_row"] for line in lines] == [n for n in range(3) for _ in range(5)]
    assert [line["copy"] for line in lines] == [*range(5)] * 3
    for line in lines:
        row = ROWS[line["source_row"]]
        if line["copy"]:
            assert line["label"] is None and line["text_a"]
        else:
            assert (line["text_a"], line["label"]) == (row["text_a"], row["label"])
    assert made(tmp_path, copies=4) == lines != made(tmp_path, copies=4, seed=2)
    kept = made(tmp_path, copies=1, keep_labels=True)
    assert all(line["label"] == ROWS[line["source_row"]]["label"] for line in kept)
    alone = made(tmp_path, rows=ROWS[:1], copies=4, same_class=0.0)
    assert alone == made(tmp_path, copies=4, same_class=0.0)[:5]  # other rows do not matter
    assert lines[5:8] == made(tmp_path, copies=2)[3:6]  # nor do further copies


def test_labels_to_keep_must_be_there(tmp_path) -> None:
    rows = [{"text_a": row["text_a"]} for row in ROWS]
    with pytest.raises(UserError, match="--keep_labels: rows: no column has the role label"):
        made(tmp_path, rows=rows, keep_labels=True)


def test_words_become_unknown_or_others_of_their_class(tmp_path) -> None:
    some = {"copies": 300, "piece": 0.0}
    lines = made(tmp_path, **some, unknown=0.2, same_class=0.0)
    words = [word for line in lines if line["copy"] for word in line["text_a"].split()]
    share = sum(UNKNOWN in word for word in words) / len(words)
    assert 0.17 < share < 0.23
    lines = made(tmp_path, **some, unknown=0.0, same_class=0.5)
    first = {line["text_a"] for line in lines if line["source_row"] == 0}
    ending = {"walking", "talking", "charming", "touching", "boring", "tiring"}
    seen = {text.split()[2] for text in first}
    assert seen == ending and {text.split()[5] for text in first} == {"slowly", "quickly"}
    assert all(text.split()[:2] == ["they", "were"] for text in first)


def test_pieces_are_consecutive_words(tmp_path) -> None:
    lines = made(tmp_path, copies=50, piece=1.0)
    texts = [line["text_a"] for line in lines if line["copy"] and line["source_row"] == 0]
    assert all(text in ROWS[0]["text_a"] for text in texts)
    assert len({len(text.split()) for text in texts}) == 6


def test_guesses_of_a_model(tmp_path) -> None:
    asked = []

    def guesser(words: Sequence[str]) -> list[list[tuple[str, float]]]:
        asked.append(words)
        return [[("one", 0.75), ("two", 0.25)]] * words.count("[MASK]")

    lines = made(tmp_path, guesser=guesser, copies=200, piece=0.0, guess=0.3, unknown=0.0)
    words = [word for line in lines for word in line["text_a"].split()]
    assert asked and "[MASK]" not in " ".join(words)
    assert 2.2 < words.count("one") / words.count("two") < 4.0
    with pytest.raises(UserError, match="--guess: needs --model"):
        made(tmp_path, guess=0.1)


def test_a_model_guesses_whole_words_of_texts_of_any_length(tmp_path) -> None:
    words = {"words": {"kind": "masked_words", "source": "texts"}}
    guess = guesser_of(
        TrainedModel.open(save_model(tmp_path / "run", stages=("words",), tasks=words)).filler()
    )
    text = ["good", " ", "[MASK]", " ", "bad", " "] * 50  # 150 tokens; the model reads 64
    found = guess(text)
    assert len(found) == 50 and guess(["good"]) == []
    assert all(word and word[:2] != "##" and word[0] != "[" for each in found for word, _ in each)


def test_a_mask_of_the_models_own_in_a_text_is_no_word_to_guess() -> None:
    read = []

    def fill(text: str, *, top: int) -> SimpleNamespace:
        read.append(text)
        return SimpleNamespace(hidden=[])

    config = SimpleNamespace(max_length=64)
    filler = SimpleNamespace(
        model=SimpleNamespace(backbone=SimpleNamespace(config=config)),
        tokenizer=SimpleNamespace(
            roles={"mask": "<mask>"}, encode_texts=lambda texts: [(texts[0].split(), None)]
        ),
        fill=fill,
    )
    guesser_of(filler)(["<", "mask", ">", " ", "is", " ", "[MASK]"])  # type: ignore[arg-type]
    assert read == ["  is [MASK]"]


def test_the_output_is_another_file_of_json_lines(tmp_path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROWS[0]) + "\n")
    table, settings = open_table(str(file)), AugmentSettings()
    itself = "rows.jsonl: is also an input"
    for output, message in ((file, itself), (tmp_path / "x.tsv", "a .jsonl file")):
        with pytest.raises(UserError, match=message):
            augment(table, output, settings)
    assert augment(table, tmp_path / "a" / "more.jsonl", settings) == 11


def test_an_interrupted_run_continues(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("palm_ds.inference.distillation.augment._ROWS", 1)
    table, settings = Table.from_rows(ROWS), AugmentSettings(copies=2)
    augment(table, tmp_path / "whole.jsonl", settings)

    def stop(rows: int, of: int) -> None:
        if rows == 2:
            raise KeyboardInterrupt

    for seed in (1, 2):  # the second is of another command
        with pytest.raises(KeyboardInterrupt):
            augment(table, tmp_path / "a.jsonl", replace(settings, seed=seed), done=stop)
    parts = tmp_path / ".a.jsonl.parts"
    assert len([*parts.glob("part_*")]) == 2 and not (tmp_path / "a.jsonl").exists()
    copied: list[int] = []
    original = keyed_generator
    monkeypatch.setattr(
        "palm_ds.inference.distillation.augment.keyed_generator",
        lambda key, row: copied.append(row) or original(key, row),
    )
    augment(table, tmp_path / "a.jsonl", replace(settings, seed=2))
    assert set(copied) == {2}
    with pytest.raises(KeyboardInterrupt):
        augment(table, tmp_path / "a.jsonl", replace(settings, seed=2), done=stop)
    augment(table, tmp_path / "a.jsonl", settings)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not parts.exists()


def test_chinese_words_have_their_part_of_speech() -> None:
    pytest.importorskip("rjieba")
    from palm_ds.inference.distillation.augment import words_by_class

    texts = ["这家酒店的服务很好", "房间干净，老板热情"]
    known = words_by_class(texts)
    assert {"酒店", "服务", "房间", "老板"} <= {w for words in known.values() for w in words}
    settings = AugmentSettings(unknown=0.0, same_class=1.0, piece=0.0)
    found = {changed_text(texts[0], known, settings, np.random.default_rng(n)) for n in range(30)}
    assert len(found) > 1 and all("的" in text for text in found)


def test_the_unknown_letter_is_unknown() -> None:
    tokenizer = wordpiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"], lower=True)
    ids, _ = tokenizer.encode_spans([f"a {UNKNOWN} a"])[0]
    assert tokenizer.tokens(ids) == ["a", "[UNK]", "a"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"unknown": 1.5}, "--unknown: expected at most 1, got 1.5"),
        ({"unknown": 0.6, "same_class": 0.6}, "add up to more than 1"),
        ({"copies": 0}, "--copies: expected a number above 0, got 0"),
    ],
)
def test_wrong_settings(settings, message) -> None:
    with pytest.raises(UserError, match=message):
        AugmentSettings(**settings)
