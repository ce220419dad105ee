"""Arguments are checked against annotations; every public function's annotations can be read."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import palm_ds as palm
from palm_ds.api.loaded_model import LoadedModel
from palm_ds.api.loaded_model import load as load_model
from palm_ds.common.arguments import checks_arguments, fits, hints_of
from palm_ds.common.errors import UserError


@pytest.mark.parametrize(
    ("value", "hint", "right"),
    [
        (3, int, True),
        (np.int64(3), int, True),
        (True, int, False),
        (3, float, True),
        (np.float32(3), float, True),
        ("3", float, False),
        ("x", str | Path, True),
        (None, str | None, True),
        (b"x", str | Path, False),
        (["a"], Sequence[str], True),
        ("a", Sequence[str], False),
        (["a", 5], Sequence[str], False),
        ({"a": 1.5}, Mapping[str, float], True),
        ({"a": "b"}, Mapping[str, float], False),
        (["a"], Mapping[str, Any], False),
        ({"a": [1]}, Iterable[str] | None, True),
        ({"a": [1]}, Sequence[str], False),
        ("step", Literal["step", "batch"], True),
        ("none", Literal["step", "batch"], False),
        (len, Callable[[Any], int], True),
        (5, Callable[[Any], int] | Sequence[Any], False),
        (object(), Any, True),
    ],
)
def test_fits(value: object, hint: Any, right: bool) -> None:
    assert fits(value, hint) is right


def test_an_iterator_is_not_used_up() -> None:
    given = iter("ab")
    assert fits(given, Iterable[str]) and list(given) == ["a", "b"]


class Thing:
    @checks_arguments(names="a list of names")
    def __init__(self, names: Sequence[str], *, size: int = 1, **more: Any):
        self.given = names, size, more

    @classmethod
    @checks_arguments()
    def of(cls, name: str | Path) -> Thing:
        return cls([str(name)])


class Other(Thing):
    pass


def test_mistakes_name_the_class_the_argument_and_what_is_right() -> None:
    assert Thing(["a"], size=2, color="red").given == (["a"], 2, {"color": "red"})
    wrong: dict[str, Callable[[], object]] = {
        "Thing: names: expected a list of names, got 'a'": lambda: Thing("a"),
        "Other: size: expected a whole number, got 'b'": lambda: Other([], size="b"),  # type: ignore[arg-type]
        "Other.of: name: expected text or a path, got 5": lambda: Other.of(5),  # type: ignore[arg-type]
        "Thing: missing a required argument: 'names'": lambda: Thing(),  # type: ignore[call-arg]
        "Thing: too many positional arguments; give others by name: size=...": lambda: Thing([], 2),  # type: ignore[misc]
    }
    for message, call in wrong.items():
        with pytest.raises(UserError) as error:
            call()
        assert str(error.value) == message


def test_the_annotations_of_every_checked_function_can_be_read() -> None:
    """Among them no name that is imported for type checkers alone."""
    classes = (palm.Trainer, palm.MultiHeadTrainer, palm.Backbone, LoadedModel, palm.TableTask)
    members = [load_model, *(x for cls in classes for _, x in inspect.getmembers(cls, callable))]
    checked = [
        each.__wrapped__
        for each in members
        if getattr(each, "__wrapped__", None) and _checked(each)
    ]
    assert len(checked) > 20
    for function in checked:
        assert isinstance(hints_of(function), dict)


def _checked(function: Any) -> bool:
    return function.__code__.co_filename.endswith("arguments.py")
