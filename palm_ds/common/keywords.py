"""Keyword arguments that are the fields of a dataclass: what `help()` and editors show of them.

    @documents(TrainSettings)
    def __init__(self, task, **settings): ...

The signature then has every field with its type and default, and the docstring its description: the
string under the field in the source.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Callable, Collection, Mapping
from functools import cache
from types import MappingProxyType, MethodType
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., object])
M = TypeVar("M")
_NONE: Mapping[str, str] = MappingProxyType({})


def documents(cls: type) -> Callable[[F], F]:
    """A decorator: the **keywords of a function are the fields of a dataclass."""

    def decorate(function: F) -> F:
        signature = with_fields(inspect.signature(function), cls)
        _explain(function, signature, with_descriptions(function.__doc__, cls))
        return function

    return decorate


def documents_own_fields(
    *, without: Collection[str] = (), aliases: Mapping[str, str] = _NONE
) -> Callable[[M], M]:
    """A decorator: the **keywords of a class method are the fields of the dataclass that it is
    called on, except those in `without`. `aliases`: {another name of a keyword: its field}."""

    def decorate(method: M) -> M:
        assert isinstance(method, classmethod)
        explained = _ClassMethod(function=method.__func__, without=tuple(without), aliases=aliases)
        return cast(M, explained)

    return decorate


def _explain(function: Callable[..., object], signature: inspect.Signature, doc: str) -> None:
    """Set what `help()` shows of a function."""
    vars(function)["__signature__"] = signature
    function.__doc__ = doc


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ClassMethod:
    """A class method with the signature and docstring of the class it is looked up on."""

    function: Callable[..., Any]
    """What it calls, with the class first."""
    without: tuple[str, ...]
    aliases: Mapping[str, str]

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., Any]:
        cls, function = owner or type(instance), self.function
        bound = MethodType(function, cls)

        @functools.wraps(function)
        def call(*arguments: object, **keywords: object) -> Any:
            return bound(*arguments, **keywords)

        plain = inspect.signature(bound)
        full = with_fields(plain, cls, without=self.without)
        also = [full.parameters[x].replace(name=name) for name, x in self.aliases.items()]
        shown = full.replace(parameters=[*full.parameters.values(), *also])
        _explain(call, shown, with_descriptions(function.__doc__, cls, without=self.without))
        return call


def with_fields(
    signature: inspect.Signature, cls: type, *, without: Collection[str] = ()
) -> inspect.Signature:
    """A signature whose **keywords are replaced by the fields of a dataclass, except some."""
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    taken = {*without, *signature.parameters}
    return signature.replace(parameters=[*own, *parameters(cls, without=taken)])


def parameters(cls: type, *, without: Collection[str] = ()) -> list[inspect.Parameter]:
    """The keyword-only parameters of a dataclass's constructor, except some."""
    found = inspect.signature(cls).parameters.values()
    return [
        p.replace(kind=p.KEYWORD_ONLY, default=_shown_default(cls, p))
        for p in found
        if p.name not in without
    ]


def _shown_default(cls: type, parameter: inspect.Parameter) -> Any:
    """The default; of a field with a factory, what it makes."""
    field = next(each for each in dataclasses.fields(cls) if each.name == parameter.name)
    made = field.default_factory
    return parameter.default if made is dataclasses.MISSING else made()


def with_descriptions(doc: str | None, cls: type, *, without: Collection[str] = ()) -> str:
    """A docstring with the descriptions of a dataclass's fields, except some, at its end."""
    lines = [
        f"{name}: {text}"
        for name, text in descriptions(cls).items()
        if name not in without and name in {field.name for field in dataclasses.fields(cls)}
    ]
    wrapped = [textwrap.fill(line, 88, subsequent_indent="    ") for line in lines]
    return "\n\n".join([inspect.cleandoc(doc or ""), "\n".join(wrapped)]).strip()


@cache
def descriptions(cls: type) -> dict[str, str]:
    """{field: its description} of a dataclass and its bases; empty where there is no source, as in
    an interpreter."""
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        if dataclasses.is_dataclass(each):
            found |= _own_descriptions(each)
    return found


def _own_descriptions(cls: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return {}
    (definition,) = tree.body
    assert isinstance(definition, ast.ClassDef)
    pairs = zip(definition.body, definition.body[1:], strict=False)
    return {
        node.target.id: " ".join(text.value.value.split())
        for node, text in pairs
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
