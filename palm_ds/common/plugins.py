"""Classes of one's own: a recipe names them `module.Class`, and they are told its keys."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from palm_ds.common.errors import UserError, suggest

T = TypeVar("T")


def find_class(name: str, base: type[T], where: str) -> type[T]:
    """The class `module.Class`, a subclass of `base`. Raises UserError, which begins with `where`,
    where there is none."""
    module_name, _, class_name = name.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, TypeError, ValueError) as error:  # the last two: no name of a module
        raise UserError(
            f"{where}: cannot import {module_name!r} ({error}); is its folder on PYTHONPATH?"
        ) from error
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, base)):
        wanted = f"{base.__module__}.{base.__qualname__}"
        raise UserError(f"{where}: {name!r} is not a subclass of {wanted}")
    return found


def name_of(cls: type) -> str:
    """What a recipe calls a class. Raises UserError where it could not find it again."""
    if "." in cls.__qualname__:
        raise UserError(
            f"{cls.__qualname__}: define the class at the top of a file or a notebook cell, where "
            "a recipe can name it"
        )
    return f"{cls.__module__}.{cls.__qualname__}"


def with_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a recipe, with its name for every class that stands there."""
    return {
        key: name_of(value)
        if isinstance(value, type)
        else with_names(value)
        if isinstance(value, Mapping)
        else value
        for key, value in values.items()
    }


def check_options(
    cls: type,
    options: Mapping[str, Any],
    where: str,
    *,
    base: type,
    taken: Collection[str],
    rest: bool = False,
) -> None:
    """Raises UserError, which begins with `where`, for options that the constructor of a subclass
    of `base` has no keyword for, or that it lacks. Its first argument and those `taken` come from
    elsewhere; what it hands on as **keywords may be any where `base` takes any, `rest`."""
    first, *others = inspect.signature(cls).parameters.values()
    known, open_ = _keywords(cls, base)
    known -= {first.name, *taken}
    for name in options:
        if name in {first.name, *taken}:
            raise UserError(f"{where}.{name}: this is not an option; the recipe says it elsewhere")
        if name not in known and not (rest and open_):
            near = suggest(name, known) if known else "; the class has no options"
            raise UserError(f"{where}.{name}: unknown key{near}")
    for each in others:
        lacking = each.name in known - options.keys() and each.default is each.empty
        if lacking:
            raise UserError(f"{where}.{each.name}: missing; it must be given")


def _keywords(cls: type, base: type) -> tuple[set[str], bool]:
    """Those of a constructor, and of the ones below `base` that it hands **keywords on to; whether
    the last of them hands any on."""
    known: set[str] = set()
    for each in cls.__mro__[: cls.__mro__.index(base)]:
        if "__init__" in vars(each):
            parameters = list(inspect.signature(each.__init__).parameters.values())[1:]
            named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
            known |= {p.name for p in parameters if p.kind in named}
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                return known, False
    return known, True
