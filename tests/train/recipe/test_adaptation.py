"""The recipe that follows from a corpus, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from palm_ds.model.config.config import EncoderConfig
from palm_ds.train.recipe.adaptation import (
    AdaptOptions,
    adaptation_recipe,
    held_out_share,
    row_length,
    step_counts,
)
from palm_ds.train.recipe.recipe import make_recipe
from tests.helpers.small_corpus import write_small_corpus

BERT = EncoderConfig.from_dict({"vocab_size": 65, "token_types": 2, "task_types": 0})


@pytest.mark.parametrize(
    ("tokens", "length", "rows", "steps"),
    [
        (1_000, 128, 32, 100),  # 10 passes would be 2 steps
        (100_000, 128, 32, 244),  # 1,000,000 / 4,096
        (1_000_000, 256, 32, 1_221),  # 10,000 tokens wanted, 8,192 are as near as rows get
        (100_000_000, 512, 256, 7_629),  # 131,072 at most
        (10_000_000_000, 512, 256, 10_000),
    ],
)
def test_steps_and_batch_follow_from_the_tokens(
    tokens: int, length: int, rows: int, steps: int
) -> None:
    assert step_counts(tokens, length) == (rows, steps)


def test_rows_are_as_long_as_texts_and_encoder_allow(tmp_path: Path) -> None:
    corpus = write_small_corpus(tmp_path / "corpus")  # of documents of up to 25 x 19 tokens
    assert row_length(corpus, BERT) == 512
    assert row_length(corpus, EncoderConfig.from_dict({"max_positions": 100})) == 100
    assert held_out_share(corpus) == 0.1


def test_general_text_adds_steps(tmp_path: Path) -> None:
    own = write_small_corpus(tmp_path / "own", documents=1_000)
    general = write_small_corpus(tmp_path / "general", seed=1)
    alone = adaptation_recipe("x", BERT, own, None, AdaptOptions())
    mixed = adaptation_recipe("x", BERT, own, general, AdaptOptions(general_share=0.5))
    read = [10 * own.manifest.tokens, 20 * own.manifest.tokens]
    for values, tokens in zip((alone, mixed), read, strict=True):
        size = int(values["batch"].split()[0])
        steps = sum(values["stages"][0].values())
        assert steps == pytest.approx(tokens / size, abs=1)
    assert mixed["sources"]["text"]["mix"] == {str(own.path): 0.5, str(general.path): 0.5}
    assert alone["held_out"] == 0.1


def test_tasks_are_those_that_the_texts_and_the_encoder_allow(tmp_path: Path) -> None:
    several = write_small_corpus(tmp_path / "several")
    few = write_small_corpus(tmp_path / "few", documents=20)
    options = AdaptOptions(steps=10)
    values = adaptation_recipe("", BERT, several, None, options)
    assert [*values["tasks"]] == ["knowledge_masking", "sentence_distance", "sentence_reordering"]
    assert values["tasks"]["knowledge_masking"]["units"] == ["word", "phrase", "entity"]
    assert [*values["stages"][0].values()] == [6, 2, 2]
    recipe = make_recipe({**values, "backbone": {"vocab_size": 65, "token_types": 2}})
    assert recipe.curriculum.steps == 10
    assert [task.weight for task in recipe.built_tasks.values()] == [1.0, 0.1, 0.1]
    short = adaptation_recipe("", BERT, several, None, AdaptOptions(steps=3))
    assert [*short["tasks"]] == [*short["stages"][0]] == ["knowledge_masking"]
    assert [*adaptation_recipe("", BERT, several, few, options)["tasks"]] == ["knowledge_masking"]
    roberta = EncoderConfig.from_dict({"vocab_size": 65, "token_types": 1})
    assert [*adaptation_recipe("", roberta, several, None, options)["tasks"]] == [
        "knowledge_masking"
    ]
    modern = EncoderConfig.from_dict({"kind": "modernbert", "vocab_size": 65})
    tasks = adaptation_recipe("", modern, several, None, options)["tasks"]
    assert tasks["knowledge_masking"]["rate"] == 0.3 and tasks["sentence_reordering"]["most"] == 3
