"""Mappings a person wrote to frozen dataclasses, strictly: an unknown key is an error that names
the nearest known one, a wrong type says what would be right."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from palm_ds.common.errors import UserError, suggest

T = TypeVar("T")


def parse(cls: type[T], values: Any, where: str) -> T:
    """An instance of a dataclass from nested mappings; `where` is the key they stand under.

    >>> parse(Schedule, {"kind": "noam", "warmup": 4000}, "schedule")
    """
    _check_keys(cls, values, where)
    config = ConfigDict(arbitrary_types_allowed=True, coerce_numbers_to_str=True)
    adapter = TypeAdapter(_with_config(cls, config))
    try:
        return adapter.validate_python(dict(values))
    except ValidationError as error:
        raise UserError(_one_line(error, where)) from None
    except UserError as error:
        raise UserError(f"{where}: {error}" if where not in str(error) else str(error)) from None


def _with_config(cls: type[T], config: ConfigDict) -> type[T]:
    if not hasattr(cls, "__pydantic_config__"):
        cls.__pydantic_config__ = config  # type: ignore[attr-defined]
    return cls


def _check_keys(cls: type, values: Any, where: str) -> None:
    if not isinstance(values, Mapping):
        raise UserError(f"{where}: expected keys and values, got {values!r}")
    hints = get_type_hints(cls)
    known = {field.name for field in dataclasses.fields(cls) if field.init}
    for key, value in values.items():
        if key not in known:
            raise UserError(f"{where}.{key}: unknown key{suggest(key, known)}".lstrip("."))
        hint, each = hints.get(key), {f"{where}.{key}": value}
        if get_origin(hint) is dict and isinstance(value, Mapping):  # {name: dataclass}
            hint = get_args(hint)[1]
            each = {f"{where}.{key}.{name}": inner for name, inner in value.items()}
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            for place, inner in each.items():
                if isinstance(inner, Mapping):
                    _check_keys(hint, inner, place.lstrip("."))


def _one_line(error: ValidationError, where: str) -> str:
    first = error.errors()[0]
    path = ".".join([where, *(str(part) for part in first["loc"])]).strip(".")
    if first["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return f"{path}: missing; it must be given"
    message = first["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if isinstance((first.get("ctx") or {}).get("error"), UserError):
        return message if path in message else f"{path}: {message}"
    message = message.replace("input should be a valid dictionary", "expected keys and values")
    return f"{path}: {message}, got {first.get('input')!r}"
