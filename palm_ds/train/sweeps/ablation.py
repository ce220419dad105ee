"""Trains one recipe under several schedules with equal budgets and compares the scores.

    recipe ──variants──> OUT/joint.yaml ... ──one process per run──> OUT/joint/ (a run folder) ...
    ──compare──> OUT/ablation.md, OUT/ablation.json

A schedule with a + has a task in every task group (ERNIE 2.0's CMTL+ and Alt.+). Called again,
completed runs are skipped and interrupted ones resumed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from palm_ds.common import errors
from palm_ds.common.errors import UserError, suggest
from palm_ds.common.files import make_folder
from palm_ds.common.json_files import write_json
from palm_ds.common.summary import pipe_table
from palm_ds.data.stream.budgets import read_budget
from palm_ds.data.stream.stages import CURRICULUM_KINDS, tasks_of
from palm_ds.runtime.deepspeed.ds_config import DSConfig
from palm_ds.train.recipe.recipe import Recipe, make_recipe, read_values
from palm_ds.train.report.metrics_file import FILE, read_metrics
from palm_ds.train.report.score_tables import number as shown
from palm_ds.train.setup.resolve import resolve
from palm_ds.train.setup.run_folder import RunSpec, check_folder
from palm_ds.train.setup.sources import open_data
from palm_ds.train.sweeps.subprocesses import run_and_wait

log = logging.getLogger(__name__)

Score: TypeAlias = Mapping[str, Any]
"""As logged; a value is None for what a task does not define, such as the baseline of a custom
one."""
SCHEDULES = ("sequential", "joint", "continual")
"""Compared by default."""


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """The settings of a comparison."""

    recipe: Path
    ds_config: DSConfig
    out: Path
    """Folder of all runs and the table."""
    overrides: Sequence[str] = ()
    """a.b=c: overrides of the recipe."""
    schedules: Sequence[str] = SCHEDULES
    always: str = ""
    """Also train every schedule with this task in every task group."""
    steps: str = ""
    """Steps of each task group; empty: as in the recipe."""

    def __post_init__(self) -> None:
        for name in self.schedules:
            if name not in CURRICULUM_KINDS:
                raise UserError(f"--schedules: no {name!r}{suggest(name, CURRICULUM_KINDS)}")
        if not self.schedules:
            raise UserError(f"--schedules: names none; some of {', '.join(CURRICULUM_KINDS)}")
        if len(set(self.schedules)) < len(self.schedules):
            raise UserError("--schedules: contains a duplicate")
        if self.steps:
            read_budget(self.steps, "--steps")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One schedule of the comparison."""

    name: str
    values: Mapping[str, Any]
    """The contents of its recipe file."""
    run: RunSpec

    @property
    def file(self) -> Path:
        """Its recipe file, next to its run folder."""
        return self.run.folder.with_name(f"{self.name}.yaml")

    def scores(self) -> dict[str, Score] | None:
        """Held-out scores of each task at the end. None if the run is not complete."""
        path = self.run.folder / FILE
        if not path.is_file():
            return None
        metrics = read_metrics(path, steps=False)
        # The last one, wherever it is: with `evaluate.patience` runs end before their last step.
        return metrics.evaluations[-1]["scores"] if metrics.ended and metrics.evaluations else None

    def seconds(self) -> float:
        """Running time, including restarts."""
        metrics = read_metrics(self.run.folder / FILE)
        records = [*metrics.steps, *metrics.evaluations, *metrics.events]
        return max((record.get("elapsed") or 0.0 for record in records), default=0.0)


def variants(ablation: Ablation) -> list[Variant]:
    """The recipes to compare, with equal budgets for each task group."""
    values = read_values(ablation.recipe, ablation.overrides)
    base = make_recipe(values, str(ablation.recipe))
    sources = base.sources.values()
    if not (base.held_out or any(source.validation or source.folds for source in sources)):
        raise UserError(f"{ablation.recipe}: held_out: 0 leaves nothing to compare on")
    if own := [key for settings in base.curriculum_spec.settings for key in settings]:
        raise UserError(
            f"{ablation.recipe}: stages: a stage has {own[0]!r} of its own, for which other "
            "schedules have no place; remove it"
        )
    if ablation.steps:
        stages = {"joint": list(base.curriculum_spec.task_groups), "steps": ablation.steps}
        base = make_recipe({**values, "stages": stages | {"mix": _mix(base)}}, "--steps")
    curriculum = resolve(base).curriculum
    budgets = {task_group: curriculum.total_of(task_group) for task_group in curriculum.task_groups}
    always = ablation.always
    if always and all(always in tasks_of(task_group) for task_group in budgets):
        raise UserError(f"--always: {always!r} is already in every task group of the recipe")
    schedules = []
    for name in [*ablation.schedules, *(f"{n}+" for n in ablation.schedules if always)]:
        shape = name.removesuffix("+")
        stages: dict[str, Any] = {shape: list(budgets), "steps": dict(budgets)}
        stages |= {"always": always} if name.endswith("+") else {}
        stages |= {} if shape == "alternate" else {"mix": _mix(base)}
        own = {**values, "stages": stages}
        recipe = make_recipe(own, f"{ablation.recipe}, {name}")
        run = RunSpec(recipe=recipe, ds_config=ablation.ds_config, folder=ablation.out / name)
        schedules.append(Variant(name=name, values=own, run=run))
    return schedules


def _mix(base: Recipe) -> str:
    """The recipe's `mix` if it is the same in all stages, else `batch`."""
    chosen = set(base.curriculum_spec.mixes)
    return (
        chosen.pop() if base.curriculum_spec.kind != "alternate" and len(chosen) == 1 else "batch"
    )


def run_all(
    schedules: Sequence[Variant],
    command: Callable[[Variant], Sequence[str]],
) -> None:
    """Train every incomplete variant in its own processes. `command` returns the command line of
    one. Raises UserError if a run does not complete."""
    data = open_data(schedules[0].run.recipe)
    for variant in schedules:
        check_folder(replace(variant.run, recipe=resolve(variant.run.recipe, data)), data)
    for number, variant in enumerate(schedules, 1):
        title = f"{variant.name} ({number} of {len(schedules)})"
        if variant.scores() is not None:
            log.info("== %s: done, in %s", title, variant.run.folder)
            continue
        steps = f"{variant.run.recipe.curriculum.steps:,}"
        log.info("== %s: %s steps, in %s", title, steps, variant.run.folder)
        _write(variant.file, yaml.safe_dump(dict(variant.values), sort_keys=False))
        code = run_and_wait(command(variant))
        if code not in (errors.FINISHED, errors.STOPPED):
            raise UserError(
                f"{variant.name}: the run failed with exit code {code}; see its output above. Run "
                "the same command again to continue"
            )
        if variant.scores() is None:
            raise UserError(
                f"{variant.name}: the run stopped early; run the same command again to continue"
            )


# The table -------------------------------------------------------------------------------------


def compare(ablation: Ablation, schedules: Sequence[Variant]) -> str:
    """The table; also written to ablation.md and ablation.json."""
    scores = {variant.name: variant.scores() or {} for variant in schedules}
    text = table(scores)
    record = {
        "recipe": ablation.recipe.name,
        "schedules": {v.name: _facts(v) | {"scores": scores[v.name]} for v in schedules},
    }
    write_json(ablation.out / "ablation.json", record)
    _write(ablation.out / "ablation.md", _page(ablation.recipe.name, text, schedules))
    return text


def _facts(variant: Variant) -> dict[str, Any]:
    recipe = variant.run.recipe
    return {
        "steps": recipe.curriculum.steps,
        "tokens": sum(recipe.stage_plan.tokens) or recipe.curriculum.steps,
        "stages": recipe.curriculum.explicit(),
        "seconds": variant.seconds(),
    }


def table(scores: Mapping[str, Mapping[str, Score]]) -> str:
    """{schedule: {task: its held-out score}} as a Markdown table, one column per schedule."""
    rows = [["task", "held out", *scores]]
    for task in dict.fromkeys(
        task for variant_scores in scores.values() for task in variant_scores
    ):
        of_task = [variant_scores.get(task) for variant_scores in scores.values()]
        for number, (what, form) in enumerate(_lines(of_task).items()):
            cells = ["-" if score is None else form(score) for score in of_task]
            rows.append(["" if number else task, what, *cells])
    return pipe_table(rows, left=(0, 1))


def _lines(scores: Sequence[Score | None]) -> dict[str, Callable[[Score], str]]:
    """A task's lines: over a table its own metrics, else the accuracy above the baseline."""
    metrics = dict.fromkeys(name for score in scores if score for name in score.get("metrics", {}))
    if not metrics:
        return _LINES
    return {"loss": _LINES["loss"], **{name: partial(_metric, name) for name in metrics}}


def _metric(name: str, score: Score) -> str:
    value = score["metrics"].get(name)
    return shown(value, ".3f")


def _accuracy(score: Score) -> str:
    accuracy = score["accuracy"]
    return "-" if accuracy is None else f"{100 * accuracy:.1f}"


def _above(score: Score) -> str:
    accuracy, baseline, error = (score[key] for key in _COMPARED)
    if accuracy is None or baseline is None or error is None:
        return "-"
    return f"{100 * (accuracy - baseline):+.1f} ± {100 * error:.1f}"


_COMPARED = ("accuracy", "baseline_accuracy", "standard_error")
_LINES: dict[str, Callable[[Score], str]] = {
    "loss": lambda score: shown(score["loss"], ".3f"),
    "accuracy, %": _accuracy,
    "above baseline": _above,
}


def _page(recipe: str, text: str, schedules: Sequence[Variant]) -> str:
    plans = [f"**{v.name}**\n\n```\n{v.run.recipe.plan_table()}\n```" for v in schedules]
    note = (
        "Held-out scores at the end of each run; ± is one standard error of the accuracy, the "
        "labels taken as independent. One seed each: it does not include the variance over seeds."
    )
    if any(variant.name.endswith("+") for variant in schedules):
        note += (
            " With a +, a task is in every task group, and its scores are over the texts of all "
            "these task groups: compare its lines only between schedules of the same kind."
        )
    return "\n\n".join([f"# Schedules of {recipe}", text, note, "## Plans", *plans]) + "\n"


def _write(path: Path, text: str) -> None:
    make_folder(path.parent)
    path.write_text(text, encoding="utf-8")
