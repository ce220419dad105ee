"""The sources of a recipe: opened once, or read in two ways."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from palm_ds.common.errors import UserError
from palm_ds.data.sources.folds import FoldSettings
from palm_ds.runtime.deepspeed.ds_config import DSConfig
from palm_ds.train.recipe.recipe import make_recipe
from palm_ds.train.recipe.sections import EvaluateSettings
from palm_ds.train.setup.run_folder import RunSpec, check_folder, write_folder
from palm_ds.train.setup.sources import Data, open_data
from palm_ds.train.startup_notes import evaluation_notes, trained_on_warnings
from tests.helpers.small_corpus import write_small_corpus
from tests.helpers.small_tables import TINY, write_tables


def spec(folder: Path) -> RunSpec:
    """A run whose evaluation set `odd` takes its labels from another column of dev.tsv."""
    table = str(folder / "dev.tsv")
    values = {
        "backbone": TINY,
        "length": 32,
        "batch": "4 examples",
        "sources": {
            "texts": {
                "table": str(folder / "train.tsv"),
                "validation": table,
                "tokenizer": str(folder / "vocab.txt"),
                "evaluation_sets": {
                    "same": {"table": table},
                    "odd": {"table": table, "read": {"columns": {"label": "text_a"}}},
                },
            }
        },
        "tasks": {"first": {"kind": "classification", "source": "texts", "labels": ["no", "yes"]}},
        "stages": [{"first": 2}],
    }
    ds_config = DSConfig(path="", sections={}, stage=0, precision="fp32")
    return RunSpec(recipe=make_recipe(values), ds_config=ds_config, folder=folder / "run")


def labels(data: Data, name: str) -> set[str]:
    ((_, rows, _),) = data.evaluation_sets[name]["texts"]
    return set(rows.table.column("label"))


def test_one_file_can_be_read_differently_by_each_set(tmp_path: Path) -> None:
    data = open_data(spec(write_tables(tmp_path)).recipe)
    assert labels(data, "same") == {"no", "yes"}
    assert all(label.startswith("w") for label in labels(data, "odd"))
    dev = str(tmp_path / "dev.tsv")
    odd = f"{dev} (sources.texts.evaluation_sets.odd)"
    assert list(data.tables) == [str(tmp_path / "train.tsv"), dev, odd]
    assert data.tables[dev].fingerprint != data.tables[odd].fingerprint


def test_an_older_run_folder_with_one_reading_is_resumable(tmp_path: Path) -> None:
    run = spec(write_tables(tmp_path))
    data = open_data(run.recipe)
    write_folder(run, {}, data)
    stored = yaml.safe_load((run.folder / "recipe.yaml").read_text())
    assert stored["corpora"].popitem()[0].endswith("odd)")
    (run.folder / "recipe.yaml").write_text(yaml.safe_dump(stored))
    check_folder(run, data)

    (tmp_path / "dev.tsv").write_text("label\ttext_a\nno\tw1\n")
    with pytest.raises(UserError, match=r"the contents of .*dev\.tsv"):
        check_folder(run, open_data(run.recipe))


def test_notes_on_the_labels_of_evaluation_rows_name_them(tmp_path: Path) -> None:
    run = spec(write_tables(tmp_path))
    (odd,) = evaluation_notes(run.recipe, open_data(run.recipe))
    assert odd.startswith("texts (odd): first: labels: 24 classes in 24 rows")
    values = run.recipe.resolved()
    values["tasks"] = {"first": {"kind": "ranking", "source": "texts"}}
    (tmp_path / "train.tsv").write_text("label\ttext_a\ttext_b\n1\tw1\tw2\n0\tw1\tw3\n")
    (tmp_path / "dev.tsv").write_text("label\ttext_a\ttext_b\n0\tw1\tw2\n0\tw1\tw3\n")
    del values["sources"]["texts"]["evaluation_sets"]["odd"]
    recipe = make_recipe(values)
    notes = evaluation_notes(recipe, open_data(recipe))
    assert [note.partition(": first: labels: no candidate is relevant")[0] for note in notes] == [
        "texts (validation)",
        "texts (same)",
    ]


def test_a_table_is_evaluated_in_full_or_on_as_many_rows_as_the_recipe_says(tmp_path: Path) -> None:
    run = spec(write_tables(tmp_path, dev=24))
    assert sizes(open_data(run.recipe)) == [24, 24, 24]
    for most, expected in ((5, [5, 5, 5]), (0, [0, 0, 0]), (100, [24, 24, 24])):
        few = replace(run.recipe, evaluate=EvaluateSettings(examples=most))
        assert sizes(open_data(few)) == expected
    five = replace(run.recipe, evaluate=EvaluateSettings(examples=5))
    ((_, rows, _),) = open_data(five).held_out["texts"]
    ((_, again, _),) = open_data(replace(five, seed=9)).held_out["texts"]
    assert rows.numbers.tolist() == again.numbers.tolist() != list(range(5))
    assert len(open_data(five).train["texts"][0][1]) == 48


def sizes(data: Data) -> list[int]:
    """Rows of the validation table and of each evaluation set."""
    sides = [data.held_out, *data.evaluation_sets.values()]
    return [len(source) for side in sides for _, source, _ in side["texts"]]


def test_the_candidates_of_a_ranking_stay_together(tmp_path: Path) -> None:
    lines = [f"{n % 2}\tq{n // 4}\tw{n}" for n in range(48)]
    folder = write_tables(tmp_path)
    (folder / "dev.tsv").write_text("\n".join(["label\ttext_a\ttext_b", *lines]) + "\n")
    source = {"table": str(folder / "dev.tsv"), "validation": str(folder / "dev.tsv")}
    values = {
        "backbone": TINY,
        "length": 32,
        "batch": "4 examples",
        "sources": {"pairs": {**source, "tokenizer": str(folder / "vocab.txt")}},
        "tasks": {"rank": {"kind": "ranking", "source": "pairs"}},
        "stages": [{"rank": 2}],
        "evaluate": {"examples": 10},
    }
    ((_, rows, _),) = open_data(make_recipe(values)).held_out["pairs"]
    groups = rows.column("text_a")
    assert len(groups) == 12 and all(groups.count(group) == 4 for group in groups)

    del values["sources"]["pairs"]["validation"]
    data = open_data(make_recipe(values | {"held_out": 0.3, "evaluate": {}}))
    ((_, training, _),), ((_, held, _),) = data.train["pairs"], data.held_out["pairs"]
    assert len(held) and len(training) + len(held) == 48
    assert not {*training.column("text_a")} & {*held.column("text_a")}


@pytest.mark.parametrize("kind", ["retrieval", "sparse_retrieval"])
def test_the_rows_of_a_query_stay_together(tmp_path: Path, kind: str) -> None:
    """Else it would be trained on with one positive, and searched for another. Further texts to
    search in are rows of their own."""
    folder = write_tables(tmp_path)
    rows = [{"query": f"w{n // 4} w9", "positive": f"w{n}"} for n in range(40)]
    rows += [{"query": None, "positive": f"w{n} w1"} for n in range(40)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"table": str(folder / "pairs.jsonl"), "tokenizer": str(folder / "vocab.txt")}
    values = {
        "backbone": TINY,
        "length": 32,
        "batch": "4 examples",
        "held_out": 0.3,
        "sources": {"pairs": source},
        "tasks": {"find": {"kind": kind, "source": "pairs"}},
        "stages": [{"find": 2}],
    }

    def split() -> list[list[str | None]]:
        data = open_data(make_recipe(values))
        return [side["pairs"][0][1].column("query") for side in (data.train, data.held_out)]

    training, held = split()
    assert {*training} & {*held} == {None}
    assert 5 < held.count(None) < 20 and 0 < len({*held} - {None}) < 8
    source["folds"] = {"count": 4, "held_out": 1}
    training, held = split()
    assert {*training} & {*held} == {None} and len(held) == 20


def warnings(sources: dict[str, Any]) -> list[str]:
    """Of a recipe that masks words of the first source."""
    values = {
        "backbone": TINY,
        "length": 32,
        "batch": "4 rows",
        "held_out": 0.2,
        "sources": sources,
        "tasks": {"knowledge_masking": {"source": next(iter(sources))}},
        "stages": [{"knowledge_masking": 2}],
    }
    recipe = make_recipe(values)
    return trained_on_warnings(recipe, open_data(recipe))


def test_a_corpus_that_is_evaluated_on_and_trained_on_is_named(tmp_path: Path) -> None:
    corpus, copy = tmp_path / "corpus", tmp_path / "copy"
    write_small_corpus(corpus)
    shutil.copytree(corpus, copy)
    assert warnings({"text": {"corpus": str(corpus)}}) == []
    (line,) = warnings({"text": {"corpus": str(corpus), "validation": str(copy)}})
    assert line == (
        f"sources.text.validation: {copy} is evaluated on and trained on ({corpus}): its scores "
        "say nothing about new texts"
    )
    other = {"corpus": str(corpus), "validation": str(tmp_path / "other")}
    write_small_corpus(tmp_path / "other", seed=2)
    assert warnings({"text": other}) == []
    (line,) = warnings({"text": {"corpus": str(corpus)}, "whole": other})
    assert line.startswith(f"sources.text: {corpus} is evaluated on and trained on ({corpus})")


def test_a_corpus_of_copies_is_named(tmp_path: Path) -> None:
    write_small_corpus(tmp_path / "corpus", copies=2)
    (line,) = warnings({"text": {"corpus": str(tmp_path / "corpus")}})
    assert "every held-out document of" in line and "prepare it with --dedup" in line


def test_a_table_that_is_evaluated_on_and_trained_on_is_named(tmp_path: Path) -> None:
    run = spec(write_tables(tmp_path))
    of_all = "is evaluated on and trained on"
    assert not any(
        of_all in line for line in trained_on_warnings(run.recipe, open_data(run.recipe))
    )
    values = run.recipe.resolved()
    values["sources"]["texts"]["validation"] = values["sources"]["texts"]["table"]
    recipe = make_recipe(values)
    (line,) = (x for x in trained_on_warnings(recipe, open_data(recipe)) if of_all in x)
    assert line.startswith(f"sources.texts.validation: texts {of_all} (texts)")


def test_rows_that_are_evaluated_on_and_trained_on_are_counted(tmp_path: Path) -> None:
    run = spec(write_tables(tmp_path))
    values = run.recipe.resolved()
    source = values["sources"]["texts"]
    table, dev = tmp_path / "train.jsonl", tmp_path / "dev.jsonl"
    rows = [{"id": i, "text_a": f"w{i}", "label": "yes"} for i in range(60)]
    table.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {**rows[4], "id": 99}]))
    again = [{**rows[n], "id": 200 + n, "label": label} for n, label in ((7, "yes"), (9, "no"))]
    new = {"id": 300, "text_a": "w1 w2", "label": "yes"}
    dev.write_text("".join(json.dumps(row) + "\n" for row in [new, *again]))

    def notes() -> list[str]:
        recipe = make_recipe(values)
        return trained_on_warnings(recipe, open_data(recipe))

    source |= {"table": str(table), "validation": str(dev), "evaluation_sets": {}}
    assert notes() == [
        "sources.texts.validation: 2 of 3 rows to evaluate on have the same texts as rows to train "
        f"on; the first: {dev}:2"
    ]
    dev.write_text(json.dumps(new) + "\n")
    assert notes() == []
    table.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *rows]))
    del source["validation"]
    values["held_out"] = 0.5
    (note,) = notes()
    assert note.startswith("sources.texts: ") and f"the first: {table}:" in note


# Folds ------------------------------------------------------------------------------------------


def folded(folder: Path, **folds: Any) -> Data:
    recipe = spec(folder).recipe
    source = replace(
        recipe.sources["texts"],
        validation="",
        evaluation_sets={},
        folds=FoldSettings(count=3, **folds),
    )
    return open_data(replace(recipe, sources={"texts": source}))


def test_each_fold_is_held_out_once_with_its_share_of_the_classes(tmp_path: Path) -> None:
    folder = write_tables(tmp_path)
    held: list[int] = []
    for number in (1, 2, 3):
        data = folded(folder, held_out=number)
        ((_, training, _),), ((_, rows, _),) = data.train["texts"], data.held_out["texts"]
        assert sorted([*training.numbers, *rows.numbers]) == list(range(len(training.table)))
        shares = [np.mean([x == "yes" for x in side.column("label")]) for side in (training, rows)]
        assert shares[0] == pytest.approx(shares[1], abs=2 / len(rows))
        held += rows.numbers.tolist()
    assert sorted(held) == list(range(len(held)))


def test_a_missing_column_of_groups_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"sources.texts.folds.group: texts has no column 'qid'"):
        folded(write_tables(tmp_path), held_out=1, group="qid")
