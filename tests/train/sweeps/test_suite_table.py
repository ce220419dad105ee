"""The table of a suite: median and spread, every metric in its own unit."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from palm_ds.train.sweeps.suite import run_all
from palm_ds.train.sweeps.suite_table import average, compare, markdown_table
from tests.train.sweeps.test_suite import made, training


def test_the_table_has_median_and_spread_of_the_final_weights(tmp_path):
    found = made(tmp_path)
    ends = {m.title: "best" for m in found if m.name == "a"}
    assert run_all(found, training(tmp_path, ends), [{}]) == {}
    text = compare(found, {}, tmp_path)
    assert text.splitlines() == [
        "| data set | metric   | median | lowest - highest |      n |",
        "| -------- | -------- | -----: | ---------------: | -----: |",
        "| a        | f1 %     |  20.00 |    10.00 - 30.00 | 3 of 3 |",  # of step 5, the best
        "|          | recall % |  50.00 |    50.00 - 50.00 | 3 of 3 |",
        "| b        | f1 %     |   5.00 |      5.00 - 5.00 | 3 of 3 |",  # of the last step
        "|          | recall % |  50.00 |    50.00 - 50.00 | 3 of 3 |",
        "| average  |          |  12.50 |                  |        |",
    ]
    record = json.loads((tmp_path / "suite.json").read_text())
    assert record["sets"]["a"]["tasks"]["names"]["f1"] == {
        "values": {"1": 0.1, "2": 0.2, "3": 0.3},
        "median": 0.2,
        "lowest": 0.1,
        "highest": 0.3,
        "n": 3,
    }
    assert record["average"] == pytest.approx(0.125)


def test_folds_have_a_mean_and_a_deviation(tmp_path):
    folds = [replace(run, name="b", seed=1, fold=run.seed) for run in made(tmp_path, "b")]
    found = [*made(tmp_path, "a", 1), *folds]
    ends = {m.title: "best" for m in found if m.fold != 2}
    assert run_all(found[:3], training(tmp_path, ends), [{}]) == {}
    text = compare(found, {}, tmp_path)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert rows[0] == ["data set", "metric", "mean ± s.d.", "median", "lowest - highest", "n"]
    assert [row for row in rows if "f1 %" in row] == [
        ["a", "f1 %", "-", "10.00", "10.00 - 10.00", "1 of 1"],
        ["b", "f1 %", "7.50 ± 3.54", "7.50", "5.00 - 10.00", "2 of 3"],
    ]
    record = json.loads((tmp_path / "suite.json").read_text())["sets"]["b"]
    assert (record["folds"], record["missing"]) == (3, ["1, fold 3"])
    f1 = record["tasks"]["names"]["f1"]
    assert f1["values"] == {"1, fold 1": 0.1, "1, fold 2": 0.05}
    assert f1["mean"] == pytest.approx(np.mean([0.1, 0.05]))
    assert f1["deviation"] == pytest.approx(np.std([0.1, 0.05], ddof=1))


def test_a_metric_that_the_evaluated_rows_do_not_define_has_no_value(tmp_path):
    found = made(tmp_path, "a", 2)
    for run, auc in zip(found, [None, 0.4], strict=True):
        run.folder.mkdir(parents=True)
        scores = {"names": {"accuracy": 0.1, "metrics": {"auc": auc, "pn_ratio": None}}}
        records = [dict(kind="evaluation", scores=scores), dict(kind="event", event="end")]
        lines = [json.dumps({"step": 5, **record}) + "\n" for record in records]
        (run.folder / "metrics.jsonl").write_text("".join(lines))
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in compare(found, {}, tmp_path).splitlines()[2:]
    ]
    assert rows == [
        ["a", "auc %", "40.00", "40.00 - 40.00", "1 of 2"],
        ["", "pn_ratio", "-", "- - -", "0 of 2"],
    ]
    record = json.loads((tmp_path / "suite.json").read_text())
    assert record["sets"]["a"]["tasks"]["names"]["auc"]["values"] == {"1": None, "2": 0.4}
    assert record["average"] == pytest.approx(0.4)


def of_set(task: str, **medians: float) -> dict[str, Any]:
    metrics = {k: {"median": x, "lowest": x, "highest": x, "n": 1} for k, x in medians.items()}
    return {"runs": 1, "failed": [], "missing": [], "tasks": {task: metrics}}


def test_no_average_before_every_data_set_has_a_score():
    nothing = {"runs": 2, "failed": [], "missing": [1, 2], "tasks": {}}
    assert average({"a": nothing}) is None
    assert "0 of 2" in markdown_table({"a": nothing, "b": nothing})


def test_a_squared_error_is_not_shown_times_100_nor_averaged_with_accuracies():
    similar = of_set("sts", pearson_and_spearman=0.9, mse=0.25)
    lines = markdown_table({"sts": similar}).splitlines()
    assert [line.split("|")[2:4] for line in lines[2:]] == [
        [" pearson_and_spearman % ", "  90.00 "],
        [" mse                    ", " 0.2500 "],
    ]
    mine = of_set("mine", minus_error=-1.5)
    assert "-1.5000" in markdown_table({"mine": mine})
    assert average({"sts": similar}) == pytest.approx(0.9)
    assert average({"sts": similar, "mine": mine}) is None


def test_further_evaluation_sets_do_not_count_in_the_average():
    scores = {"runs": 1, "failed": [], "missing": [], "tasks": {}}
    scores["tasks"] |= of_set("mnli", accuracy=0.8)["tasks"]
    scores["tasks"] |= of_set("mnli (mismatched)", accuracy=0.6)["tasks"]
    assert average({"mnli": scores}) == pytest.approx(0.8)
    lines = markdown_table({"mnli": scores}).splitlines()
    assert [line.split("|")[2].strip() for line in lines[2:]] == [
        "accuracy %",
        "mnli (mismatched) accuracy %",
    ]
