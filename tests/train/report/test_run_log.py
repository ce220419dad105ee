import io
import json
import time
import tracemalloc
from pathlib import Path

import pytest
from rich.console import Console

from palm_ds.data.stream.curriculum_spec import read_stages
from palm_ds.train.report.metrics_file import read_metrics, truncate_after
from palm_ds.train.report.run_log import RunLog, _short, clock

TASKS = ("knowledge_masking", "sentence_distance")


def record(step: int, loss: float = 2.0) -> dict:
    return {
        "step": step,
        "stage": 1,
        "lr": 1e-4,
        "loss": {"knowledge_masking": loss, "sentence_distance": 1.1},
        "accuracy": {"knowledge_masking": 0.25, "sentence_distance": 0.5},
        "grad_norm": 0.7,
        "tokens_per_second": 12345.6,
        "flops_per_second": 2.5e11,
        "data_wait": 0.02,
        "loss_scale": 1.0,
        "skipped": 0,
    }


SCORES = {
    "sentence_distance": {
        "loss": 0.9,
        "accuracy": 0.61,
        "baseline_loss": 1.0986,
        "baseline_accuracy": 1 / 3,
        "standard_error": 0.01,
        "standard_errors_above": 27.7,
        "perplexity": 2.46,
        "count": 2400,
    }
}


def open_log(folder: Path, *, terminal: bool = False, **more) -> tuple[RunLog, io.StringIO]:
    shown = io.StringIO()
    console = Console(file=shown, width=160, force_terminal=terminal, color_system=None)
    return RunLog(folder, TASKS, total_steps=100, console=console, **more), shown


def test_every_record_is_one_line_and_reads_back(tmp_path: Path) -> None:
    log, _ = open_log(tmp_path)
    with log:
        log.step(record(10))
        log.evaluation(10, SCORES, stage=1, started=TASKS)
        log.event("save", "checkpoint at step 10", folder="checkpoints/10")
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["loss"]["knowledge_masking"] for r in metrics.steps] == [2.0]
    assert metrics.evaluations[0]["scores"] == SCORES and metrics.evaluations[0]["stage"] == 1
    assert metrics.events[0]["event"] == "save" and metrics.events[0]["step"] == 10
    assert all(r["elapsed"] >= 0 for r in metrics.steps + metrics.evaluations + metrics.events)
    assert metrics.broken == []


def test_a_line_is_on_disk_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    log, _ = open_log(tmp_path)
    with log:
        log.step(record(1))
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_non_finite_numbers_are_null_for_json_readers(
    tmp_path: Path,
) -> None:
    log, shown = open_log(tmp_path)
    with log:
        log.step(record(1, loss=float("nan")) | {"grad_norm": float("inf")})
    line = (tmp_path / "metrics.jsonl").read_text()
    found = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert found["loss"]["knowledge_masking"] is None and found["grad_norm"] is None
    assert "nan" in shown.getvalue()


def test_the_end_of_a_run_with_several_stages_shows_forgetting(tmp_path: Path) -> None:
    curriculum = read_stages([{TASKS[0]: 10}, {TASKS[1]: 10}], TASKS)
    log, shown = open_log(tmp_path)
    with log:
        log.evaluation(10, SCORES, stage=1, started=TASKS)
        log.forgetting(curriculum)
        assert "last - best" not in shown.getvalue()
        worse = {"sentence_distance": SCORES["sentence_distance"] | {"accuracy": 0.5}}
        log.evaluation(20, worse, stage=2, started=TASKS)
        log.forgetting(curriculum)
    found = shown.getvalue().split("held-out accuracy after each stage")[1]
    assert "last - best" in found and "(61.0 %)" in found and "50.0 %*" in found


def test_a_resumed_run_has_no_duplicate_lines(tmp_path: Path) -> None:
    log, _ = open_log(tmp_path)
    with log:
        for step in range(1, 8):
            log.step(record(step))
        log.evaluation(5, SCORES, stage=1, started=TASKS)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 8, "lo')  # killed while writing
    log, _ = open_log(tmp_path, start=5)
    with log:
        for step in range(6, 9):
            log.step(record(step, loss=1.0))
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in metrics.steps] == list(range(1, 9))
    assert [r["loss"]["knowledge_masking"] for r in metrics.steps] == [2.0] * 5 + [1.0] * 3
    assert [r["step"] for r in metrics.evaluations] == [5] and metrics.broken == []


def test_an_evaluation_that_is_made_again_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [f'{{"kind": "{k}", "step": {n}}}\n' for n in (2, 4) for k in ("step", "evaluation")]
    path.write_text("".join(lines))
    truncate_after(path, 4)
    assert path.read_text() == "".join(lines)
    truncate_after(path, 4, evaluated=False)
    assert path.read_text() == "".join(lines[:3])


def test_the_memory_to_continue_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as file:
        for step in range(1, 2001):
            values = {"step": step, "elapsed": step, "note": "x" * 4000}
            file.write(json.dumps({"kind": "step", **values}) + "\n")
            if step % 1000 == 0:
                file.write(json.dumps({"kind": "evaluation", **values}) + "\n")
    tracemalloc.start()
    try:
        assert truncate_after(path, 1999) == 1999
        assert [x["step"] for x in read_metrics(path, steps=False).evaluations] == [1000]
        assert tracemalloc.get_traced_memory()[1] < path.stat().st_size / 8
    finally:
        tracemalloc.stop()
    assert read_metrics(path).steps[-1]["step"] == 1999


def test_elapsed_time_continues_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"kind": "step", "step": 3, "elapsed": 70.5}\n{"kind": "step", "step": 9, "elapsed": 99}\n'
    )
    assert truncate_after(path, 5) == 70.5
    log, _ = open_log(tmp_path, start=3)
    with log:
        assert 70.5 <= log.elapsed < 80
        log.step(record(4))
    assert read_metrics(path).steps[-1]["elapsed"] >= 70.5


@pytest.mark.parametrize(
    "damage",
    [
        b'{"kind": "step", "st',
        b"\x00\x00\x00\x00",
        b"\xff\xfe\x00",
        b"[1, 2]",
        b'{"step": 3}',
        b"",
        b"[" * 9999,
    ],
)
def test_a_broken_line_is_named_and_skipped(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "step", "step": 1}\n' + damage + b'\n{"kind": "step", "step": 2}\n')
    metrics = read_metrics(path)
    assert [r["step"] for r in metrics.steps] == [1, 2]
    assert len(metrics.broken) == 1 and "line 2 " in metrics.broken[0]


def test_without_a_terminal_a_step_is_one_plain_line(tmp_path: Path) -> None:
    log, shown = open_log(tmp_path)
    with log:
        log.step(record(10))
    (line,) = shown.getvalue().splitlines()
    assert line.startswith("step  10/100  knowledge_masking 2.0000  sentence_distance 1.1000")
    for part in ("stage 1", "lr 1.00e-04", "norm 0.70", "12,346 tokens/s", "250 GFLOP/s", "left"):
        assert part in line
    assert "scale" not in line and "skipped" not in line and "\x1b" not in line


def test_on_a_terminal_the_display_shows_progress_tasks_and_held_out_scores(tmp_path: Path) -> None:
    log, shown = open_log(tmp_path, terminal=True)
    with log:
        log.evaluation(20, SCORES, stage=1, started=TASKS)
        log.step(record(50))
        log.event("note", "a checkpoint [was] saved")
    text = shown.getvalue()
    assert "step 50 of 100" in text and "50.0 %" in text
    assert "61.0 % ± 1.0" in text and "33.3 %" in text and "+27.7 s.e." in text
    assert "a checkpoint [was] saved" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1, "the cursor comes back"


def test_the_display_that_stays_has_the_scores_of_the_last_evaluation(tmp_path: Path) -> None:
    log, shown = open_log(tmp_path, terminal=True)
    with log:
        log.step(record(100))
        log.evaluation(100, SCORES, stage=1, started=TASKS)
    rows = [line.split() for line in shown.getvalue().splitlines()]
    assert [row[4] for row in rows if row[:2] == ["sentence_distance", "1.1000"]][-1] == "0.9000"


def test_tables_show_only_tasks_that_have_started(tmp_path: Path) -> None:
    both = {"knowledge_masking": SCORES["sentence_distance"], **SCORES}
    log, shown = open_log(tmp_path, terminal=True)
    with log:
        log.evaluation(20, both, stage=1, started=["knowledge_masking"])
        log.step(record(50) | {"loss": {"knowledge_masking": 2.0}})
    assert "knowledge_masking" in shown.getvalue() and "distance" not in shown.getvalue()
    (written,) = read_metrics(tmp_path / "metrics.jsonl").evaluations
    assert written["scores"] == both and written["started"] == ["knowledge_masking"]


def test_tensorboard_hides_the_events_of_repeated_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, loss in ((0, 2.0), (5, 1.0)):
        log, _ = open_log(tmp_path, start=start)
        with log:
            for step in range(start + 1, 9):
                log.step(record(step, loss=loss))
            log.evaluation(8, SCORES, stage=1, started=TASKS)
        # TensorBoard reads files in the order of their names: the second of creation, and then a
        # number that counts the writers of this process and is compared as text (10 before 9).
        time.sleep(1.1)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    seen = [(e.step, e.value) for e in events.Scalars("loss/knowledge_masking")]
    assert seen == [(s, 2.0) for s in range(1, 6)] + [(s, 1.0) for s in range(6, 9)]
    assert events.Scalars("accuracy/sentence_distance/held_out")[-1].value == pytest.approx(0.61)
    assert [e.step for e in events.Scalars("run/lr")] == list(range(1, 9))


def test_a_run_that_begins_again_has_nothing_of_its_first_start(tmp_path: Path) -> None:
    """It was killed before its first checkpoint."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for loss in (2.0, 1.0):
        log, _ = open_log(tmp_path)
        with log:
            log.evaluation(0, SCORES, stage=0, started=TASKS)  # of the run that it extends
            log.event("stage", step=0, stage=1)
            for step in range(1, 4):
                log.step(record(step, loss=loss))
        time.sleep(1.1)  # TensorBoard reads files in the order of their second of creation
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in metrics.evaluations] == [0] and len(metrics.events) == 1
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    seen = [(e.step, e.value) for e in events.Scalars("loss/knowledge_masking")]
    assert seen == [(step, 1.0) for step in range(1, 4)]
    assert [e.step for e in events.Scalars("accuracy/sentence_distance/held_out")] == [0]


def test_without_tensorboard_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    log, shown = open_log(tmp_path)
    with log:
        log.step(record(1))
    assert "TensorBoard is not installed" in shown.getvalue().splitlines()[0]
    assert not (tmp_path / "tensorboard").exists()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 "),
        (950, "950 "),
        (1000, "1 k"),
        (1234567, "1.23 M"),
        (4.5e14, "450 T"),
        (2e19, "2e+04 P"),
    ],
)
def test_short_numbers(value: float, text: str) -> None:
    assert _short(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0:00"), (59.6, "1:00"), (61, "1:01"), (3725, "1:02:05")]
)
def testclock(seconds: float, text: str) -> None:
    assert clock(seconds) == text
