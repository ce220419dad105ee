"""Encoders by name: the files of palm_ds/model/encoder/kinds, each with one class.

backbone: {kind: bert}                               a file
backbone: {kind: my_module.MyEncoder, preset: tiny}  a class of the user's
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

from palm_ds.common.plugins import import_class

T = TypeVar("T")
_PACKAGE = "palm_ds.model.encoder.kinds"


@cache
def known_kinds() -> tuple[str, ...]:
    """The encoders that come with palm_ds."""
    package = importlib.import_module(_PACKAGE)
    return tuple(sorted(module.name for module in pkgutil.iter_modules(package.__path__)))


def class_of_kind(kind: str, base: type[T]) -> type[T]:
    """The encoder class of a kind, a subclass of `base`. Raises UserError for a `module.Class` that
    is none."""
    if encoder := shipped_class(kind):
        return encoder
    return import_class(kind, base, "backbone.kind")


def shipped_class(kind: object) -> type[Any] | None:
    """The class of an encoder that comes with palm_ds; None for any other kind."""
    if kind not in known_kinds():
        return None
    module = importlib.import_module(f"{_PACKAGE}.{kind}")
    classes = (x for x in vars(module).values() if isinstance(x, type))
    (encoder,) = (
        cls for cls in classes if cls.__module__ == module.__name__ and hasattr(cls, "defaults")
    )
    return encoder


def defaults_of_kind(kind: object) -> Mapping[str, Any]:
    """The hyperparameters of an encoder that comes with palm_ds; empty for any other."""
    encoder = shipped_class(kind)
    return encoder.defaults if encoder else {}


def is_custom(kind: str) -> bool:
    """Whether a kind is a class of the user's, about which palm_ds knows nothing."""
    return kind not in known_kinds()
