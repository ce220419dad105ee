"""launch/inspect_stream.py: rows as text, JSON, mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.helpers.saved_model import save_model
from tests.helpers.small_corpus import write_small_corpus


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspect")
    write_small_corpus(folder / "corpus", documents=60)
    values = {
        "backbone": {"preset": "tiny", "max_positions": 64},
        "length": 64,
        "batch": "24 rows",
        "sources": {"text": {"corpus": str(folder / "corpus")}},
        "held_out": 0.2,
        "tasks": {name: {"source": "text"} for name in ("knowledge_masking", "sentence_distance")},
        "stages": {"joint": ["knowledge_masking", "sentence_distance"], "steps": 4},
        "evaluate": {"examples": 30},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    return folder / "recipe.yaml"


def test_rows_and_their_summary(recipe: Path, enter) -> None:
    said = enter("inspect_stream", recipe, "length=32", "--step", 3, "--rows", 1)
    assert (said.code, said.err) == (0, "") and "\x1b" not in said.out
    assert said.out.startswith("row 1  ") and "\nrow 2  " not in said.out
    assert "step 3 of 8, stage 1: 24 rows of 32" in said.out
    alone = enter("inspect_stream", recipe, "length=32", "--step", 3, "--rows", 0)
    assert said.out.endswith(alone.out) and alone.out.startswith("step 3 of 8")


def test_json_is_one_object_per_sequence(recipe: Path, enter) -> None:
    said = enter("inspect_stream", recipe, "--json", "--held_out", "--rows", 1)
    records = [json.loads(line) for line in said.out.splitlines()]
    assert {record["task_group"] for record in records} == {
        "knowledge_masking",
        "sentence_distance",
    }
    names = {record["labels"]["sentence_distance"][0]["name"] for record in records[1:]}
    assert names <= {"adjacent", "same document", "other document"} and names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--held_out", "--step", "2"), "--held_out: shows the same rows at every step"),
        (("--step", "9"), "--step 9: the plan has steps 1 to 8"),
        (("--rows", "-1"), "--rows -1: expected the number of rows"),
        (("lenght=3",), 'lenght: unknown key; did you mean "length"'),
        (("sources.text.corpus=nowhere",), "corpus nowhere: no such folder"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    recipe: Path, enter, arguments: tuple[str, ...], message: str
) -> None:
    said = enter("inspect_stream", recipe, *arguments)
    assert (said.code, said.out) == (2, "") and message in said.err
    assert said.err.startswith("error: ") and said.err.count("\n") == 1


def test_a_recipe_without_an_encoder_uses_that_of_init_from(tmp_path: Path, enter) -> None:
    encoder = {
        "hidden_size": 16,
        "num_layers": 1,
        "num_heads": 2,
        "max_positions": 1024,
        "token_types": 1,
    }
    run = save_model(tmp_path / "run", ["mood"], backbone={**encoder, "task_types": 0})
    values = {
        "init_from": str(run / "weights"),
        "length": 600,
        "batch": "2 rows",
        "sources": {"texts": {"table": str(run / "texts.jsonl")}},
        "held_out": 0,
        "tasks": {"mood": {"kind": "classification", "source": "texts"}},
        "stages": [{"mood": 2}],
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    shown = enter("inspect_stream", tmp_path / "recipe.yaml", "--json")
    assert (shown.code, shown.err) == (0, "")
    records = [json.loads(line) for line in shown.out.splitlines()]
    assert {kind for record in records for kind in record["segments"]} == {0}
    assert {record["task_id"] for record in records} == {0}
    said = enter("inspect_stream", tmp_path / "recipe.yaml", "length=2000")
    assert said.code == 2 and "backbone.max_positions allows only 1024" in said.err
    said = enter("inspect_stream", tmp_path / "recipe.yaml", "init_from=nowhere/weights")
    assert said.code == 2 and "recipe.yaml: init_from: nowhere/weights: no such" in said.err
