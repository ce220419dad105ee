"""Loads user-defined classes and functions named as `module.Class` in a recipe, and checks the
options of classes."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from types import FunctionType, ModuleType
from typing import Any, TypeVar

from palm_ds.common.errors import UserError, did_you_mean, suggest

T = TypeVar("T")


def import_class(name: str, base: type[T], where: str) -> type[T]:
    """Imports `module.Class`, which must be a subclass of `base`; raises UserError, with `where`
    in front, if it cannot."""
    cls = _attribute(name, where)
    if not (isinstance(cls, type) and issubclass(cls, base)):
        wanted = f"{base.__module__}.{base.__qualname__}"
        raise UserError(f"{where}: {name!r} is not a subclass of {wanted}")
    return cls


def import_function(name: str, where: str) -> Callable[..., Any]:
    """Imports `module.function`; raises UserError, with `where` in front, if it cannot."""
    attribute = _attribute(name, where)
    if not callable(attribute) or isinstance(attribute, type):
        raise UserError(f"{where}: {name!r} is not a function")
    return attribute


def import_callable(name: str, where: str) -> Callable[..., Any]:
    """Imports `module.function` or `module.Class`; raises UserError likewise."""
    attribute = _attribute(name, where)
    if not callable(attribute):
        raise UserError(f"{where}: {name!r} is neither a function nor a class")
    return attribute


def source_code(cls: type) -> str:
    """The code of the modules that define a class and its bases."""
    modules = {base.__module__ for base in cls.__mro__} - {"builtins", "abc", "typing"}
    return "".join(_source_of(name) for name in sorted(modules))


def _source_of(module: str) -> str:
    """The code of a module; "" if there is none, as for a notebook."""
    try:
        return inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return ""


def _attribute(name: str, where: str) -> object:
    module_name, dot, attribute = name.rpartition(".")
    if not dot:
        raise UserError(f"{where}: {name!r}; expected its module too, such as my_code.{name}")
    module = _module(module_name, where)
    try:
        return getattr(module, attribute)
    except AttributeError:
        elsewhere = "; it was in another script or notebook: put it in a module"
        near = did_you_mean(attribute, vars(module))
        hint = elsewhere if module_name == "__main__" else near
        raise UserError(f"{where}: {module_name} has no {attribute!r}{hint}") from None


def _module(name: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (ImportError, TypeError, ValueError) as error:  # the last two: not a module name
        raise UserError(
            f"{where}: cannot import {name!r} ({error}); is its folder on PYTHONPATH?"
        ) from error


def name_of(cls: type | FunctionType) -> str:
    """The `module.Class` name of a class, or of a function. Raises UserError for one that recipes
    cannot name."""
    if "." in cls.__qualname__ or "<" in cls.__qualname__:
        what = "class" if isinstance(cls, type) else "function or lambda"
        raise UserError(
            f"{cls.__qualname__}: recipes cannot name a nested {what}; define it at the top level "
            "of a file or notebook cell"
        )
    return f"{cls.__module__}.{cls.__qualname__}"


def classes_to_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of recipe values with every class replaced by its name."""
    return {
        key: name_of(value)
        if isinstance(value, type)
        else classes_to_names(value)
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
    reserved: Collection[str],
    passes_first: bool = True,
    allow_extra: bool = False,
) -> None:
    """Checks options against the constructor of `cls`, a subclass of `base`.

    Raises UserError, with `where` in front, for options it does not take and for required ones that
    are missing. The `reserved` arguments, and with `passes_first` the first one, are passed by the
    library. With `allow_extra`, a constructor that forwards **keywords up to `base` accepts any
    option.
    """
    others = list(inspect.signature(cls).parameters.values())
    passed = {*reserved, *([others.pop(0).name] if passes_first else [])}
    known, open_ = _keywords(cls, base)
    known -= passed
    for name in options:
        if name in passed:
            raise UserError(f"{where}.{name}: not an option; the recipe sets it elsewhere")
        if name not in known and not (allow_extra and open_):
            near = suggest(name, known) if known else "; the class takes no options"
            raise UserError(f"{where}.{name}: unknown key{near}")
    for other in others:
        lacking = other.name in known - options.keys() and other.default is other.empty
        if lacking:
            raise UserError(f"{where}.{other.name}: missing; it must be given")


def _keywords(cls: type, base: type) -> tuple[set[str], bool]:
    """Keyword arguments of a constructor and of the parents below `base` that it forwards
    **keywords to, and whether the last of these forwards them too."""
    known: set[str] = set()
    for each in cls.__mro__[: cls.__mro__.index(base)]:
        if "__init__" in vars(each):
            parameters = list(inspect.signature(each.__init__).parameters.values())[1:]
            named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
            known |= {p.name for p in parameters if p.kind in named}
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                return known, False
    return known, True
