"""The forgetting table: the right evaluations, the best stage, and what was lost since."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path

import pytest
from rich.console import Console

from palm_ds.data.stream.curriculum_spec import read_stages
from palm_ds.train.report.forgetting import (
    StageEnd,
    change_cell,
    lines,
    stage_ends,
    tables,
    value_cell,
)
from palm_ds.train.report.metrics_file import Metrics, read_metrics
from palm_ds.train.report.run_log import RunLog

TASKS = ("words", "order", "distance")
PLAN = read_stages(
    [{"words": 10}, {"words": 5, "order + words": 15}, {"words": 5, "distance": 5}], TASKS
)
ENDS = [10, 30, 40]
# At the end of each stage; `order` is best after the second.
ACCURACY = {"words": [0.1, 0.2, 0.3], "order": [0.9, 0.6, 0.5], "distance": [0.3, 0.3, 0.5]}
LOSS = {"words": [6.0, 5.0, 4.0], "order": [2.0, 1.0, 1.5], "distance": [1.1, 1.2, 0.9]}


def scores(stage: int, *, off: float = 0.0) -> dict[str, dict[str, float]]:
    return {
        task: {
            "accuracy": ACCURACY[task][stage] + off,
            "loss": LOSS[task][stage] - off,
            "standard_error": 0.03 if stage == 1 else 0.04,
        }
        for task in TASKS
    }


def evaluation(step: int, *, off: float = 0.0, **more: object) -> dict:
    stage = PLAN.stage_at(step - 1)
    record = {"kind": "evaluation", "step": step, "stage": stage + 1}
    return record | {"scores": scores(max(stage, 0), off=off)} | more


def metrics_of(*evaluations: dict, steps: int = 40, ended: bool = True) -> Metrics:
    logged = [{"step": n, "stage": PLAN.stage_at(n - 1) + 1} for n in range(5, steps + 1, 5)]
    events = [{"event": "end", "step": steps}] if ended else []
    return Metrics(steps=logged, evaluations=list(evaluations), events=events)


WHOLE = [evaluation(step) for step in ENDS]


@pytest.mark.parametrize("curriculum", [PLAN, None], ids=["curriculum", "no curriculum"])
def test_the_ends_of_stages(curriculum) -> None:
    found = stage_ends(metrics_of(*WHOLE), curriculum)
    assert [(end.name, end.step) for end in found] == [
        ("stage 1", 10),
        ("stage 2", 30),
        ("stage 3", 40),
    ]
    assert [end.scores for end in found] == [scores(stage) for stage in range(3)]


@pytest.mark.parametrize("curriculum", [PLAN, None], ids=["curriculum", "no curriculum"])
def test_evaluations_in_the_middle_of_a_stage_are_ignored(curriculum) -> None:
    middle = [evaluation(step, off=0.07) for step in (4, 8, 12, 20, 28, 32, 36)]
    every = sorted([*WHOLE, *middle], key=lambda record: record["step"])
    assert stage_ends(metrics_of(*every), curriculum) == stage_ends(metrics_of(*WHOLE), curriculum)


@pytest.mark.parametrize("curriculum", [PLAN, None], ids=["curriculum", "no curriculum"])
def test_an_unfinished_stage_has_no_column(curriculum) -> None:
    going = metrics_of(*WHOLE[:2], evaluation(36), steps=35, ended=False)
    assert [end.step for end in stage_ends(going, curriculum)] == [10, 30]
    # Killed in the second stage, after an evaluation in its middle.
    early = metrics_of(WHOLE[0], evaluation(20), steps=20, ended=False)
    assert [end.step for end in stage_ends(early, curriculum)] == [10]


def test_a_damaged_line_leaves_a_gap_and_no_wrong_column() -> None:
    """The evaluation at the end of stage 2 is lost; the one in its middle does not replace it."""
    found = stage_ends(metrics_of(WHOLE[0], evaluation(20), WHOLE[2]), PLAN)
    assert [(end.name, end.step) for end in found] == [("stage 1", 10), ("stage 3", 40)]


@pytest.mark.parametrize("curriculum", [PLAN, None], ids=["curriculum", "no curriculum"])
def test_a_run_that_was_resumed_in_the_middle_of_a_stage(tmp_path: Path, curriculum) -> None:
    """Killed at 32 after an evaluation, resumed from a checkpoint at 25: the steps between are
    repeated with other scores, and only those count."""

    def log(start: int) -> RunLog:
        console = Console(file=io.StringIO())
        return RunLog(tmp_path, TASKS, total_steps=40, start=start, console=console)

    def until(run: RunLog, first: int, last: int, off: float) -> None:
        for step in range(first, last + 1):
            stage = PLAN.stage_at(step - 1) + 1
            run.step({"step": step, "stage": stage, "loss": {}, "accuracy": {}})
            if step in ENDS or step % 16 == 0:
                record = evaluation(step, off=off)
                run.evaluation(step, record["scores"], stage=stage, started=TASKS)

    with log(0) as run:
        until(run, 1, 32, off=0.05)
    with log(25) as run:
        run.event("resume", step=25)
        until(run, 26, 40, off=0.0)
        run.event("end")
    found = stage_ends(read_metrics(tmp_path / "metrics.jsonl"), curriculum)
    assert [end.step for end in found] == ENDS
    assert [end.scores["words"]["loss"] for end in found] == pytest.approx([5.95, 5.0, 4.0])


@pytest.mark.parametrize("curriculum", [PLAN, None], ids=["curriculum", "no curriculum"])
def test_a_rollback_and_a_second_evaluation_of_a_step(curriculum) -> None:
    """Steps keep counting after a rollback; if a step is evaluated twice, the later one counts."""
    metrics = metrics_of(WHOLE[0], evaluation(30, off=0.1), WHOLE[1], WHOLE[2])
    metrics.events.insert(0, {"event": "rollback", "step": 17})
    assert [end.scores for end in stage_ends(metrics, curriculum)] == [scores(k) for k in range(3)]


def test_the_best_stage_and_what_was_lost_since() -> None:
    words, order, distance = lines(stage_ends(metrics_of(*WHOLE), PLAN), "accuracy", TASKS)
    assert (words.best, words.change, words.error) == (2, 0.0, None)
    # 0.9 in stage 1 was luck: the task had not started.
    assert (order.best, order.trained) == (1, (False, True, True))
    assert order.change == pytest.approx(-0.1) and order.error == pytest.approx(0.05)
    assert not order.clearly_forgotten and distance.trained == (False, False, True)
    assert [value_cell(order, k, "accuracy") for k in range(3)] == ["(90.0 %)", "60.0 %*", "50.0 %"]
    assert change_cell(order, "accuracy") == "-10.0 ± 5.0"
    assert change_cell(words, "accuracy") == change_cell(distance, "accuracy") == "best"


def test_the_lowest_loss_is_best() -> None:
    words, order, _ = lines(stage_ends(metrics_of(*WHOLE), PLAN), "loss", TASKS)
    assert (words.best, order.best, order.change) == (2, 1, 0.5)
    assert value_cell(order, 1, "loss") == "1.0000*"
    assert change_cell(order, "loss") == "+0.5000" and change_cell(words, "loss") == "best"


def test_a_drop_of_more_than_two_standard_errors_is_significant() -> None:
    worse = [evaluation(40)]
    worse[0]["scores"]["order"]["accuracy"] = 0.49
    _, order, _ = lines(stage_ends(metrics_of(*WHOLE[:2], *worse), PLAN), "accuracy", TASKS)
    assert order.clearly_forgotten


def test_as_good_as_ever_is_the_best() -> None:
    same = [evaluation(40)]
    same[0]["scores"]["order"]["accuracy"] = 0.6
    _, order, _ = lines(stage_ends(metrics_of(*WHOLE[:2], *same), PLAN), "accuracy", TASKS)
    assert (order.best, change_cell(order, "accuracy")) == (2, "best")


def test_missing_and_non_finite_scores_are_a_dash() -> None:
    gaps = [evaluation(step) for step in ENDS]
    del gaps[0]["scores"]["order"]
    gaps[2]["scores"]["order"]["accuracy"] = math.nan
    gaps[2]["scores"]["words"]["accuracy"] = None
    for gap in gaps:
        gap["scores"]["new"] = {"loss": None}
    found = {line.task: line for line in lines(stage_ends(metrics_of(*gaps), PLAN), "accuracy")}
    order = [value_cell(found["order"], k, "accuracy") for k in range(3)]
    assert order == ["-", "60.0 %*", "-"] and change_cell(found["order"], "accuracy") == "best"
    assert value_cell(found["words"], 1, "accuracy") == "20.0 %*"
    assert change_cell(found["new"], "accuracy") == "-" and found["new"].best is None


def test_an_extending_run_shows_its_initial_scores() -> None:
    """Tasks of the old run had started before the first stage of this one."""
    for curriculum in (PLAN, None):
        ends = stage_ends(metrics_of(evaluation(0, stage=-1), *WHOLE), curriculum)
        assert [end.name for end in ends] == ["before", "stage 1", "stage 2", "stage 3"]
        order = lines(ends, "accuracy")[1]
        assert order.best == 1 and order.change == pytest.approx(-0.4) and all(order.trained)


def test_on_the_screen() -> None:
    console = Console(width=100, file=io.StringIO())
    for table in tables(stage_ends(metrics_of(*WHOLE), PLAN), ["order"]):
        console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    shown = [line.split() for line in text.splitlines()]
    assert shown[1] == "task stage 1 stage 2 stage 3 last - best".split()  # noqa: SIM905
    assert shown[2] == ["order", "(90.0", "%)", "60.0", "%*", "50.0", "%", "-10.0", "±", "5.0"]
    assert [line[0] for line in shown[2:5]] == ["order", "words", "distance"]
    assert shown[7] == ["order", "(2.0000)", "1.0000*", "1.5000", "+0.5000"]
    assert "\x1b" not in text


@pytest.mark.parametrize("width", [80, 60, 30])
def test_a_narrow_screen_has_the_stages_in_several_tables(width: int) -> None:
    names = ("knowledge_masking", "token_document_relation", "ir_relevance")
    score = {"accuracy": 0.3004, "standard_error": 0.01, "loss": 10.5}
    scores = {name: score for name in names}
    ends = [StageEnd(name=f"stage {n}", step=n, scores=scores) for n in range(1, 8)]
    console = Console(width=width, file=io.StringIO())
    for table in tables(ends, width=width):
        console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    heads = [line for line in text.splitlines() if line.startswith("task ")]
    found = re.findall(r"stage \d", " ".join(heads))
    assert found == 2 * [end.name for end in ends] and text.count("last -") == 2
    if width > 30:  # no name and no score is folded
        scored = re.findall(r"^(\w+)((?: +30\.0 %\*?)+)(?: +best)?$", text, re.M)
        assert [name for name, _ in scored] == [*names] * (len(heads) // 2)
        assert sum(cells.count("%") for _, cells in scored) == len(names) * len(ends)


def test_a_single_stage_has_no_table() -> None:
    assert not list(tables(stage_ends(metrics_of(WHOLE[0], steps=10), PLAN)))
    assert stage_ends(Metrics(), None) == stage_ends(Metrics(), PLAN) == []
    old = {"step": 10, "scores": scores(0)}  # written before evaluations carried their stage
    assert stage_ends(Metrics(evaluations=[old]), None) == []
