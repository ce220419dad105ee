"""Arguments shared by several sub-commands."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from palm_ds.common.errors import UserError


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


def check_overrides(overrides: Sequence[str]) -> None:
    """Raises UserError if one is not key=value."""
    for text in overrides:
        if "=" not in text:
            raise UserError(f"override {text!r}: expected key=value")


def names(text: str) -> list[str]:
    """`a, b` as a list."""
    return [name.strip() for name in text.split(",") if name.strip()]
