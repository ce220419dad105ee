"""Searches the values of a recipe's keys with Optuna.

    sweep.yaml ──ask──> OUT/trial_0003.yaml ──a process per trial──> OUT/trial_0003/ (a run folder)
                <─tell─ its evaluations, as they arrive in metrics.jsonl

The state is OUT/trials.journal. Called again, a sweep continues: trials that were interrupted or
have failed are run again, from their checkpoints, before new ones begin. The parameters of a trial
depend on the seed, its number and the results so far, so one job at a time gives the same trials,
interrupted or not. The table of all trials is OUT/sweep.md, and the best
one's recipe OUT/best.yaml.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from palm_ds.common import errors
from palm_ds.common.atomic import write_file_atomically
from palm_ds.common.config import differences, read_json
from palm_ds.common.errors import UserError, suggest
from palm_ds.common.files import make_folder
from palm_ds.common.json_files import write_json
from palm_ds.common.messages import nan_to_null
from palm_ds.common.rng import derive_key
from palm_ds.common.summary import pipe_table
from palm_ds.tasks.metrics.units import less_is_better
from palm_ds.train.report.metrics_file import FILE, Metrics, read_metrics
from palm_ds.train.sweeps.search_space import Choices, SearchSpace
from palm_ds.train.sweeps.subprocesses import failure_in, interrupt_all, spawn

if TYPE_CHECKING:
    import optuna

log = logging.getLogger(__name__)

JOURNAL, RECORD = "trials.journal", "space.json"
_STUDY = "sweep"
_IN_A_ROW = 3
"""Failures after which a sweep ends."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One trial of a sweep."""

    number: int
    chosen: Mapping[str, Any]
    """{recipe key: value}."""
    out: Path

    @property
    def folder(self) -> Path:
        """Its run folder."""
        return self.out / f"trial_{self.number:04}"

    @property
    def file(self) -> Path:
        """Its recipe."""
        return self.folder.with_suffix(".yaml")

    @property
    def output(self) -> Path:
        """The output of its command."""
        return self.folder.with_suffix(".log")

    @property
    def title(self) -> str:
        named = ", ".join(f"{key} {shown(value)}" for key, value in self.chosen.items())
        return f"trial {self.number} ({named})"

    def metrics(self) -> Metrics:
        path = self.folder / FILE
        return read_metrics(path) if path.is_file() else Metrics()


def shown(value: object) -> str:
    """A value in a table."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass
class _RunningTrial:
    trial: Trial
    child: subprocess.Popen[bytes]
    slot: int
    began: float
    pruned: int = 0
    """The evaluation after which it was pruned, from 1; 0: it was not."""
    judged: int = 0
    """Evaluations up to this one have been judged in this call."""
    read: int = -1
    """Bytes that its metrics had when they were read."""


@dataclass
class Search:
    """A sweep in its folder."""

    space: SearchSpace
    out: Path
    failed: dict[int, str] = field(default_factory=dict)
    """{trial: reason} of those that failed in this call and are run again in the next."""

    def __post_init__(self) -> None:
        self._optuna = _import_optuna()
        self._check_same()
        storages = self._optuna.storages
        backend = storages.journal.JournalFileBackend(str(self.out / JOURNAL))
        self.study: optuna.Study = self._optuna.create_study(
            study_name=_STUDY,
            storage=storages.JournalStorage(backend),
            direction="minimize" if self.space.sweep.minimizes else "maximize",
            pruner=self._pruner(),
            load_if_exists=True,
        )

    def _check_same(self) -> None:
        """Raises UserError if the folder holds another sweep."""
        record, now = self.out / RECORD, self.space.record()
        make_folder(self.out)
        if record.is_file() and (changed := differences(read_json(record), now)):
            raise UserError(
                f"{self.out}: holds another sweep: {'; '.join(changed[:3])}; choose another --out"
            )
        write_json(record, now)

    def _pruner(self) -> optuna.pruners.BasePruner:
        pruners = self._optuna.pruners
        if self.space.sweep.pruner == "none":
            return pruners.NopPruner()
        return pruners.MedianPruner(n_startup_trials=5)

    # -- trials --

    def trials(self) -> list[optuna.trial.FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    def trial(self, frozen: optuna.trial.FrozenTrial) -> Trial:
        parameters = self.space.parameters
        chosen = {
            key: json.loads(value) if isinstance(parameters[key], Choices) else value
            for key, value in frozen.params.items()
        }
        return Trial(number=frozen.number, chosen=chosen, out=self.out)

    def _ask(self) -> Trial:
        """A new trial."""
        number = len(self.trials())
        self.study.sampler = self._sampler(number)
        asked = self.study.ask({key: self._distribution(key) for key in self.space.parameters})
        return self.trial(self.trials()[asked.number])

    def _sampler(self, number: int) -> optuna.samplers.BaseSampler:
        """A new one for each trial: its state would not survive an interruption."""
        seed = derive_key(self.space.sweep.seed, "trial", number) % 2**32
        samplers = self._optuna.samplers
        if self.space.sweep.sampler == "random":
            return samplers.RandomSampler(seed=seed)
        return samplers.TPESampler(seed=seed, constant_liar=True)

    def _distribution(self, key: str) -> optuna.distributions.BaseDistribution:
        parameter, kinds = self.space.parameters[key], self._optuna.distributions
        if isinstance(parameter, Choices):
            return kinds.CategoricalDistribution(parameter.texts)
        low, high, log, step = parameter.low, parameter.high, parameter.log, parameter.step
        if parameter.whole:
            return kinds.IntDistribution(int(low), int(high), log=log, step=int(step or 1))
        return kinds.FloatDistribution(low, high, log=log, step=step)

    # -- running --

    def run(
        self, command: Callable[[Trial], Sequence[str]], slots: Sequence[Mapping[str, str]]
    ) -> None:
        """Run trials until there are enough, one at a time in each slot, with the environment of
        the slot. If interrupted, waits until the runs have saved."""
        states = self._optuna.trial.TrialState
        todo = [self.trial(t) for t in self.trials() if t.state == states.RUNNING]
        done = len(self.trials()) - len(todo)
        if done:
            log.info("%d of %d trials are done", done, self.space.sweep.trials)
        free, running, in_a_row = list(range(len(slots))), list[_RunningTrial](), 0
        with ExitStack() as open_files:
            try:
                while True:
                    while free and (trial := self._next(todo)):
                        slot = free.pop(0)
                        running.append(self._start(trial, command, slots[slot], slot, open_files))
                    if not running:
                        return
                    time.sleep(0.1)
                    for each in running:
                        self._read_evaluations(each)
                    for each in [t for t in running if t.child.poll() is not None]:
                        running.remove(each)
                        free.append(each.slot)
                        in_a_row = in_a_row + 1 if self._ended(each) else 0
                        if in_a_row == _IN_A_ROW:
                            last = each.trial
                            why = self.failed.get(last.number) or failure_in(last.output)
                            raise UserError(
                                f"{_IN_A_ROW} trials in a row failed, the last one with: {why}; "
                                f"see {last.output}"
                            )
            finally:
                interrupt_all([each.child for each in running])
                for each in running:
                    each.child.wait()

    def _next(self, todo: list[Trial]) -> Trial | None:
        """The next trial to run: one that was interrupted, or a new one."""
        if todo:
            return todo.pop(0)
        return self._ask() if len(self.trials()) < self.space.sweep.trials else None

    def _start(
        self,
        trial: Trial,
        command: Callable[[Trial], Sequence[str]],
        environment: Mapping[str, str],
        slot: int,
        open_files: ExitStack,
    ) -> _RunningTrial:
        values = self.space.recipe_values(trial.chosen)
        write_file_atomically(trial.file, yaml.safe_dump(values, sort_keys=False))
        log.info("== %s: in %s", trial.title, trial.folder)
        child = spawn(
            command(trial), open_files.enter_context(trial.output.open("wb")), environment
        )
        return _RunningTrial(trial=trial, child=child, slot=slot, began=time.monotonic())

    def _read_evaluations(self, running: _RunningTrial) -> None:
        """Report the evaluations that have arrived, and stop a trial that is to be pruned. In their
        order, also if the trial has ended by then: what is pruned does not depend on timing."""
        file = running.trial.folder / FILE
        size = file.stat().st_size if file.is_file() else 0
        if running.pruned or size == running.read:
            return
        running.read = size
        frozen = self.trials()[running.trial.number]
        reported = max(frozen.intermediate_values, default=0)
        asked = self._optuna.trial.Trial(self.study, frozen._trial_id)
        metrics = running.trial.metrics()
        values = evaluations(metrics, self.space)
        for number, value in enumerate(values, 1):
            if number <= running.judged or number < reported:
                continue
            if number > reported:
                asked.report(value, number)
            running.judged = number  # also the last one reported before an interruption
            if asked.should_prune():
                running.pruned = number
                with suppress(ProcessLookupError):
                    os.killpg(running.child.pid, signal.SIGINT)
                return

    def _ended(self, running: _RunningTrial) -> bool:
        """Record how a trial ended; returns whether it failed."""
        self._read_evaluations(running)
        trial, code, states = running.trial, running.child.returncode, self._optuna.trial.TrialState
        seconds, metric = time.monotonic() - running.began, self.space.sweep.metric
        if running.pruned:
            self.study.tell(trial.number, state=states.PRUNED)
            last = self.trials()[trial.number].intermediate_values[running.pruned]
            text = f"pruned after evaluation {running.pruned}: {metric} {last:.4f}"
            log.info("== trial %d: %s, %.0f s", trial.number, text, seconds)
            return False
        value = final_value(trial.metrics(), self.space) if not code else None
        if value is not None and not math.isnan(value):
            self.study.tell(trial.number, value)
            best = ", the best so far" if self.study.best_trial.number == trial.number else ""
            log.info("== trial %d: %s %.4f%s, %.0f s", trial.number, metric, value, best, seconds)
            return False
        why = "it ended early, or evaluated nothing"
        if value is not None:
            why = f"{metric} has no value on the evaluated rows"
        elif code not in (errors.FINISHED, errors.STOPPED):
            why = failure_in(trial.output)
        log.info("== trial %d: failed (exit code %d): %s", trial.number, code, why)
        if code == errors.NONFINITE:  # it would fail again
            self.study.tell(trial.number, state=states.FAIL)
        else:
            self.failed[trial.number] = why
        return True


def _import_optuna() -> Any:
    """Optuna, which prints nothing of its own. Raises UserError if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise UserError("sweep: needs optuna: pip install 'palm_ds[sweep]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


# ---- values ----


def evaluations(metrics: Metrics, space: SearchSpace) -> list[float]:
    """The value of the metric at every evaluation."""
    return [value_of(e["scores"], space) for e in metrics.evaluations if e["step"]]


def final_value(metrics: Metrics, space: SearchSpace) -> float | None:
    """The value of the final weights: those of the best evaluation with `evaluate.best`. None if
    the run is not complete."""
    scores = metrics.final_scores()
    return None if scores is None else value_of(scores, space)


def value_of(scores: Mapping[str, Mapping[str, Any]], space: SearchSpace) -> float:
    """The value of the metric in the scores of an evaluation; NaN where the evaluated rows do not
    define it. Raises UserError if there is no such metric."""
    task, _, metric = space.sweep.metric.partition(".")
    tasks = space.recipe.built_tasks
    if task == "mean":
        counted = [name for name in scores if name in tasks and not tasks[name].auxiliary]
        firsts = [_first(name, scores, space) for name in counted if _has_value(scores[name])]
        if not firsts:
            raise UserError("metric: mean: no task is evaluated that has more than a loss")
        return sum(firsts) / len(firsts)
    if task not in scores:
        raise UserError(
            f"metric: {task!r} has no rows to evaluate on; give its source `validation`"
        )
    if not metric:
        return _first(task, scores, space)
    known = _metrics(scores[task]) | {"loss": _number(scores[task]["loss"])}
    if metric not in known:
        raise UserError(f"metric: {task} has no {metric!r}{suggest(metric, known)}")
    return known[metric]


def _first(task: str, scores: Mapping[str, Mapping[str, Any]], space: SearchSpace) -> float:
    """The value of a task's first metric. Raises UserError if less of it is better and the sweep
    does not say which it wants."""
    name, value = next(iter(_metrics(scores[task]).items()))
    if less_is_better(name) and not space.sweep.direction:
        raise UserError(
            f"metric: {space.sweep.metric}: lower is better for {name}, the first of {task}; "
            f"name {task}.{name}, or add `direction: minimize`"
        )
    return value


def _metrics(score: Mapping[str, Any]) -> dict[str, float]:
    """A task's metrics, the primary one first."""
    metrics = {**(score.get("metrics") or {}), "accuracy": score["accuracy"]}
    return {name: _number(value) for name, value in metrics.items()}


def _has_value(score: Mapping[str, Any]) -> bool:
    """Whether a task has more than a loss, which class_pairs has not."""
    return bool(score.get("metrics")) or score["accuracy"] is not None


def _number(value: float | None) -> float:
    return math.nan if value is None else value


BEST = "best.yaml"
_STATES = {"COMPLETE": "done", "PRUNED": "pruned", "FAIL": "diverged", "RUNNING": "unfinished"}


def report(search: Search) -> str:
    """The table, best trial first; also written to OUT/sweep.md and sweep.json, with the recipe of
    the best trial in OUT/best.yaml."""
    records = [_record(search, each) for each in _sorted(search)]
    text = _table(search, records)
    sweep, out = search.space.sweep, search.out
    goal = "less" if sweep.minimizes else "more"
    note = (
        f"`{sweep.metric}` ({goal} is better) of the final weights of each trial; of a pruned or "
        "unfinished one, in its last evaluation."
    )
    write_file_atomically(out / "sweep.md", f"# Trials\n\n{text}\n\n{note}\n")
    best = records[0]["number"] if records and records[0]["state"] == "done" else None
    summary = {"metric": sweep.metric, "best": best, "trials": records}
    write_json(out / "sweep.json", nan_to_null(summary))
    if best is not None:
        _write_best(search, records[0], out / BEST)
    return text


def _sorted(search: Search) -> list[optuna.trial.FrozenTrial]:
    """Completed trials by value, then the others by number."""
    sign = 1 if search.space.sweep.minimizes else -1

    def key(trial: optuna.trial.FrozenTrial) -> tuple[bool, float, int]:
        done = trial.state.name == "COMPLETE" and trial.value is not None
        return (not done, sign * (trial.value or 0.0) if done else 0.0, trial.number)

    return sorted(search.trials(), key=key)


def _record(search: Search, frozen: optuna.trial.FrozenTrial) -> dict[str, Any]:
    trial, seen = search.trial(frozen), frozen.intermediate_values
    last = seen[max(seen)] if seen else None
    state = _STATES[frozen.state.name]
    why = search.failed.get(frozen.number, "")
    return {
        "number": frozen.number,
        "state": "failed" if why else state,
        "value": frozen.value if state == "done" else last,
        "evaluations": len(seen),
        "chosen": dict(trial.chosen),
        "folder": trial.folder.name,
        **({"why": why} if why else {}),
    }


def _table(search: Search, records: list[dict[str, Any]]) -> str:
    keys = list(search.space.parameters)
    rows = [["trial", search.space.sweep.metric, *keys, "evaluations", "state"]]
    for record in records:
        value = "-" if record["value"] is None else f"{record['value']:.4f}"
        chosen = [shown(record["chosen"].get(key, "-")) for key in keys]
        number = str(record["number"])
        rows.append([number, value, *chosen, str(record["evaluations"]), record["state"]])
    return pipe_table(rows, left=(len(rows[0]) - 1,))


def _write_best(search: Search, record: dict[str, Any], file: Path) -> None:
    """The recipe of the best trial, which runs as it is."""
    values = search.space.recipe_values(record["chosen"])
    head = f"# trial {record['number']}: {search.space.sweep.metric} {record['value']:.4f}\n"
    write_file_atomically(file, head + yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
