"""The steps of a task group: amounts in steps, tokens or examples, and samplers that split a total.

    5000 | 20_000_000 tokens | 300_000 sequences | 3 epochs | 3 passes     an amount
    uniform | proportional | {temperature: 2}         a sampler: shares of a total
    {weights: {group: 3, ...}}
    {mix_ratio: {group: 0.5, ...}, reference: task group, epochs: 3}     PaddlePALM's: steps
                                                                         directly

A step is a fixed number of tokens. The number and length of examples are known only once the corpus
is open: a `DatasetSize` per task group provides them. (If a step is a fixed number of examples, it
counts as one token, and an example as its share of a step.) All arithmetic is exact, so that a plan
is the same on every machine."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, SupportsFloat, TypeAlias

from palm_ds.common.errors import UserError, suggest

Unit = Literal["steps", "tokens", "sequences", "epochs"]
_AMOUNT = re.compile(r"(\d[\d_]*(?:\.\d+)?)\s*(steps|tokens|sequences|epochs?|ep|pass(?:es)?)?")


@dataclass(frozen=True)
class DatasetSize:
    """The size of a task group, measured on the open corpora."""

    tokens: float | Fraction
    """Row tokens of an epoch (every item once)."""
    mean_length: float | Fraction
    """Row tokens per example."""


DatasetSizes: TypeAlias = Mapping[str, DatasetSize]


@dataclass(frozen=True)
class Budget:
    """An amount of training."""

    number: float
    """An integer, except for epochs."""
    unit: Unit = "steps"

    def __str__(self) -> str:
        return f"{self.number:,} {self.unit}"

    def steps(self, step_tokens: int, size: DatasetSize | None, where: str) -> int:
        """The amount in steps of `step_tokens`, rounded up; `size` is the task group's. Raises
        UserError if one of them is needed and unknown."""
        if self.unit == "steps" or not self.number:
            return int(self.number)
        if not step_tokens or (self.unit != "tokens" and size is None):
            raise UserError(
                f"{where}: {self} can be converted to steps only once the corpora are open"
            )
        return math.ceil(self.tokens(size, where) / step_tokens)

    def tokens(self, size: DatasetSize | None, where: str) -> Fraction:
        """The amount, which is not in steps, in tokens; `size` is the task group's. Raises
        UserError if it is needed and unknown."""
        if size is None and self.unit != "tokens":
            raise UserError(
                f"{where}: {self} can be converted to steps only once the corpora are open"
            )
        return _exact(self.number) * self._tokens(size)

    def _tokens(self, size: DatasetSize | None) -> Fraction:
        if size is None or self.unit == "tokens":
            return Fraction(1)
        return _exact(size.tokens if self.unit == "epochs" else size.mean_length)


def read_budget(value: object, where: str) -> Budget:
    """`5000`, `5_000 steps`, `20_000_000 tokens`, `300_000 sequences`, `3 epochs`, `3ep` or `3
    passes`."""
    match = _AMOUNT.fullmatch(str(value).strip())
    unit: Any = (match and match[2]) or "steps"
    unit = "epochs" if unit.startswith(("ep", "pass")) else unit
    if isinstance(value, bool) or match is None or ("." in match[1] and unit != "epochs"):
        raise UserError(
            f"{where}: expected a whole number of steps, `N tokens`, `N sequences` or `N epochs`, "
            f"got {value!r}"
        )
    written = match[1].replace("_", "")
    return Budget(float(written) if "." in written else int(written), unit)


@dataclass(frozen=True)
class WeightSampler:
    """Fixed shares; all 1 for uniform."""

    of: Mapping[str, float]

    def shares(self, sizes: DatasetSizes | None) -> dict[str, Fraction]:
        return {task_group: _exact(weight) for task_group, weight in self.of.items()}


@dataclass(frozen=True)
class SizeSampler:
    """Shares proportional to the tokens of an epoch to the power 1/temperature: 1 is proportional,
    higher temperatures are more even."""

    task_groups: Sequence[str]
    temperature: float = 1.0

    def shares(self, sizes: DatasetSizes | None) -> dict[str, Fraction]:
        if sizes is None:
            raise UserError("stages.sampler: sizes are known only once the corpora are open")
        largest = max(sizes[task_group].tokens for task_group in self.task_groups)
        power = 1 / self.temperature
        return {b: _exact(float(sizes[b].tokens / largest) ** power) for b in self.task_groups}


@dataclass(frozen=True)
class MixRatio:
    """PaddlePALM's `mix_ratio`: int(epochs * ratio * steps of an epoch of the reference)."""

    ratios: Mapping[str, float]
    reference: str
    epochs: float

    def steps(self, step_tokens: int, sizes: DatasetSizes | None) -> dict[str, int]:
        """Steps of each task group, at least one."""
        if sizes is None or not step_tokens:
            raise UserError("stages.sampler: an epoch is known only once the corpora are open")
        epoch = int(sizes[self.reference].tokens // step_tokens)
        steps = {b: int(_exact(self.epochs) * _exact(r) * epoch) for b, r in self.ratios.items()}
        for task_group, count in steps.items():
            if not count:
                raise UserError(
                    f"stages.sampler: {task_group!r} would get {self.epochs:g} epochs x ratio "
                    f"{self.ratios[task_group]:g} x {epoch} steps per epoch of {self.reference!r}, "
                    "less than one step; raise `epochs` or the ratio, or lower `batch`"
                )
        return steps


Sampler: TypeAlias = WeightSampler | SizeSampler | MixRatio


def _exact(number: float | Fraction) -> Fraction:
    """The decimal number as written: 0.1 is one tenth."""
    return number if isinstance(number, Fraction) else Fraction(repr(number))


def share_out(total: int, shares: Mapping[str, Fraction]) -> dict[str, int]:
    """Integers in these proportions that add up to `total`: each share is rounded down, the rest
    goes to the largest remainders, the earlier of equal ones."""
    whole = sum(shares.values())
    exact = {name: total * share / whole for name, share in shares.items()}
    counts = {name: int(quota) for name, quota in exact.items()}
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


def sampled(
    sampler: Sampler, total: Budget | None, step_tokens: int, sizes: DatasetSizes | None
) -> dict[str, int]:
    """Steps of each task group."""
    if isinstance(sampler, MixRatio):
        return sampler.steps(step_tokens, sizes)
    assert total is not None  # checked when the stages are parsed
    shares = sampler.shares(sizes)
    steps = share_out(total.steps(step_tokens, _mean(shares, sizes), "stages.steps"), shares)
    for task_group, count in steps.items():
        if not count:
            raise UserError(
                f"stages.sampler: a total of {total} gives {task_group!r} no step; raise it"
            )
    return steps


def _mean(shares: Mapping[str, Fraction], sizes: DatasetSizes | None) -> DatasetSize | None:
    """The measure of all task groups together, given their shares of the tokens."""
    if sizes is None:
        return None
    examples = sum(share / _exact(sizes[b].mean_length) for b, share in shares.items())
    return DatasetSize(
        tokens=sum(sizes[task_group].tokens for task_group in shares),
        mean_length=sum(shares.values(), Fraction(0)) / examples,
    )


def read_sampler(
    value: Any, task_groups: Sequence[str], normalize: Callable[[str], str]
) -> Sampler:
    """A recipe's `sampler`; `normalize` normalizes the name of a task group."""
    where = "stages.sampler"
    if value == "uniform":
        return WeightSampler(dict.fromkeys(task_groups, 1.0))
    if value == "proportional":
        return SizeSampler(task_groups)
    kinds = ("temperature", "weights", "mix_ratio")
    samplers = [kind for kind in kinds if isinstance(value, Mapping) and kind in value]
    if len(samplers) != 1:
        raise UserError(
            f"{where}: expected uniform, proportional, or one of {', '.join(kinds)} with its "
            f"value, got {value!r}"
        )
    _check_keys(value, (*samplers, *(["reference", "epochs"] * (samplers == ["mix_ratio"]))), where)
    if samplers == ["temperature"]:
        return SizeSampler(task_groups, _positive(value["temperature"], f"{where}.temperature"))
    if samplers == ["weights"]:
        weights = of_task_groups(value["weights"], task_groups, normalize, f"{where}.weights")
        weights = {
            task_group: _positive(w, f"{where}.weights.{task_group}")
            for task_group, w in weights.items()
        }
        if missing := [task_group for task_group in task_groups if task_group not in weights]:
            raise UserError(
                f"{where}.weights: missing for {missing[0]!r}; give every task group one"
            )
        return WeightSampler({task_group: weights[task_group] for task_group in task_groups})
    return _read_mix_ratio(value, task_groups, normalize, where)


def _read_mix_ratio(
    value: Mapping[str, Any],
    task_groups: Sequence[str],
    normalize: Callable[[str], str],
    where: str,
) -> MixRatio:
    ratios = of_task_groups(value["mix_ratio"], task_groups, normalize, f"{where}.mix_ratio")
    reference = normalize(str(value.get("reference", task_groups[0])))
    if reference not in task_groups:
        raise UserError(
            f"{where}.reference: {reference!r} is not one of the task groups"
            f"{suggest(reference, task_groups)}"
        )
    return MixRatio(
        ratios={
            task_group: _positive(ratios.get(task_group, 1), f"{where}.mix_ratio.{task_group}")
            for task_group in task_groups
        },
        reference=reference,
        epochs=_positive(value.get("epochs", 1), f"{where}.epochs"),
    )


def _check_keys(value: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in value:
        if key not in known:
            raise UserError(f"{where}.{key}: unknown key{suggest(key, known)}")


def of_task_groups(
    value: object, task_groups: Sequence[str], normalize: Callable[[str], str], where: str
) -> dict[str, Any]:
    """Checks a mapping from some of these task groups, each at most once."""
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: expected `task group: number`, got {value!r}")
    numbers: dict[str, Any] = {}
    for written, number in value.items():
        task_group = normalize(str(written))
        if task_group not in task_groups:
            raise UserError(
                f"{where}: {task_group!r} is not one of the task groups"
                f"{suggest(task_group, task_groups)}"
            )
        if task_group in numbers:
            raise UserError(f"{where}: {task_group!r} is a duplicate")
        numbers[task_group] = number
    return numbers


def _positive(value: SupportsFloat | str, where: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise UserError(f"{where}: expected a number above 0, got {value!r}")
    return number
