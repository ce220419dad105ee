"""Tables of scores on a terminal of 100 columns: no name cut, no score parted from its number."""

from __future__ import annotations

import io
import math
import re

from rich.console import Console

from palm_ds.train.evaluate.evaluate import TaskScore
from palm_ds.train.report.score_tables import score_tables


def shown(scores: dict, width: int = 100) -> list[str]:
    text = io.StringIO()
    for table in score_tables(scores, "held out, step 90", width):
        Console(file=text, width=width).print(table)
    return [line.rstrip() for line in text.getvalue().splitlines()]


def test_a_task_with_a_long_name_has_one_line() -> None:
    score = {"loss": 6.3465, "baseline_loss": 6.4775, "perplexity": 12_570.5, "count": 101_311}
    score |= {"accuracy": 0.312, "standard_error": 0.116, "baseline_accuracy": 0.417}
    score |= {"standard_errors_above": -10.9}
    names = ("knowledge_masking", "sentence_reordering", "sentence_distance")
    lines = shown(dict.fromkeys(names, score))
    assert len(lines) == 5
    for name, line in zip(names, lines[2:], strict=True):
        assert line.split("  ")[0] == name and "31.2 % ± 11.6" in line and "101,311" in line


def test_a_terminal_of_80_columns_folds_no_name() -> None:
    score = {"loss": 6.3465, "baseline_loss": 6.4775, "perplexity": 12_570.5, "count": 101_311}
    score |= {"accuracy": 0.312, "standard_error": 0.116, "baseline_accuracy": 0.417}
    score |= {"standard_errors_above": -10.9}
    _, heads, line = shown({"sentence_reordering": score}, width=80)
    assert heads.split() == ["task", "loss", "baseline", "accuracy", "baseline", "difference"]
    expected = ["sentence_reordering", "6.3465", "6.4775", "31.2 % ± 11.6", "41.7 %", "-10.9 s.e."]
    assert re.split(r" {2,}", line) == expected
    assert "…" not in "".join(shown({"sentence_reordering": score}, width=60))


def test_lines_of_metrics_end_between_two_of_them() -> None:
    metrics = {name: 0.6 for name in ("f1", "precision", "recall", "accuracy")}
    score = {"metrics": metrics, "standard_error": 0.01, "loss": 1.0, "count": 16, "accuracy": 0.6}
    first, second = (
        line.partition("entities")[2] or line for line in shown({"entities": score})[2:]
    )
    assert first.strip().startswith("f1 0.600  precision 0.600  recall 0.600  ")
    assert second.strip() == "accuracy 0.600 ± 0.010"
    of_documents = shown({"entities": {**score, "accuracy": 0.4}})
    assert of_documents[-1].strip() == "accuracy 0.600"


def test_at_80_columns_no_metric_is_parted_from_its_number() -> None:
    metrics = {name: 1.0 for name in ("f1", "precision", "recall", "accuracy")}
    score = {"metrics": metrics, "standard_error": 0.0, "loss": 0.2963, "count": 432}
    lines = shown({"products": {**score, "accuracy": 1.0, "baseline_loss": 0.5222}}, width=80)
    assert max(map(len, lines)) <= 80
    assert [line[8:48].strip() for line in lines[2:]] == [
        "f1 1.000  precision 1.000",
        "recall 1.000  accuracy 1.000 ± 0.000",
    ]


def test_a_loss_without_accuracy_shows_neither_that_nor_a_perplexity() -> None:
    score = TaskScore(
        count=38, loss=0.0339, accuracy=math.nan, baseline_loss=0.1052, baseline_accuracy=math.nan
    )
    *_, line = shown({"masked_regions": score.record()})
    assert line.split() == ["masked_regions", "0.0339", "0.1052", "-", "-", "-", "38"]
