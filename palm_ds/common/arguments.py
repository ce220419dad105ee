"""Arguments of public functions, checked against their annotations before anything is done.

    @checks_arguments(task="a task with its rows")
    def __init__(self, task: TaskWithData, *, batch: int = 32): ...

A wrong one raises a UserError in one line: `Trainer: task: expected a task with its rows, got 5`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from types import MethodType, NoneType, UnionType
from typing import (
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from palm_ds.common.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")

_NAMES: Mapping[Any, str] = {
    str: "text",
    Path: "a path",
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    Mapping: "a mapping",
    Sequence: "a list",
    Callable: "a function",
    NoneType: "None",
}
"""Types in words, for messages."""


def checks_arguments(
    unknown: str = "", /, **expected: str
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: raises UserError for arguments that a function does not take, or that are not
    what its annotations say. `unknown`: advice on keywords it does not take, with {} for the class
    that it is called on. `expected`: {argument: what is right, in words}; the others are described
    by their types."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        hints = functools.cache(lambda: hints_of(function))

        @functools.wraps(function)
        def call(*args: P.args, **keywords: P.kwargs) -> R:
            try:
                given = signature.bind(*args, **keywords).arguments
            except TypeError as error:
                place = _place(function, args)
                named = _named(signature) if "positional" in str(error) else ""
                advice = (
                    unknown.format(place.partition(".")[0]) if "unexpected" in str(error) else ""
                )
                more = "".join(f"; {each}" for each in (named, advice) if each)
                raise UserError(f"{place}: {error}{more}") from None
            for name, hint in hints().items():
                if name in given and not fits(given[name], hint):
                    right = expected.get(name) or _in_words(hint)
                    raise UserError(
                        f"{_place(function, args)}: {name}: expected {right}, got "
                        f"{given[name]!r:.60}"
                    )
            return function(*args, **keywords)

        return cast("Callable[P, R]", call)

    return decorate


class instance_or_class(Generic[P, R]):  # noqa: N801
    """A decorator: the first argument of a method is the instance, or the class, that it is called
    on."""

    def __init__(self, method: Callable[Concatenate[Any, P], R]) -> None:
        self.method = method
        self.__doc__ = method.__doc__

    def __get__(self, instance: object, owner: type | None = None) -> Callable[P, R]:
        return MethodType(self.method, owner if instance is None else instance)


def hints_of(function: Callable[..., object]) -> dict[str, Any]:
    """{parameter: its type}, without *args and **keywords."""
    types = get_type_hints(function)
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {
        p.name: types[p.name]
        for p in inspect.signature(function).parameters.values()
        if p.name in types and p.kind not in several
    }


def fits(value: object, hint: Any) -> bool:
    """Whether a value is of a type. Sequences and mappings are looked into, other iterables are
    not, since that may use them up; a text is no sequence, and NumPy's numbers are numbers."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(fits(value, each) for each in inner)
    if origin is Literal:
        return value in inner
    kind = {int: Integral, float: Real, None: NoneType}.get(hint, origin or hint)
    if kind in (Integral, Real) and isinstance(value, bool) or not isinstance(value, kind):
        return False
    if isinstance(value, Sequence) and issubclass(kind, Sequence) and kind is not str:
        return not isinstance(value, str) and all(fits(item, y) for y in inner for item in value)
    if isinstance(value, Mapping) and issubclass(kind, Mapping) and inner:
        return all(fits(x, y) for pair in value.items() for x, y in zip(pair, inner, strict=True))
    return True


def _place(function: Callable[..., object], args: Sequence[object]) -> str:
    """The function as its caller knows it: `Trainer`, `Trainer.predict`, `load`."""
    *classes, name = function.__qualname__.split(".")
    if not classes:
        return name
    owner = args[0] if args and isinstance(args[0], type) else type(args[0]) if args else None
    called = owner.__name__ if owner else classes[-1]
    return called if name == "__init__" else f"{called}.{name}"


def _named(signature: inspect.Signature) -> str:
    """Advice on the arguments that are given by name."""
    names = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    return f"give others by name: {names[0]}=..." if names else ""


def _in_words(hint: object) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(dict.fromkeys(_in_words(each) for each in get_args(hint)))
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    kind = NoneType if hint is None else get_origin(hint) or hint
    return _NAMES.get(kind, getattr(kind, "__name__", str(kind)))
