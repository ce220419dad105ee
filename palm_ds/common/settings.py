"""Settings that check themselves: the type of a field says what its values may be.

    @dataclass(frozen=True, kw_only=True)
    class OptimizerConfig(Settings):
        kind: Annotated[str, one_of(KINDS)] = "adamw"
        lr: PositiveFloat = 1e-4
        ema: Rate = 0.0

The types are pydantic's, so `parse` reports a wrong value of a file; Settings does the same for an
instance that a program makes. A `__post_init__` is for rules across fields and begins with its
parent's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, TypeAlias, cast, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from palm_ds.common.config import CHECKS, one_line
from palm_ds.common.errors import UserError, suggest

Rate: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
PositiveShare: TypeAlias = Annotated[float, Field(gt=0, le=1)]
InnerShare: TypeAlias = Annotated[float, Field(gt=0, lt=1)]


class Settings:
    """Base of dataclasses whose fields check themselves. `option`: what stands before a field's
    name in messages, "--" for options of a command."""

    _option: ClassVar[str] = ""

    def __init_subclass__(cls, *, option: str = "") -> None:
        super().__init_subclass__()
        if option:
            cls._option = option

    def __post_init__(self) -> None:
        """Raises UserError for a value that its type forbids."""
        constraints = None
        for field in dataclasses.fields(cast("Any", self)):
            value = getattr(self, field.name)
            if value is field.default or not field.init:
                continue
            constraints = constraints or _constraints(type(self))
            if adapter := constraints.get(field.name):
                try:
                    adapter.validate_python(value)
                except ValidationError as error:
                    raise UserError(one_line(error, self.path_of(field.name))) from None

    def path_of(self, name: str) -> str:
        """A field as messages name it."""
        return f"{self._option}{name}"


@cache
def _constraints(cls: type) -> Mapping[str, TypeAdapter[Any]]:
    """Validators of the fields whose types say more than a type."""
    hints = get_type_hints(cls, include_extras=True)
    return {
        name: TypeAdapter(hint, config=CHECKS) for name, hint in hints.items() if _is_narrow(hint)
    }


def _is_narrow(hint: object) -> bool:
    if get_origin(hint) is ClassVar:
        return False
    return get_origin(hint) is Annotated or any(_is_narrow(inner) for inner in get_args(hint))


def one_of(names: Collection[str], *others: str) -> AfterValidator:
    """The constraint that a text is one of these names. `others` are not suggested."""

    def check(value: str) -> str:
        if value not in names and value not in others:
            raise UserError(f'no "{value}"{suggest(value, names)}')
        return value

    return AfterValidator(check)
