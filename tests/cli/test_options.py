"""Arguments that become options of the library."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from palm_ds.cli.options import options_of


@dataclass(frozen=True, kw_only=True)
class Wanted:
    name: str = "x"
    files: tuple[str, ...] = ()
    check: bool = True
    size: int | None = None


def test_options_are_the_arguments_of_their_names() -> None:
    args = argparse.Namespace(name=None, files=["a", "b"], check=False, other=1)
    assert options_of(Wanted, args) == Wanted(files=("a", "b"), check=False)
    assert options_of(Wanted, args, size=3, check=None).size == 3
    assert options_of(Wanted, args, check=None).check, "the default"
