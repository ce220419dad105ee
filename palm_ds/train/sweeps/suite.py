"""Many data sets, several seeds each: one table of medians and spread.

    suite.yaml ──suite_runs──> OUT/SET/seed_1.yaml ... ──a process per run, one per device──>
    OUT/SET/seed_1/ (a run folder), seed_1.log ... ──suite_table──> OUT/suite.md, suite.json

Called again, completed runs are skipped, interrupted ones resumed, and failed ones (marked in the
table) retried.
"""

from __future__ import annotations

import copy
import logging
import math
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from glob import glob
from itertools import chain, product
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from palm_ds.common import errors
from palm_ds.common.config import differences, override, parse, parse_override, read_yaml
from palm_ds.common.errors import UserError, suggest
from palm_ds.common.files import make_folder
from palm_ds.train.recipe.recipe import make_recipe, read_values
from palm_ds.train.report.metrics_file import FILE, read_metrics
from palm_ds.train.sweeps.subprocesses import failure_in, interrupt_all, spawn

log = logging.getLogger(__name__)

_PAIR = {"text_a": "sentence1", "text_b": "sentence2"}
KNOWN_DATA_SETS: dict[str, dict[str, Any]] = {
    "cola": {"read": {"header": False, "columns": {"text_a": 3, "label": 1}}, "best": "matthews"},
    "sst-2": {"read": {"columns": {"text_a": "sentence"}}},
    "mrpc": {
        "read": {"columns": {"text_a": "#1 String", "text_b": "#2 String", "label": "Quality"}}
    },
    "sts-b": {
        "read": {"columns": {**_PAIR, "label": "score"}},
        "task": {"kind": "regression", "low": 0, "high": 5},
    },
    "qqp": {
        "read": {"columns": {"text_a": "question1", "text_b": "question2", "label": "is_duplicate"}}
    },
    "mnli": {
        "dev": "dev_matched.*",
        "evaluation_sets": {"mismatched": "dev_mismatched.*"},
        "read": {"columns": {**_PAIR, "label": "gold_label"}},
    },
    "qnli": {"read": {"columns": {"text_a": "question", "text_b": "sentence"}}},
    "rte": {"read": {"columns": _PAIR}},
    "wnli": {"read": {"columns": _PAIR}},
    "afqmc": {"read": {"format": "jsonl", "columns": _PAIR}},
    "cmnli": {"read": {"format": "jsonl", "columns": _PAIR, "drop": {"label": ["-"]}}},
    "ocnli": {"read": {"format": "jsonl", "columns": _PAIR, "drop": {"label": ["-"]}}},
    "tnews": {"read": {"format": "jsonl", "columns": {"text_a": "sentence"}}},
    "iflytek": {"read": {"format": "jsonl", "columns": {"text_a": "sentence"}}},
    "cluener": {"read": {"format": "jsonl"}, "task": {"kind": "tagging"}},
    "cmrc2018": {"read": {"lost_answers": "keep"}, "task": {"kind": "reading"}},
    "drcd": {"read": {"lost_answers": "keep"}, "task": {"kind": "reading"}},
}
"""The layout of GLUE's and CLUE's folders."""
_OF_SETS = ("sources", "tasks", "stages")
"""Keys of a recipe that a template has not."""
_OF_TEMPLATE = ("train", "dev", "read", "task", "best")
"""Settings of a data set that only a template needs."""
_DEV = ("dev.*", "valid.*", "validation.*", "val.*")


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """One data set of a suite."""

    train: str = ""
    """With a template: the pattern of its training rows in its folder; by default `train.*`."""
    dev: str = ""
    """With a template: the pattern of the rows to evaluate on; by default `dev.*` or `valid*.*`."""
    read: dict[str, Any] = field(default_factory=dict)
    """With a template: how its tables are read, as in a recipe."""
    task: dict[str, Any] = field(default_factory=dict)
    """With a template: the keys of its task; by default `kind: classification`."""
    folds: int | None = None
    """Instead of the suite's `folds`."""
    group: str = ""
    """With folds: column role whose equal values stay in one fold, such as `context`."""
    best: str = ""
    """With a template: the metric that selects the final weights; by default the task's first."""
    overrides: list[str] = field(default_factory=list)
    """a.b=c, after those of the suite."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A suite file."""

    seeds: int | list[int] = 5
    """Number of seeds, or a list of them."""
    folds: Annotated[int, Field(ge=0)] = 0
    """Cross-validation: each fold of the training rows is held out once, for every seed, which also
    deals the rows to folds; `dev` rows are not read. 0: no folds."""
    recipes: list[str] | dict[str, str] = field(default_factory=list)
    """Recipe files: a list, named after the files, or {name: file}."""
    template: str = ""
    """A recipe without sources, tasks and stages, for every folder in `data`."""
    data: str = ""
    """With a template: a folder with a folder for each data set (GLUE's and CLUE's are known). With
    recipes: replaces the leading `data/` of their tables."""
    epochs: float = 3
    """With a template: passes over the training rows."""
    steps: int = 0
    """With a template: steps on every data set, instead of `epochs`."""
    tokenizer: str = ""
    """With a template: the vocabulary that tokenizes the texts; empty: that of its `init_from`."""
    sets: dict[str, DataSet] = field(default_factory=dict)
    """Settings of single data sets, by name."""
    only: list[str] = field(default_factory=list)
    """Run only these data sets."""
    overrides: list[str] = field(default_factory=list)
    """a.b=c, for all recipes."""

    def __post_init__(self) -> None:
        if bool(self.recipes) == bool(self.template):
            raise UserError("give `recipes`, or `template` and `data`")
        if self.template and not self.data:
            raise UserError("data: missing; `template` needs a folder of data sets")
        if not self.seed_list or len(set(self.seed_list)) < len(self.seed_list):
            raise UserError(f"seeds: expected at least one, each once, got {self.seeds!r}")
        of_sets = (text for own in self.sets.values() for text in own.overrides)
        for text in chain(self.overrides, of_sets):
            if parse_override(text)[0] == "seed":
                raise UserError(f"override {text!r}: each run has one of `seeds`; list it there")
        for name, own in self.sets.items():
            if own.group and not _folds(self, own):
                raise UserError(f"sets.{name}.group: for folds; set `folds`, or remove it")
        if self.recipes:
            self._check_for_recipes()

    def _check_for_recipes(self) -> None:
        """Raises UserError for a setting that fills in a template."""
        given = [name for name in ("steps", "tokenizer") if getattr(self, name)]
        given += ["epochs"] if self.epochs != type(self).epochs else []
        for name, own in self.sets.items():
            given += [f"sets.{name}.{key}" for key in _OF_TEMPLATE if getattr(own, key)]
        if given:
            raise UserError(
                f"{given[0]}: is for a `template`; set it in the `recipes`, or in `overrides`"
            )

    @property
    def seed_list(self) -> list[int]:
        return list(range(1, self.seeds + 1)) if isinstance(self.seeds, int) else self.seeds


@dataclass(frozen=True, kw_only=True)
class SuiteRun:
    """One run of a suite."""

    name: str
    """Name of the data set."""
    seed: int
    fold: int = 0
    """The fold that is held out, from 1; 0: there are none."""
    values: Mapping[str, Any]
    """The contents of its recipe file."""
    folder: Path
    """Its run folder."""

    @property
    def title(self) -> str:
        return f"{self.name}, seed {self.seed}" + (f", fold {self.fold}" if self.fold else "")

    @property
    def key(self) -> str:
        """Its name among the runs of its data set."""
        return f"{self.seed}, fold {self.fold}" if self.fold else str(self.seed)

    @property
    def file(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.yaml")

    @property
    def output(self) -> Path:
        """The file with the output of its command."""
        return self.folder.with_name(f"{self.folder.name}.log")

    def scores(self) -> dict[str, dict[str, float]] | None:
        """{task: {metric: value}} of its final weights. None if it is not complete."""
        path = self.folder / FILE
        if not path.is_file():
            return None
        scores = read_metrics(path, steps=False).final_scores()
        return None if scores is None else {task: _numbers(x) for task, x in scores.items()}


def _numbers(score: Mapping[str, Any]) -> dict[str, float]:
    """The task's metrics, the primary one first; accuracy if it has none. NaN where the evaluated
    rows do not define one, such as the AUC of rows of one class."""
    metrics = score.get("metrics") or {"accuracy": score["accuracy"]}
    return {name: math.nan if value is None else value for name, value in metrics.items()}


# ---- reading ----


def read_suite(path: str | Path, overrides: Sequence[str] = ()) -> Suite:
    """Read a suite file; `overrides` apply to all recipes. Raises UserError with file and key."""
    values = read_yaml(path)
    try:
        sets = values.get("sets")
        for name, own in sets.items() if isinstance(sets, Mapping) else ():
            parse(DataSet, own, f"sets.{name}")
        suite = parse(Suite, values, "")
        known = {*_given(suite), *(_folders(suite) if suite.template else {})}
        for name in (*suite.only, *suite.sets):
            if name not in known:
                raise UserError(f"no data set {name!r}{suggest(name, known)}")
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return parse(Suite, {**values, "overrides": [*suite.overrides, *overrides]}, str(path))


def _given(suite: Suite) -> dict[str, str]:
    """{name: recipe file}."""
    if isinstance(suite.recipes, Mapping):
        return dict(suite.recipes)
    stems = Counter(Path(file).stem for file in suite.recipes)
    if twice := [name for name, times in stems.items() if times > 1]:
        raise UserError(f"recipes: two are called {twice[0]!r}; name them: {{NAME: FILE, ...}}")
    return {Path(file).stem: file for file in suite.recipes}


def _folders(suite: Suite) -> dict[str, Path]:
    """{name: folder} of the data sets in `data`."""
    top = Path(suite.data)
    if not top.is_dir():
        raise UserError(f"data: {top} is not a folder")
    folders = {folder.name: folder for folder in sorted(top.iterdir()) if folder.is_dir()}
    named = {name for name, own in suite.sets.items() if own.train}
    folders = {n: f for n, f in folders.items() if n in named or any(f.glob("train*.*"))}
    if not folders:
        raise UserError(f"data: no folder in {top} has a file train.*")
    return folders


def suite_runs(suite: Suite, out: Path) -> list[SuiteRun]:
    """All runs of a suite. Raises UserError if a recipe is wrong or `out` holds runs of other
    recipes."""
    runs = []
    for name, values in _recipes(suite):
        one = suite.sets.get(name, DataSet())
        folds = _folds(suite, one)
        for seed, fold in product(suite.seed_list, range(1, folds + 1) if folds else (0,)):
            own = {**copy.deepcopy(values), "seed": seed}
            if folds:
                _hold_out(own, {"count": folds, "held_out": fold}, one.group)
            ending = f"_fold_{fold}" if fold else ""
            folder = out / name / f"seed_{seed}{ending}"
            member = SuiteRun(name=name, seed=seed, fold=fold, values=own, folder=folder)
            make_recipe(own, member.title)
            _check_same(member)
            runs.append(member)
    return runs


def _folds(suite: Suite, one: DataSet) -> int:
    """The number of folds of a data set."""
    return suite.folds if one.folds is None else one.folds


def _hold_out(values: dict[str, Any], folds: dict[str, Any], group: str) -> None:
    """Replace the rows to evaluate on of every table by a fold of its training rows."""
    for source in _sources(values):
        if "table" in source:
            for key in ("validation", "evaluation_sets"):
                source.pop(key, None)
            source["folds"] = {**folds, **({"group": group} if group else {})}


def _sources(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return _sections(values.get("sources"))


def _sections(named: object) -> list[dict[str, Any]]:
    """The values with keys in a section of a recipe, which checks the others later."""
    found = named.values() if isinstance(named, Mapping) else ()
    return [each for each in found if isinstance(each, dict)]


def _check_same(member: SuiteRun) -> None:
    if not member.file.is_file():
        return
    changed = differences(read_yaml(member.file), member.values)
    if changed and member.folder.exists():
        raise UserError(
            f"{member.file}: holds another recipe: {'; '.join(changed[:3])}; choose another --out, "
            "or remove that run"
        )


def _recipes(suite: Suite) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, contents of the recipe) of every data set."""
    names = _folders(suite) if suite.template else _given(suite)
    for key in read_yaml(suite.template) if suite.template else ():
        if key in _OF_SETS:
            raise UserError(
                f"template: {suite.template} has `{key}`, which each data set has of its own; "
                "remove it, or give `recipes`"
            )
    for name, where in names.items():
        if suite.only and name not in suite.only:
            continue
        own = suite.sets.get(name, DataSet())
        overrides = [*suite.overrides, *own.overrides]
        values = read_values(suite.template or str(where), overrides)
        if suite.template:
            values = copy.deepcopy(_filled(suite, name, Path(where), own, values))
            for key, value in map(parse_override, overrides):
                if key.partition(".")[0] in _OF_SETS:  # those of the data set, filled in
                    override(values, key, value)
        elif suite.data:
            _move(values, suite.data)
        yield name, values


def _move(values: dict[str, Any], data: str) -> None:
    """Replace the leading `data/` of the tables by `data`."""
    sources = _sources(values)
    further = [_sections(source.get("evaluation_sets")) for source in sources]
    for source in chain(sources, *further):
        for key in ("table", "validation"):
            listed = isinstance(source.get(key), list)
            paths = source[key] if listed else [source[key]] if key in source else []
            moved = [re.sub(r"^data/", f"{data.rstrip('/')}/", str(path)) for path in paths]
            if moved:
                source[key] = moved if listed else moved[0]


def _filled(
    suite: Suite, name: str, folder: Path, own: DataSet, values: Mapping[str, Any]
) -> dict[str, Any]:
    """The template with the source, task and stages of a data set filled in."""
    known = KNOWN_DATA_SETS.get(name.lower(), {})
    task = {"kind": "classification", **known.get("task", {}), **own.task, "source": name}
    source = {
        "table": _file(folder, [own.train or "train.*"], "train"),
        "validation": (
            ""
            if _folds(suite, own)
            else _file(folder, [own.dev] if own.dev else [known.get("dev", ""), *_DEV], "dev")
        ),
        "read": own.read or known.get("read", {}),
        "tokenizer": suite.tokenizer,
        "evaluation_sets": {
            title: {"table": str(file)}
            for title, pattern in known.get("evaluation_sets", {}).items()
            for file in sorted(folder.glob(pattern))[:1]
        },
    }
    best = own.best or known.get("best", "")
    evaluate = {"best": f"{name}.{best}" if best else name, **(values.get("evaluate") or {})}
    return {
        **values,
        "sources": {name: {key: value for key, value in source.items() if value}},
        "tasks": {name: task},
        "stages": [{name: suite.steps or f"{suite.epochs:g} epochs"}],
        "evaluate": evaluate,
    }


def _file(folder: Path, patterns: Sequence[str], what: str) -> str:
    for pattern in filter(None, patterns):
        if files := sorted(glob(pattern, root_dir=folder, recursive=True)):
            return str(folder / files[0])
    tried = " or ".join(filter(None, patterns))
    raise UserError(f"{folder}: no file {tried}; name it under `sets`: {what}: PATTERN")


# ---- running ----


@dataclass
class _Running:
    member: SuiteRun
    child: subprocess.Popen[bytes]
    slot: int
    began: float


def run_all(
    members: Sequence[SuiteRun],
    command: Callable[[SuiteRun], Sequence[str]],
    slots: Sequence[Mapping[str, str]],
) -> dict[str, str]:
    """Run all incomplete runs, one at a time in each slot, with the environment of the slot.
    Returns {title: reason} of those that failed. If interrupted, waits until the runs have
    saved."""
    todo = [member for member in members if member.scores() is None]
    if len(todo) < len(members):
        log.info("%d of %d runs are done", len(members) - len(todo), len(members))
    free, running, failed = list(range(len(slots))), [], {}
    with ExitStack() as open_files:
        try:
            while todo or running:
                while todo and free:
                    slot = free.pop(0)
                    running.append(_start(todo.pop(0), command, slots[slot], slot, open_files))
                    member = running[-1].member
                    log.info("== %s: in %s", member.title, member.folder)
                time.sleep(0.1)
                for attempt in [attempt for attempt in running if attempt.child.poll() is not None]:
                    running.remove(attempt)
                    free.append(attempt.slot)
                    if why := _ended(attempt):
                        failed[attempt.member.title] = why
        except KeyboardInterrupt:
            interrupt_all([attempt.child for attempt in running])
            raise
    return failed


def _start(
    member: SuiteRun,
    command: Callable[[SuiteRun], Sequence[str]],
    environment: Mapping[str, str],
    slot: int,
    open_files: ExitStack,
) -> _Running:
    make_folder(member.folder.parent)
    text = yaml.safe_dump(dict(member.values), sort_keys=False, allow_unicode=True)
    member.file.write_text(text, encoding="utf-8")
    output = open_files.enter_context(member.output.open("wb"))
    child = spawn(command(member), output, environment)
    return _Running(member=member, child=child, slot=slot, began=time.monotonic())


def _ended(each: _Running) -> str:
    """Log how a run ended; returns the reason if it failed, else nothing."""
    member, code, scores = each.member, each.child.returncode, each.member.scores()
    if code or scores is None:
        early = code in (errors.FINISHED, errors.STOPPED)
        why = (
            "it stopped before its end, or evaluated nothing"
            if early
            else failure_in(member.output)
        )
        log.info("== %s: failed (exit code %d): %s", member.title, code, why)
        return f"exit code {code}: {why}"
    seconds = time.monotonic() - each.began
    named = [f"{t} {m} {v:.4f}" for t, values in scores.items() for m, v in values.items()]
    log.info("== %s: done in %.0f s: %s", member.title, seconds, ", ".join(named))
    return ""
