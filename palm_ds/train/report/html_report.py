"""report.html: what a run learned and how it ran, in one self-contained file.

It is made from the run folder alone (metrics.jsonl, recipe.yaml, ds_config.json,
environment.json), at any time: also while the run trains, or after it was killed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from palm_ds.common.atomic import write_file_atomically
from palm_ds.common.config import load_yaml
from palm_ds.common.errors import UserError, first_line
from palm_ds.common.messages import without_secrets
from palm_ds.data.stream.curriculum_spec import read_stages
from palm_ds.data.stream.stages import Curriculum
from palm_ds.train.report.charts import figure, metrics_panel, run_panel, series, task_panel
from palm_ds.train.report.forgetting import Measure, change_cell, lines, stage_ends, value_cell
from palm_ds.train.report.html_page import page, score_tables, table_of, text_of
from palm_ds.train.report.metrics_file import FILE, Metrics, read_metrics, task_of
from palm_ds.train.report.run_log import clock
from palm_ds.train.report.score_tables import metrics_text, number


@dataclass(frozen=True)
class Story:
    """The contents of a run folder; `notes` are shown at the top of the page."""

    name: str
    metrics: Metrics
    recipe: Mapping[str, Any]
    ds_config: Mapping[str, Any]
    environment: Mapping[str, Any]
    curriculum: Curriculum | None
    notes: Sequence[str] = field(default_factory=list)

    @property
    def tasks(self) -> list[str]:
        """The tasks that have started, as far as they have losses or scores, in the recipe's order,
        then by first appearance."""
        seen = [task for record in self.metrics.steps for task in record.get("loss") or {}]
        for record in self.metrics.evaluations:
            titles, started = list(record.get("scores") or {}), record.get("started")
            seen += [title for title in titles if started is None or task_of(title) in started]
        tasks = self.recipe.get("tasks")
        order = list(tasks) if isinstance(tasks, Mapping) else []
        names = dict.fromkeys(seen)
        return [t for t in order if t in names] + [t for t in names if t not in order]


def write_report(folder: str | Path) -> Path:
    """Write `folder`/report.html. Raises UserError if there is no metrics.jsonl."""
    story = _read(Path(folder))
    path = Path(folder) / "report.html"
    write_file_atomically(path, _page(story))
    return path


# Reading ---------------------------------------------------------------------------------------


def _runs_in(folder: Path) -> str:
    """A hint to the run folders in that of a sweep, a suite or an ablation, and to their table."""
    runs = sorted(str(path.parent) for path in folder.glob(f"*/{FILE}"))
    if not runs:
        return ""
    tables = [folder / f"{name}.md" for name in ("sweep", "suite", "ablation")]
    compared = [f", which {table} compares" for table in tables if table.is_file()]
    return f"; runs are in it, such as {runs[0]}{''.join(compared)}"


def _read(folder: Path) -> Story:
    if not (folder / FILE).is_file():
        raise UserError(f"{folder}: not a run folder, it has no {FILE}{_runs_in(folder)}")
    metrics = read_metrics(folder / FILE)
    notes = list(metrics.broken)
    notes += [event["message"] for event in metrics.events if event.get("event") == "unlabelled"]
    recipe = _mapping(folder / "recipe.yaml", load_yaml, notes)
    curriculum = None
    if recipe.get("stages"):
        try:
            curriculum = read_stages(recipe["stages"], list(recipe.get("tasks") or {}))
        except UserError as error:
            notes.append(f"recipe.yaml: {error}")
    return Story(
        name="/".join(folder.resolve().parts[-2:]),
        metrics=metrics,
        recipe=recipe,
        ds_config=_mapping(folder / "ds_config.json", json.loads, notes),
        environment=_mapping(folder / "environment.json", json.loads, notes),
        curriculum=curriculum,
        notes=notes,
    )


def _mapping(path: Path, parse: Callable[[str], Any], notes: list[str]) -> Mapping[str, Any]:
    try:
        values = parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.append(f"{path.name} is missing")
        return {}
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        notes.append(f"{path.name} cannot be read: {first_line(error)}")
        return {}
    return values if isinstance(values, Mapping) else {}


# The page --------------------------------------------------------------------------------------


def _page(story: Story) -> str:
    notes = "".join(f'<p class="note">{text_of(note)}</p>' for note in story.notes)
    parts = [
        f"<h1>{text_of(story.name)}</h1><p class='lead'>{text_of(_summary(story))}</p>{notes}",
        _held_out(story),
        _forgetting(story),
        _curves(story),
        _plan(story),
        _running(story),
        _environment(story),
        _details("Events", "\n".join(_event_line(event) for event in story.metrics.events)),
        _details("Recipe", _yaml(story.recipe)),
        _details("DeepSpeed", json.dumps(story.ds_config, indent=2) if story.ds_config else ""),
    ]
    return page(story.name, parts)


def _summary(story: Story) -> str:
    steps = story.metrics.steps
    if not steps:
        return "No step was logged yet."
    last = steps[-1]
    total = f" of {story.curriculum.steps:,}" if story.curriculum else ""
    parts = [f"step {last['step']:,}{total}", f"{clock(last.get('elapsed') or 0)} of running"]
    speed = series(steps, "tokens_per_second")[1]
    if len(speed):
        parts.append(f"{np.median(speed):,.0f} real tokens a second (median)")
    return ", ".join(parts)


def _held_out(story: Story) -> str:
    """The scores of the final weights, with standard errors."""
    last = _last_scores(story)
    by_metrics = {task: score for task, score in last.items() if score[1].get("metrics")}
    rows = [_score_row(task, *last[task]) for task in last if task not in by_metrics]
    return "\n".join(
        part for part in (_metric_scores(by_metrics), _loss_scores(rows), _details_of(by_metrics))
    )


def _last_scores(story: Story) -> dict[str, tuple[int, Mapping[str, Any]]]:
    """{task: (step, score)} of the evaluation whose weights the run ended with: the best, where it
    chose one, else the last that each task was in."""
    chosen = [e["of_step"] for e in story.metrics.events if e.get("event") == "chosen"]
    last: dict[str, tuple[int, Mapping[str, Any]]] = {}
    for record in story.metrics.evaluations:
        for task, score in (record.get("scores") or {}).items():
            if not chosen or record["step"] <= chosen[-1]:
                last[task] = (record["step"], score)
    return {task: last[task] for task in story.tasks if task in last}


def _metric_scores(scores: Mapping[str, tuple[int, Mapping[str, Any]]]) -> str:
    if not scores:
        return ""
    rows = [
        [
            text_of(task),
            text_of(metrics_text(score)),
            f"{step:,}",
            number(score.get("loss")),
            number(score.get("baseline_loss")),
            number(score.get("count"), ",.0f"),
        ]
        for task, (step, score) in scores.items()
    ]
    table = table_of(["task", "scores", "step", "loss", "baseline", "labels"], rows, numbers_from=2)
    return (
        "<h2>Scores</h2>" + table + "<p class='key'>On the validation rows. Baseline: the loss "
        "of predictions that ignore the text. ± is one standard error.</p>"
    )


def _details_of(scores: Mapping[str, tuple[int, Mapping[str, Any]]]) -> str:
    """The tables of the tasks, such as confusion matrices."""
    return "\n".join(
        score_tables(task, score.get("tables") or {}) for task, (_, score) in scores.items()
    )


def _loss_scores(rows: list[list[str]]) -> str:
    if not rows:
        return ""
    heads = ["task", "step", "loss", "baseline", "perplexity", "accuracy", "baseline", "difference"]
    table = table_of([*heads, "labels"], rows, numbers_from=1)
    return (
        "<h2>Held-out documents</h2>" + table + "<p class='key'>Baseline: predictions that ignore "
        "the text, such as token frequencies for masked words (unigram baseline) and a uniform or "
        "majority class. ± is one standard error; difference: accuracy minus baseline, in standard "
        "errors.</p>"
    )


def _score_row(task: str, step: int, score: Mapping[str, Any]) -> list[str]:
    above = score.get("standard_errors_above")
    errors = number(above, "+,.1f")
    sure = f"<span class='good'>{errors}</span>" if above and above > 5 else errors
    error = score.get("standard_error")
    plus_minus = "" if error is None or math.isnan(error) else f" ± {100 * error:.2f}"
    return [
        text_of(task),
        f"{step:,}",
        number(score.get("loss")),
        number(score.get("baseline_loss")),
        number(score.get("perplexity"), ",.2f"),
        _percent(score.get("accuracy")) + plus_minus,
        _percent(score.get("baseline_accuracy")),
        sure,
        number(score.get("count"), ",.0f"),
    ]


def _forgetting(story: Story) -> str:
    """The scores of every task after every stage, if there is more than one."""
    ends = stage_ends(story.metrics, story.curriculum)
    if len(ends) < 2:
        return ""

    def table(measure: Measure) -> str:
        heads = [measure, *(f"{end.name}<br>step {end.step:,}" for end in ends), "last - best"]
        rows = []
        for line in lines(ends, measure, story.tasks):
            cells = [text_of(value_cell(line, stage, measure)) for stage in range(len(ends))]
            if line.best is not None:
                cells[line.best] = f"<span class='good'>{cells[line.best]}</span>"
            bad = " class='bad'" if line.clearly_forgotten else ""
            change = f"<span{bad}>{text_of(change_cell(line, measure))}</span>"
            rows.append([text_of(line.task), *cells, change])
        return table_of(heads, rows, numbers_from=1)

    return (
        "<h2>Forgetting</h2>"
        + table("accuracy")
        + "<br>"
        + table("loss")
        + "<p class='key'>Held-out "
        "scores at the end of each stage; * the best stage of a task; in brackets: before the task "
        "was first trained. Changes of accuracy are in percentage points, ± one standard error; "
        "red: lower by more than two. Perplexity is e to the loss.</p>"
    )


def _curves(story: Story) -> str:
    figures = [
        f"<h3>{text_of(task)}</h3>"
        + figure(
            [
                task_panel(story.metrics, story.curriculum, task, "loss"),
                metrics_panel(story.metrics, story.curriculum, task)
                or task_panel(story.metrics, story.curriculum, task, "accuracy"),
            ],
            height=2.5,
        )
        for task in story.tasks
    ]
    if not figures:
        return ""
    key = (
        "<p class='key'><span class='train'>■ training</span> &nbsp; "
        "<span class='held'>● held out</span> &nbsp; <span class='baseline'>┅ baseline</span></p>"
    )
    return "<h2>Learning</h2>" + key + "\n".join(figures)


def _plan(story: Story) -> str:
    if story.curriculum is None:
        return ""
    stages = story.curriculum.stages
    rows = []
    for task_group in story.curriculum.task_groups:
        counts = [dict(stage.steps_of).get(task_group, 0) for stage in stages]
        cells = [f"{count:,}" if count else "" for count in counts]
        rows.append([text_of(task_group), *cells, f"{sum(counts):,}"])
    rows.append(["steps", *(f"{stage.steps:,}" for stage in stages), f"{story.curriculum.steps:,}"])
    heads = ["task group", *(f"stage {i + 1}" for i in range(len(stages))), "all"]
    return "<h2>Plan</h2>" + table_of(heads, rows, numbers_from=1)


def _running(story: Story) -> str:
    names = {
        "lr": "learning rate",
        "grad_norm": "gradient norm",
        "tokens_per_second": "real tokens per second",
        "mfu": "model FLOPs utilization",
        "memory_allocated": "memory of a GPU, bytes",
        "data_wait": "share of time spent waiting",
    }
    present = {k: v for k, v in names.items() if len(series(story.metrics.steps, k)[0])}
    if not present:
        return ""
    panels = [
        run_panel(story.metrics, story.curriculum, name, label) for name, label in present.items()
    ]
    pairs = [panels[i : i + 2] for i in range(0, len(panels), 2)]
    return "<h2>Running</h2>" + "\n".join(figure(pair, height=2.3) for pair in pairs)


def _environment(story: Story) -> str:
    if not story.environment:
        return ""
    rows = []
    for name, value in story.environment.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{k} {v}" for k, v in value.items())
        elif isinstance(value, list):
            value = ", ".join(map(str, value)) or "none"
        shown = "-" if value is None else without_secrets(str(value))
        rows.append([text_of(name.replace("_", " ")), text_of(shown)])
    return "<h2>Environment</h2>" + table_of(["", ""], rows, numbers_from=2)


def _event_line(event: Mapping[str, Any]) -> str:
    rest = {k: v for k, v in event.items() if k not in ("kind", "event", "step", "elapsed")}
    when = clock(event.get("elapsed") or 0)
    message = rest.pop("message", "")
    more = " ".join(f"{k}={v}" for k, v in rest.items())
    return f"{when:>9}  step {event['step']:<9} {event.get('event')}  {message} {more}".rstrip()


def _details(title: str, text: str) -> str:
    return (
        f"<details><summary>{title}</summary><pre>{text_of(without_secrets(text))}</pre></details>"
        if text
        else ""
    )


def _yaml(values: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True) if values else ""


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"
