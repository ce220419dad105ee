"""Keyword arguments that are the fields of a dataclass: what `help()` and editors show of them.

    @documents(TrainSettings)
    def __init__(self, task, **settings): ...

The signature then has every field with its type and default, and the docstring its description: the
string under the field in the source.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., object])


def documents(cls: type) -> Callable[[F], F]:
    """A decorator: the **keywords of a function are the fields of a dataclass."""

    def decorate(function: F) -> F:
        vars(function)["__signature__"] = with_fields(inspect.signature(function), cls)
        function.__doc__ = with_descriptions(function.__doc__, cls)
        return function

    return decorate


def with_fields(signature: inspect.Signature, cls: type) -> inspect.Signature:
    """A signature whose **keywords are replaced by the fields of a dataclass."""
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    fields = {field.name: field for field in dataclasses.fields(cls)}
    more = [
        p.replace(kind=p.KEYWORD_ONLY, default=default_of(fields[p.name], p.empty))
        for p in inspect.signature(cls).parameters.values()
        if p.name not in signature.parameters
    ]
    return signature.replace(parameters=[*own, *more])


def default_of(field: dataclasses.Field[Any], none: object = dataclasses.MISSING) -> Any:
    """The default of a field; with a factory, what it makes; without a default, `none`."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return none if field.default is dataclasses.MISSING else field.default


def with_descriptions(doc: str | None, cls: type) -> str:
    """A docstring with the descriptions of a dataclass's fields at its end."""
    names = {field.name for field in dataclasses.fields(cls)}
    lines = [f"{name}: {text}" for name, text in descriptions(cls).items() if name in names]
    wrapped = [textwrap.fill(line, 88, subsequent_indent="    ") for line in lines]
    return "\n\n".join([inspect.cleandoc(doc or ""), "\n".join(wrapped)]).strip()


@cache
def descriptions(cls: type) -> dict[str, str]:
    """{field: its description} of a dataclass and its bases; empty where there is no source, as in
    an interpreter."""
    texts: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        if dataclasses.is_dataclass(each):
            texts |= _own_descriptions(each)
    return texts


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
