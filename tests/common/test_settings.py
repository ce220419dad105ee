"""Settings check themselves, whoever makes them: a file, a command or a program."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import PositiveFloat, PositiveInt

import palm_ds
from palm_ds.common.config import parse
from palm_ds.common.errors import UserError
from palm_ds.common.settings import InnerShare, PositiveShare, Rate, Settings, Share, one_of


@dataclass(frozen=True, kw_only=True)
class Colors(Settings):
    name: Annotated[str, one_of(("red", "green"), "")] = ""
    count: PositiveInt | None = None
    rate: Rate = 0.0
    share: Share = 0.0
    positive: PositiveShare = 1.0
    inner: InnerShare = 0.5
    weights: dict[str, PositiveFloat] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.count == 7:
            raise UserError("count: 7 is taken")


@dataclass(frozen=True, kw_only=True)
class Option(Settings, option="--"):
    workers: PositiveInt = 1


WRONG = [
    ({"name": "gren"}, 'name: no "gren"; did you mean "green"?'),
    ({"count": 0}, "count: expected a number above 0, got 0"),
    ({"count": 7}, "count: 7 is taken"),
    ({"rate": 1.0}, "rate: expected a number below 1, got 1.0"),
    ({"share": 1.5}, "share: expected at most 1, got 1.5"),
    ({"share": -0.5}, "share: expected 0 or more, got -0.5"),
    ({"positive": 0}, "positive: expected a number above 0, got 0"),
    ({"inner": 1}, "inner: expected a number below 1, got 1"),
    ({"inner": float("nan")}, "inner: expected a finite number, got NaN"),
    ({"weights": {"a": 0.0}}, "weights.a: expected a number above 0, got 0.0"),
    ({"rate": "much"}, 'rate: expected a number, got "much"'),
]


@pytest.mark.parametrize(("values", "said"), WRONG)
def test_a_wrong_value_is_one_line_wherever_it_comes_from(values: dict, said: str) -> None:
    with pytest.raises(UserError) as made:
        Colors(**values)
    with pytest.raises(UserError) as read:
        parse(Colors, values, "paint")
    assert str(made.value) == said
    assert str(read.value) == f"paint.{said}" or str(read.value) == f"paint: {said}"


def test_right_values_and_defaults_are_taken_as_they_are() -> None:
    assert Colors(name="red", count=3, weights={"a": 2.0}) == parse(
        Colors, {"name": "red", "count": 3, "weights": {"a": 2.0}}, "paint"
    )


def test_options_of_a_command_have_their_dashes() -> None:
    with pytest.raises(UserError, match="^--workers: expected a number above 0, got 0$"):
        Option(workers=0)


def test_rules_across_fields_come_after_those_of_fields() -> None:
    """A `__post_init__` without its parent's would leave out its fields' rules."""
    root = Path(palm_ds.__file__).parent
    sources = [path.read_text(encoding="utf-8") for path in root.rglob("*.py")]
    trees = [ast.parse(text) for text in sources if "__post_init__" in text]
    known = _names_of_settings()
    bodies = {
        (owner.name, ast.unparse(method.body[0]))
        for tree in trees
        for owner in tree.body
        if isinstance(owner, ast.ClassDef) and owner.name in known
        for method in owner.body
        if isinstance(method, ast.FunctionDef) and method.name == "__post_init__"
    }
    assert len(bodies) > 20
    assert {first for _, first in bodies} == {"super().__post_init__()"}, bodies


def _names_of_settings() -> set[str]:
    known: set[type] = set()
    new: list[type] = [Settings]
    while new:
        known |= set(new)
        new = [sub for each in new for sub in each.__subclasses__() if sub not in known]
    return {cls.__name__ for cls in known - {Settings}}
