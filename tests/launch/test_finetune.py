"""launch/finetune.py from the outside: errors in one line, its output, the files it leaves."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from palm_ds.inference.inspect_stream import open_held_out, open_step
from palm_ds.train.recipe.recipe import make_recipe
from palm_ds.train.setup.build import build_stream
from palm_ds.train.setup.resolve import resolve
from palm_ds.train.setup.run_folder import table_summaries
from palm_ds.train.setup.sources import open_data
from tests.helpers.word_tables import write_table, write_texts, write_vocabulary


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finetune")
    write_vocabulary(folder)
    write_texts(folder / "a.tsv", 40)
    write_texts(folder / "b.tsv", 30, pairs=True)
    write_table(folder / "new.tsv", [["w1", "c0"], ["w2", "other"]], "text_a", "label")
    write_table(folder / "plain.tsv", [["w1"], ["w2"]], "text_a")
    write_table(folder / "empty.tsv", [], "text_a", "label")
    (folder / "broken.tsv").write_text("text_a\tlabel\nw1\tc0\nw2\tc1\tw3\n")
    return folder


def good(folder: Path) -> dict[str, Any]:
    return {
        "backbone": {"preset": "tiny", "max_positions": 32},
        "length": 32,
        "batch": "4 examples",
        "held_out": 0.0,
        "sources": {
            name: {
                "table": str(folder / f"{name}.tsv"),
                "validation": str(folder / f"{name}.tsv"),
                "tokenizer": str(folder / "vocab.txt"),
            }
            for name in "ab"
        },
        "tasks": {name: {"kind": "classification", "source": name} for name in "ab"},
        "stages": [{"a": "1 epochs", "b": "1 epochs", "mix": "step"}],
        "evaluate": {"best": "mean"},
        "export_onnx": [],
    }


NAN = float("nan")
WRONG: dict[str, tuple[str, Any, str]] = {
    "no such table": ("sources.a.table", "FOLDER/none.tsv", "none.tsv"),
    "a broken row": ("sources.a.table", "FOLDER/broken.tsv", "broken.tsv:3"),
    "an empty table": ("sources.a.table", "FOLDER/empty.tsv", "empty.tsv"),
    "a corpus and a table": ("sources.a.corpus", "x", "give one of `corpus: FOLDER`"),
    "no vocabulary": ("sources.a.tokenizer", "", "sources.a.tokenizer: missing"),
    "no such vocabulary": ("sources.a.tokenizer", "FOLDER/v.txt", "v.txt"),
    "a column that is not there": (
        "sources.a.read",
        {"columns": {"text_a": "sentence"}},
        "sentence",
    ),
    "an unknown role": ("sources.a.read", {"columns": {"text": "text_a"}}, "unknown role"),
    "an unknown key of tables": ("sources.a.read", {"colums": {}}, 'did you mean "columns"'),
    "validation that is not there": ("sources.a.validation", "FOLDER/none.tsv", "none.tsv"),
    "a label to evaluate on that is unknown": (
        "sources.a.validation",
        "FOLDER/new.tsv",
        "new.tsv:3: label: unknown label 'other'",
    ),
    "nothing to learn": ("sources.a.table", "FOLDER/plain.tsv", "no column 'label'"),
    "no label to evaluate on": ("sources.a.validation", "FOLDER/plain.tsv", "label"),
    "another kind of source": ("tasks.a.kind", "knowledge_masking", "reads a corpus"),
    "an unknown kind": ("tasks.a.kind", "clasification", 'did you mean "classification"'),
    "no kind": ("tasks.a.kind", None, "tasks.a"),
    "an unknown source": ("tasks.a.source", "c", "no 'c' in `sources`"),
    "an unknown key of a task": ("tasks.a.label", ["x"], 'did you mean "labels"'),
    "labels that are not all": ("tasks.a.labels", ["c0", "cx"], "unknown label 'c1'"),
    "a label twice": ("tasks.a.labels", ["c0", "c0"], "tasks.a.labels"),
    "a length beyond the rows": ("tasks.a.max_length", 33, "33 tokens, but rows hold 32"),
    "a length that is none": ("tasks.a.max_length", 2, "at least 8"),
    "texts that are not there": ("tasks.a.texts", ["text_b"], "no column 'text_b'"),
    "a shared head of nobody": ("tasks.a.share", "c", "no 'c' in `tasks`"),
    "a dropout of all": (
        "tasks.a.dropout",
        1.5,
        "tasks.a.dropout: expected a number below 1, got 1.5",
    ),
    "a weight below nothing": ("tasks.a.weight", -1, "tasks.a.weight: expected 0 or more, got -1"),
    "a rate below nothing": (
        "tasks.a.head_lr",
        -1e-4,
        "tasks.a.head_lr: expected 0 or more, got -0.0001",
    ),
    "a weight that is no number": ("tasks.a.weight", NAN, "weight: expected a finite number"),
    "a rate without end": ("optimizer", {"lr": -NAN}, "optimizer.lr: expected a finite number"),
    "a warm-up that is no number": (
        "schedule",
        {"warmup": NAN},
        "warmup: 'nan' is neither a number nor `N tokens`",
    ),
    "an encoder larger than any memory": (
        "backbone",
        {"hidden_size": 10**12, "num_heads": 1, "max_positions": 32},
        "hidden_size 1,000,000,000,000, num_layers 12: does not fit into memory",
    ),
    "more examples than fit anywhere": ("tasks.a.batch", 10**12, "expected at most 10,000,000"),
    "a step larger than any": ("batch", "1000000000000 examples", "at most 10,000,000"),
    "a batch without a unit": ("batch", "4", "`32 examples`"),
    "a batch that is a number": ("batch", 4, "batch: "),
    "an empty batch": ("batch", "0 examples", "batch"),
    "a length beyond the positions": ("length", 64, "backbone.max_positions allows only 32"),
    "tokens of examples": (
        "stages",
        {"joint": ["a"], "steps": "900 tokens"},
        "stages: counted in tokens, but `batch` is in examples",
    ),
    "a ratio without a step": (
        "stages",
        {"joint": ["a", "b"], "sampler": {"mix_ratio": {"b": 0.01}, "reference": "a"}},
        "'b' would get 1 epochs x ratio 0.01 x 10 steps",
    ),
    "a reference that is none": (
        "stages",
        {"joint": ["a", "b"], "sampler": {"mix_ratio": {}, "reference": "c"}},
        "c",
    ),
    "texts of two tables in one": ("stages", [{"a + b": 3}], "read different sources"),
    "a batch of nothing": ("batch", 32, "or `32 examples`, got '32'"),
    "the best of a task that is none": ("evaluate.best", "c.f1", "neither `mean` nor"),
    "a freeze of nothing": (
        "optimizer",
        {"freeze": ["backbone.layer.*"]},
        "no parameter matches",
    ),
    "patience for nothing": ("evaluate", {"patience": 3}, "evaluate.patience: needs `best`"),
}
TOGETHER: dict[str, tuple[dict[str, Any], str]] = {
    "a rest in steps of many tasks": (
        {"tasks.a.freeze": ["backbone.*"], "stages": [{"a": 3, "b": 3}]},
        "tasks.a.freeze: its stages need `mix: step` or `turns`",
    ),
    "a batch of rows and one of examples": (
        {"batch": "4 rows", "tasks.a.batch": 3},
        "tasks.a.batch: needs the recipe's `batch` in examples",
    ),
    "the best of helpers": (
        {"tasks.a.auxiliary": True, "tasks.b.auxiliary": True},
        "evaluate.best: no non-auxiliary task has rows to evaluate on",
    ),
    "the best of no rows": (
        {"evaluate.best": "a.f1", "sources.a.validation": ""},
        "evaluate.best: no rows to evaluate 'a' on",
    ),
    "a rate for a head of another": (
        {"tasks.b.share": "a", "tasks.b.head_lr": 1.0e-3},
        "tasks.b.head_lr: its head belongs to tasks.a; set it there",
    ),
    "other labels in a head of another": (
        {"tasks.b.share": "a", "tasks.b.labels": ["c1", "c0"]},
        "tasks.b.labels: differ from those of tasks.a",
    ),
}


def changed(folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    values = copy.deepcopy(good(folder))
    for key, value in changes.items():
        *parents, last = key.split(".")
        at = values
        for parent in parents:
            at = at[parent]
        at[last] = value.replace("FOLDER", str(folder)) if isinstance(value, str) else value
    return values


def enter_recipe(enter, root: Path, tmp_path: Path, values: dict[str, Any], *more: str) -> Any:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(values, sort_keys=False))
    ds_config = ("--deepspeed_config", root / "ds_configs/cpu.json")
    return enter("finetune", recipe, *ds_config, "--run_dir", tmp_path / "run", *more)


@pytest.mark.parametrize("case", [*WRONG, *TOGETHER])
def test_a_wrong_recipe_is_one_line(case, folder, tmp_path, root, enter) -> None:
    if case in WRONG:
        key, value, expected = WRONG[case]
        changes = {key: value}
    else:
        changes, expected = TOGETHER[case]
    said = enter_recipe(enter, root, tmp_path, changed(folder, changes), "--check")
    assert said.code == 2, said
    assert said.err.startswith("error: ") and said.err.count("\n") == 1, said.err
    assert expected in said.err, said.err
    assert not (tmp_path / "run").exists()


def test_an_unknown_metric_is_an_error_before_training(folder, tmp_path, root, enter) -> None:
    said = enter_recipe(enter, root, tmp_path, changed(folder, {"evaluate.best": "a.f2"}))
    assert said.code == 2 and "step " not in said.out, said
    assert "evaluate.best: a has no 'f2'; known: accuracy, auc, f1, loss, matthews" in said.err


def test_scores_on_very_few_rows_get_a_warning(folder, tmp_path, root, enter) -> None:
    few = {"sources.a.validation": "", "held_out": 0.2, "evaluate": {}}
    said = enter_recipe(enter, root, tmp_path, changed(folder, few), "--check")
    assert said.code == 0 and "rows are held out (held_out: 0.2), too few to score on" in said.out


def test_print_config_shows_everything_without_training(folder, tmp_path, root, enter) -> None:
    """--print_config gives an equivalent recipe with its labels and steps filled in."""
    said = enter_recipe(enter, root, tmp_path, good(folder), "--print_config")
    assert said.code == 0 and not (tmp_path / "run").exists()
    shown = yaml.safe_load(said.out[: said.out.index("\n\n")])
    assert shown["tasks"]["a"]["labels"] == ["c0", "c1"]
    assert shown["stages"] == [{"a": 10, "b": 8, "mix": "step"}]
    recipe = tmp_path / "bare.yaml"
    recipe.write_text(yaml.safe_dump(good(folder)))
    bare = enter("finetune", recipe, "--print_config")
    assert said.out.startswith(bare.out) and "train_batch_size" in said.out[len(bare.out) :]
    again = make_recipe(shown, "shown")
    assert resolve(again).fingerprint == resolve(make_recipe(good(folder), "good")).fingerprint


def test_tables_are_described_before_training(folder) -> None:
    """Rows, labels, the number of truncated rows, what the reader skipped."""
    changes = {"tasks.a.max_length": 12, "sources.a.read": {"bad_rows": "skip"}}
    recipe = make_recipe(changed(folder, changes), "recipe")
    data = open_data(recipe)
    recipe = resolve(recipe, data)
    first, second = table_summaries(build_stream(recipe, data))
    source = data.train["a"][0][1]
    cut = int((source.encoded("text_a").lengths > 10).sum())
    assert 0 < cut < 40
    counts = [source.column("label").count(label) for label in ("c0", "c1")]
    assert first == f"a: 40 rows; c0 {counts[0]}, c1 {counts[1]}; {cut} truncated to 12 tokens"
    assert second.startswith("b: 30 rows; c0 ")


def test_skipped_rows_of_a_table_are_reported(folder) -> None:
    read = {"bad_rows": "skip"}
    changes = {"sources.a.table": "FOLDER/broken.tsv", "sources.a.read": read}
    recipe = make_recipe(changed(folder, changes | {"tasks.a.labels": ["c0", "c1"]}), "recipe")
    data = open_data(recipe)
    lines = table_summaries(build_stream(resolve(recipe, data), data))
    assert any("bad row, skipped" in line and "broken.tsv:3" in line for line in lines)


def test_the_rows_of_a_step_can_be_inspected(folder) -> None:
    recipe = make_recipe(good(folder), "recipe")
    view = open_step(recipe, 1, rows=1)
    assert sum(len(row) for row in view.rows) == 4  # a step is four examples
    held = open_held_out(recipe, rows=1)
    assert sum(len(row) for row in held.rows) == 70
