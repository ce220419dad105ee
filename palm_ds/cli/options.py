"""Arguments shared by several sub-commands."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from palm_ds.common.errors import UserError
from palm_ds.common.remote_files import check_local

T = TypeVar("T")


def add_recipe(
    parser: argparse.ArgumentParser, what: str = "a YAML file, or a shipped one"
) -> None:
    """RECIPE and its overrides."""
    parser.add_argument("recipe", metavar="RECIPE", help=what)
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="override its keys")


def add_ds_config(parser: argparse.ArgumentParser) -> None:
    """--deepspeed_config."""
    parser.add_argument(
        "--deepspeed_config",
        required=True,
        metavar="FILE",
        help="the DeepSpeed file, or a shipped one",
    )


def local_path(text: str) -> Path:
    """The type of an argument that names output on this machine."""
    try:
        check_local(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(text)


def options_of(cls: type[T], args: argparse.Namespace, **more: object) -> T:
    """A dataclass of options from the arguments of the same names; what was not given (None) keeps
    its default. `more`: fields that are no argument."""
    given = {name: getattr(args, name, None) for name in inspect.signature(cls).parameters} | more
    values = {name: value for name, value in given.items() if value is not None}
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def check_overrides(overrides: Sequence[str]) -> None:
    """Raises UserError if one is not key=value."""
    for text in overrides:
        if "=" not in text:
            raise UserError(f"override {text!r}: expected key=value")


def names(text: str) -> list[str]:
    """`a, b` as a list."""
    return [name.strip() for name in text.split(",") if name.strip()]
