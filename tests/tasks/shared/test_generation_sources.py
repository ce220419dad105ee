"""Dialogues as sources: the arrangement of ERNIE-GEN's reader, restated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.data.tasks.task import build
from palm_ds.data.tasks.text_generation import GenerationLimits
from palm_ds.tasks.generation import Generation
from tests.helpers.text_tables import dataset_of, small_tokenizer, source_of

CLS, SEP = 2, 3
ROWS = [
    {"source": "a b c", "turns": ["d", "e f", "so good"], "target": "g h"},
    {"source": "i", "turns": ["j k l"], "target": "m"},
    {"source": "n o p q", "turns": ["r", "s", "t", "u v"], "target": "w x y"},
]


def task_of(**values: Any) -> Generation:
    values = {"noise_rate": 0.0, "max_target": 8, "max_turns": 3, **values}
    task = build("reply", {"kind": "generation", "source": "s", **values})
    assert isinstance(task, Generation)
    return task


def ids(text: str) -> list[int]:
    return small_tokenizer().backend.encode(text, add_special_tokens=False).ids


def as_in_ernie(row: dict[str, Any], most: int, turns: int) -> tuple[list[int], list[int]]:
    """The tokens of a source and its token types: (role, turn) of `repro` as one number. A long one
    keeps its last tokens, and [CLS]."""
    kept = row["turns"][-turns:]
    turn, role = len(kept), len(kept) % 2
    tokens, pairs = [CLS], [(role, turn)]
    facts = [*ids(row["source"]), SEP] if "source" in row else []
    tokens, pairs = tokens + facts, pairs + [(2, 0)] * len(facts)
    for text in kept:
        own = [*ids(text), SEP]
        tokens, pairs = tokens + own, pairs + [(role, turn)] * len(own)
        turn, role = turn - 1, (role + 1) % 2
    assert all(role in (2, turn % 2) for role, turn in pairs)
    types = [turns + 1 if role == 2 else turn for role, turn in pairs]
    first = max(1, len(tokens) - most + 1)
    return [CLS, *tokens[first:]], [types[0], *types[first:]]


@pytest.mark.parametrize("facts", [True, False])
@pytest.mark.parametrize("most", [8, 40])
def test_a_source_is_that_of_ernies_reader(tmp_path: Path, most: int, facts: bool) -> None:
    rows = [{x: y for x, y in row.items() if facts or x != "source"} for row in ROWS]
    task = task_of(max_source=most)
    dataset = dataset_of(source_of(tmp_path, rows), task)
    assert task.segments == 5
    cut = 0
    for n, (row, layout) in enumerate(zip(rows, dataset.layouts(np.arange(3)), strict=True)):
        tokens, types = as_in_ernie(row, most, 3)
        example = dataset.example(n, layout)
        many = len(tokens)
        assert example.input_ids[:many].tolist() == tokens
        assert example.token_type_ids[:many].tolist() == types
        assert not example.token_type_ids[many:].any()  # the reply is turn 0
        assert example.input_ids[many : many + 2].tolist() == [CLS, ids(row["target"])[0]]
        cut += len(as_in_ernie(row, 99, 3)[0]) > many
    assert (f"sources truncated: {cut}" in task.describe_rows(dataset.source, 64)) == (cut > 0)


def test_prompts_are_the_sources_of_examples(tmp_path: Path) -> None:
    source, task = source_of(tmp_path, ROWS), task_of(max_source=12, positions="restart")
    limits = GenerationLimits(length=64, segments=5)
    dataset = dataset_of(source, task)
    layouts = dataset.layouts(np.arange(3))
    for n, prompt in enumerate(task.prompts(np.arange(3), source, limits)):
        example, many = dataset.example(n, layouts[n]), len(prompt.source.input_ids)
        assert example.position_ids is not None and prompt.source.position_ids is not None
        assert (example.input_ids[:many] == prompt.source.input_ids).all()
        assert (example.token_type_ids[:many] == prompt.source.token_type_ids).all()
        assert (example.position_ids[:many] == prompt.source.position_ids).all()
    assert task.target_format(source.vocabulary, limits).token_type == 0
    assert task.cut_sources(source, limits) == 2


def test_cells_with_a_delimiter(tmp_path: Path) -> None:
    """As in ERNIE's files."""
    rows = [{**row, "turns": " __eou__ ".join(row["turns"])} for row in ROWS]
    source = source_of(tmp_path, rows, tag_delimiter=" __eou__ ")
    assert source.column("turns") == [row["turns"] for row in ROWS]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"source": "a", "target": "b"}, "has no column 'turns'"),
        ({"turns": [], "target": "b"}, "rows0.jsonl:1: a dialogue without turns"),
        ({"turns": 3, "target": "b"}, "turns is int, not a list"),
        ({"turns": ["a", 3.5, None], "target": "b"}, "turns is null, not text"),
    ],
)
def test_bad_rows(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        task_of().check(source_of(tmp_path, [row]), labeled=True)
