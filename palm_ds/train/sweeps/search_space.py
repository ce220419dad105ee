"""Search space of a sweep: its file, its parameters and their ranges.

recipe: mine.yaml
metric: topic.accuracy
space:
  optimizer.lr: {low: 1.0e-5, high: 3.0e-4, log: true}
  batch: [16 examples, 32 examples]
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveInt

from palm_ds.common.config import check_keys, override, parse, parse_override, read_yaml, shorten
from palm_ds.common.errors import UserError, suggest
from palm_ds.common.settings import Settings
from palm_ds.tasks.metrics.units import less_is_better
from palm_ds.train.recipe.recipe import Recipe, make_recipe, read_values

_RANGE = ("low", "high", "log", "step")


@dataclass(frozen=True, kw_only=True)
class Sweep(Settings):
    """A sweep file."""

    recipe: str
    """A recipe, or a shipped one."""
    metric: str = ""
    """What is optimized: `task.metric`, a task (its first metric), or `mean` over the first metric
    of each non-auxiliary task. Empty: the recipe's `evaluate.best`."""
    direction: Literal["", "maximize", "minimize"] = ""
    """Empty: minimize for a loss, an error or a perplexity, else maximize."""
    space: dict[str, Any]
    """{recipe key: values}: a list of choices, or `{low, high}` with `log: true` or `step`."""
    trials: PositiveInt = 20
    """Number of trials; raise it and call the command again for more."""
    seed: int = 1
    """Determines the parameters of the trials."""
    sampler: Literal["tpe", "random"] = "tpe"
    """tpe: Bayesian optimization (tree-structured Parzen estimator), after ten random trials."""
    pruner: Literal["median", "none"] = "median"
    """median: end a trial that is worse than the median of the earlier ones at the same
    evaluation, from the sixth trial on."""
    overrides: list[str] = field(default_factory=list)
    """a.b=c, for all trials."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.space:
            raise UserError("space: empty; name at least one key of the recipe")

    @property
    def minimizes(self) -> bool:
        """Whether less is better."""
        if self.direction:
            return self.direction == "minimize"
        return less_is_better(self.metric.rpartition(".")[2])


@dataclass(frozen=True, kw_only=True)
class Choices:
    """A parameter with listed values, which may be lists and mappings."""

    values: tuple[Any, ...]

    @property
    def texts(self) -> list[str]:
        """Each value as JSON: what is stored of it."""
        return [json.dumps(value, ensure_ascii=False) for value in self.values]

    @property
    def extremes(self) -> tuple[Any, ...]:
        return self.values


@dataclass(frozen=True, kw_only=True)
class Range:
    """A number from `low` to `high`, whole if both are."""

    low: float
    high: float
    log: bool = False
    """Sample its logarithm."""
    step: float | None = None
    """Distance of the values; none: any."""
    whole: bool = False

    @property
    def extremes(self) -> tuple[Any, ...]:
        """The values that a recipe is checked with."""
        return (self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """A sweep with its recipe: the values of each trial are made here."""

    sweep: Sweep
    values: Mapping[str, Any]
    """The contents of the recipe file with the overrides."""
    recipe: Recipe
    parameters: Mapping[str, Choices | Range]

    def recipe_values(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """The contents of a trial's recipe."""
        values = copy.deepcopy(dict(self.values))
        for key, value in chosen.items():
            override(values, key, value)
        return values

    def record(self) -> dict[str, Any]:
        """Settings that another call for the same folder must have too."""
        same = {"metric", "direction", "space", "seed", "sampler", "pruner"}
        plain = {key: value for key, value in vars(self.sweep).items() if key in same}
        return json.loads(json.dumps({**plain, "recipe": self.values}, default=str))


def read_sweep(path: str | Path, overrides: Sequence[str] = ()) -> Sweep:
    """Read a sweep file. Raises UserError with file and key."""
    values = read_yaml(path)
    try:
        sweep = parse(Sweep, values, "")
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return parse(Sweep, {**values, "overrides": [*sweep.overrides, *overrides]}, str(path))


def search_space(sweep: Sweep, where: str) -> SearchSpace:
    """The space of a sweep, checked: every recipe at its corners is valid. Raises UserError, with
    `where` as the name of its file."""
    values = read_values(sweep.recipe, sweep.overrides)
    try:
        _check_overrides(sweep)
        parameters = {key: _parameter(key, given) for key, given in sweep.space.items()}
        start = {key: parameter.extremes[0] for key, parameter in parameters.items()}
        space = SearchSpace(
            sweep=sweep,
            values=values,
            recipe=_checked(values, start),
            parameters=parameters,
        )
        for key, value in _corners(parameters):
            _checked(values, {**start, key: value}, key)
        return _with_metric(space)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _check_overrides(sweep: Sweep) -> None:
    """Raises UserError for one that the values of every trial would replace."""
    for text in sweep.overrides:
        key = parse_override(text)[0]
        if searched := next((x for x in sweep.space if f"{key}.".startswith(f"{x}.")), ""):
            raise UserError(f"override {text!r}: `space` has {searched}; remove one of the two")


def _corners(parameters: Mapping[str, Choices | Range]) -> Iterator[tuple[str, Any]]:
    for key, parameter in parameters.items():
        for value in parameter.extremes[1:]:
            yield key, value


def _checked(values: Mapping[str, Any], chosen: Mapping[str, Any], key: str = "") -> Recipe:
    """The recipe of a trial. Raises UserError, for a `key` that makes it invalid with its value."""
    whole = copy.deepcopy(dict(values))
    for each, value in chosen.items():
        override(whole, each, value)
    where = f"space.{key}: {shorten(chosen[key])}" if key else "recipe"
    return make_recipe(whole, where)


def _with_metric(space: SearchSpace) -> SearchSpace:
    """The space with the metric filled in. Raises UserError if it is not of a task."""
    settings = space.recipe.evaluate
    metric = space.sweep.metric or settings.best
    if not metric:
        raise UserError("metric: missing; give `task.metric`, or `evaluate.best` in the recipe")
    task, known = metric.partition(".")[0], [*space.recipe.tasks, "mean"]
    if task not in known:
        raise UserError(f"metric: {metric!r}: no task {task!r}{suggest(task, known)}")
    whole = {**vars(space.sweep), "metric": metric}
    return SearchSpace(
        sweep=Sweep(**whole),
        values=space.values,
        recipe=space.recipe,
        parameters=space.parameters,
    )


def _parameter(key: str, given: object) -> Choices | Range:
    where = f"space.{key}"
    if isinstance(given, list):
        try:
            different = {json.dumps(value) for value in given}
        except TypeError as error:  # YAML reads 2020-01-01 as a date
            raise UserError(f"{where}: {error}; write it as text, in quotes") from None
        if len(different) < max(len(given), 1):
            raise UserError(f"{where}: expected different values, got {shorten(given)}")
        return Choices(values=tuple(given))
    if not isinstance(given, Mapping):
        raise UserError(
            f"{where}: expected a list of values, or {{low: ..., high: ...}}, got {shorten(given)}"
        )
    check_keys(given, _RANGE, where)
    low, high = (_number(given, name, where) for name in ("low", "high"))
    step = _number(given, "step", where) if "step" in given else None
    log = given.get("log", False)
    if not isinstance(log, bool):
        raise UserError(f"{where}.log: expected true or false, got {shorten(log)}")
    if low >= high:
        raise UserError(f"{where}: low {low:g} is not below high {high:g}")
    if log and low <= 0:
        raise UserError(f"{where}: log: true needs a low above 0, got {low:g}")
    if log and step is not None:
        raise UserError(f"{where}: give `log` or `step`, not both")
    if step is not None and not 0 < step <= high - low:
        raise UserError(f"{where}.step: {step:g} is not from above 0 to {high - low:g}")
    whole = all(isinstance(x, int) for x in (low, high, step or 1))
    return Range(low=low, high=high, log=log, step=step, whole=whole)


def _number(given: Mapping[str, Any], name: str, where: str) -> float:
    """A number of a range; YAML reads `1e-4` as text."""
    if name not in given:
        raise UserError(f"{where}.{name}: missing; it must be given")
    value = given[name]
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{where}.{name}: expected a number, got {shorten(value)}")
    return number
