"""The steps of a blend: amounts in steps, tokens or examples, and samplers that split a total.

    5000 | 20_000_000 tokens | 300_000 sequences | 3 epochs     an amount
    uniform | proportional | {temperature: 2}               a sampler: shares of a total
    {weights: {blend: 3, ...}}
    {mix_ratio: {blend: 0.5, ...}, reference: blend, epochs: 3}     PaddlePALM's: steps directly

A step is a fixed number of tokens. The number and length of examples are known only once the corpus
is open: a `Measure` per blend provides them. (If a step is a fixed number of examples, it counts as
one token, and an example as its share of a step.) All arithmetic is exact, so that a plan is the
same on every machine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, TypeAlias

from palm_ds.common.errors import UserError, suggest

Unit = Literal["steps", "tokens", "sequences", "epochs"]
_AMOUNT = re.compile(r"(\d[\d_]*(?:\.\d+)?)\s*(steps|tokens|sequences|epochs?|ep)?")


@dataclass(frozen=True)
class Measure:
    """The size of a blend, measured on the open corpora."""

    tokens: float | Fraction
    """Row tokens of an epoch (every item once)."""
    mean_length: float | Fraction
    """Row tokens per example."""


Measures: TypeAlias = Mapping[str, Measure]


@dataclass(frozen=True)
class Amount:
    """An amount of training."""

    number: float
    """An integer, except for epochs."""
    unit: Unit = "steps"

    def __str__(self) -> str:
        return f"{self.number:,} {self.unit}"

    def steps(self, step_tokens: int, measure: Measure | None, where: str) -> int:
        """The amount in steps of `step_tokens`, rounded up; `measure` is the blend's. Raises
        UserError if one of them is needed and unknown."""
        if self.unit == "steps":
            return int(self.number)
        if not step_tokens or (self.unit != "tokens" and measure is None):
            raise UserError(
                f"{where}: {self} can be converted to steps only once the corpora are open"
            )
        return math.ceil(_exact(self.number) * self._tokens(measure) / step_tokens)

    def _tokens(self, measure: Measure | None) -> Fraction:
        if measure is None or self.unit == "tokens":
            return Fraction(1)
        return _exact(measure.tokens if self.unit == "epochs" else measure.mean_length)


def read_amount(value: Any, where: str) -> Amount:
    """`5000`, `5_000 steps`, `20_000_000 tokens`, `300_000 sequences`, `3 epochs` or `3ep`."""
    match = _AMOUNT.fullmatch(str(value).strip())
    unit: Any = (match and match[2]) or "steps"
    unit = "epochs" if unit.startswith("ep") else unit
    if isinstance(value, bool) or match is None or ("." in match[1] and unit != "epochs"):
        raise UserError(
            f"{where}: expected a whole number of steps, `N tokens`, `N sequences` or `N epochs`, "
            f"got {value!r}"
        )
    written = match[1].replace("_", "")
    return Amount(float(written) if "." in written else int(written), unit)


@dataclass(frozen=True)
class Weights:
    """Fixed shares; all 1 for uniform."""

    of: Mapping[str, float]

    def shares(self, measures: Measures | None) -> dict[str, Fraction]:
        return {blend: _exact(weight) for blend, weight in self.of.items()}


@dataclass(frozen=True)
class BySize:
    """Shares proportional to the tokens of an epoch to the power 1/temperature: 1 is proportional,
    higher temperatures are more even."""

    blends: Sequence[str]
    temperature: float = 1.0

    def shares(self, measures: Measures | None) -> dict[str, Fraction]:
        if measures is None:
            raise UserError("stages.sampler: sizes are known only once the corpora are open")
        largest = max(measures[blend].tokens for blend in self.blends)
        power = 1 / self.temperature
        return {b: _exact(float(measures[b].tokens / largest) ** power) for b in self.blends}


@dataclass(frozen=True)
class MixRatio:
    """PaddlePALM's `mix_ratio`: int(epochs * ratio * steps of an epoch of the reference)."""

    ratios: Mapping[str, float]
    reference: str
    epochs: float

    def steps(self, step_tokens: int, measures: Measures | None) -> dict[str, int]:
        """Steps of each blend, at least one."""
        if measures is None or not step_tokens:
            raise UserError("stages.sampler: an epoch is known only once the corpora are open")
        epoch = int(measures[self.reference].tokens // step_tokens)
        steps = {b: int(_exact(self.epochs) * _exact(r) * epoch) for b, r in self.ratios.items()}
        for blend, count in steps.items():
            if not count:
                raise UserError(
                    f"stages.sampler: {blend!r} would get {self.epochs:g} epochs x ratio "
                    f"{self.ratios[blend]:g} x {epoch} steps per epoch of {self.reference!r}, less "
                    "than one step; raise `epochs` or the ratio, or lower `batch`"
                )
        return steps


Sampler: TypeAlias = Weights | BySize | MixRatio


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
    sampler: Sampler, total: Amount | None, step_tokens: int, measures: Measures | None
) -> dict[str, int]:
    """Steps of each blend."""
    if isinstance(sampler, MixRatio):
        return sampler.steps(step_tokens, measures)
    assert total is not None  # checked when the stages are parsed
    shares = sampler.shares(measures)
    steps = share_out(total.steps(step_tokens, _mean(shares, measures), "stages.steps"), shares)
    for blend, count in steps.items():
        if not count:
            raise UserError(f"stages.sampler: a total of {total} gives {blend!r} no step; raise it")
    return steps


def _mean(shares: Mapping[str, Fraction], measures: Measures | None) -> Measure | None:
    """The measure of all blends together, given their shares of the tokens."""
    if measures is None:
        return None
    examples = sum(share / _exact(measures[b].mean_length) for b, share in shares.items())
    return Measure(
        tokens=sum(measures[blend].tokens for blend in shares),
        mean_length=sum(shares.values(), Fraction(0)) / examples,
    )


def read_sampler(value: Any, blends: Sequence[str], spell: Callable[[str], str]) -> Sampler:
    """A recipe's `sampler`; `spell` normalises the name of a blend."""
    where = "stages.sampler"
    if value == "uniform":
        return Weights(dict.fromkeys(blends, 1.0))
    if value == "proportional":
        return BySize(blends)
    kinds = ("temperature", "weights", "mix_ratio")
    found = [kind for kind in kinds if isinstance(value, Mapping) and kind in value]
    if len(found) != 1:
        raise UserError(
            f"{where}: expected uniform, proportional, or one of {', '.join(kinds)} with its "
            f"value, got {value!r}"
        )
    _check_keys(value, (*found, *(["reference", "epochs"] * (found == ["mix_ratio"]))), where)
    if found == ["temperature"]:
        return BySize(blends, _positive(value["temperature"], f"{where}.temperature"))
    if found == ["weights"]:
        weights = of_blends(value["weights"], blends, spell, f"{where}.weights")
        weights = {blend: _positive(w, f"{where}.weights.{blend}") for blend, w in weights.items()}
        if missing := [blend for blend in blends if blend not in weights]:
            raise UserError(f"{where}.weights: missing for {missing[0]!r}; give every blend one")
        return Weights({blend: weights[blend] for blend in blends})
    return _read_mix_ratio(value, blends, spell, where)


def _read_mix_ratio(
    value: Mapping[str, Any], blends: Sequence[str], spell: Callable[[str], str], where: str
) -> MixRatio:
    ratios = of_blends(value["mix_ratio"], blends, spell, f"{where}.mix_ratio")
    reference = spell(str(value.get("reference", blends[0])))
    if reference not in blends:
        raise UserError(
            f"{where}.reference: {reference!r} is not one of the blends{suggest(reference, blends)}"
        )
    return MixRatio(
        ratios={
            blend: _positive(ratios.get(blend, 1), f"{where}.mix_ratio.{blend}") for blend in blends
        },
        reference=reference,
        epochs=_positive(value.get("epochs", 1), f"{where}.epochs"),
    )


def _check_keys(value: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in value:
        if key not in known:
            raise UserError(f"{where}.{key}: unknown key{suggest(key, known)}")


def of_blends(
    value: Any, blends: Sequence[str], spell: Callable[[str], str], where: str
) -> dict[str, Any]:
    """Checks a mapping from some of these blends, each at most once."""
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: expected `blend: number`, got {value!r}")
    found: dict[str, Any] = {}
    for written, number in value.items():
        blend = spell(str(written))
        if blend not in blends:
            raise UserError(f"{where}: {blend!r} is not one of the blends{suggest(blend, blends)}")
        if blend in found:
            raise UserError(f"{where}: {blend!r} is a duplicate")
        found[blend] = number
    return found


def _positive(value: Any, where: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise UserError(f"{where}: expected a number above 0, got {value!r}")
    return number
