"""Arguments shared by several sub-commands."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from palm_ds.common.errors import UserError
from palm_ds.common.files import home_folder
from palm_ds.common.keywords import descriptions
from palm_ds.common.messages import first_sentence
from palm_ds.common.remote_files import check_local

T = TypeVar("T")


def add_recipe(
    parser: argparse.ArgumentParser, what: str = "a YAML file, or the name of a shipped one"
) -> None:
    """RECIPE and its overrides."""
    parser.add_argument("recipe", metavar="RECIPE", help=what)
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="a.b=c",
        help="override keys of the recipe: optimizer.lr=1e-4",
    )


def add_ds_config(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """--deepspeed_config."""
    parser.add_argument(
        "--deepspeed_config",
        required=required,
        metavar="FILE",
        help="a DeepSpeed file, or the name of a shipped one",
    )


def local_path(text: str) -> Path:
    """The type of an argument that names output on this machine."""
    if not text:  # a Path would be this folder
        raise argparse.ArgumentTypeError("empty; name a place")
    try:
        check_local(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if text.startswith("~/"):  # shells leave that of `--out=~/x`, which would be a folder `~` here
        return home_folder() / text[2:]
    return Path(text)


def add_fields(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    cls: type,
    *names: str,
    metavar: Mapping[str, str],
    choices: Mapping[str, Sequence[str]] = MappingProxyType({}),
    flags: Mapping[str, str] = MappingProxyType({}),
    lists: Collection[str] = (),
) -> None:
    """Options from the fields of a dataclass, for `options_of`: with their types and defaults and,
    as help, the first sentence of their descriptions.

    `names`: of the fields; all by default. `metavar` by field name, of all but switches; `flags`:
    {field: option} of other names; `lists`: fields whose values are given as A,B. A field that is
    True by default becomes --no_NAME, any other of several values is repeatable."""
    kinds, about = get_type_hints(cls), descriptions(cls)
    for field in fields(cls):
        name = field.name
        if names and name not in names:
            continue
        text, flag = _help_of(about.get(name, "")), flags.get(name, f"--{name}")
        if field.default is True:
            flag, text = flags.get(name, f"--no_{name}"), f"do not {text}"
        if isinstance(field.default, bool):
            more: dict[str, Any] = {"action": "store_false" if field.default else "store_true"}
        else:
            more = {"metavar": metavar[name], "choices": choices.get(name)}
            more |= {"type": list_of_names} if name in lists else _type_of(kinds[name])
            text += "; repeatable" if "action" in more else _shown(field.default)
        parser.add_argument(flag, dest=name, default=None, help=text, **more)


def _type_of(hint: object) -> dict[str, Any]:
    """`int` of int and of int | None; several values of a tuple."""
    if get_origin(hint) is tuple:
        return {"action": "append"}
    return {"type": next(each for each in get_args(hint) or (hint,) if each is not NoneType)}


def _shown(default: object) -> str:
    if default in (None, "", ()) or default is MISSING:
        return ""
    return f" ({default:g})" if isinstance(default, float) else f" ({default})"


def _help_of(description: str) -> str:
    """The first sentence of a description, as the help of an option."""
    first = first_sentence(description).removesuffix(".")
    return first[:1].lower() + first[1:] if first[1:2].islower() or first[1:2] == " " else first


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


def list_of_names(text: str) -> list[str]:
    """`a, b` as a list."""
    return [name.strip() for name in text.split(",") if name.strip()]
