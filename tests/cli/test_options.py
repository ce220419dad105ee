"""Arguments that become options of the library."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import pytest

from palm_ds.cli.options import add_fields, local_path, options_of


@dataclass(frozen=True, kw_only=True)
class Wanted:
    name: str = "x"
    files: tuple[str, ...] = ()
    check: bool = True
    size: int | None = None


def test_output_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bash leaves `--out=~/x` as it is; it made a folder `~` in the current one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_path("~/runs/x") == tmp_path / "runs/x"
    assert local_path("runs/~x") == Path("runs/~x")


def test_options_are_the_arguments_of_their_names() -> None:
    args = argparse.Namespace(name=None, files=["a", "b"], check=False, other=1)
    assert options_of(Wanted, args) == Wanted(files=("a", "b"), check=False)
    assert options_of(Wanted, args, size=3, check=None).size == 3
    assert options_of(Wanted, args, check=None).check, "the default"


@dataclass(frozen=True, kw_only=True)
class Described:
    kind: str = "quick"
    """quick or slow. Details are not shown."""
    size: int | None = None
    """Largest size (all)."""
    rate: float = 30.0
    """ONNX's rate per second."""
    files: tuple[str, ...] = ()
    """A file."""
    parts: tuple[str, ...] = ()
    """Parts of it."""
    strict: bool = False
    """Refuse doubtful input."""
    check: bool = True
    """Compare the outputs. Otherwise: not."""
    hidden: object = None


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    shown = {"kind": "KIND", "size": "N", "rate": "X", "files": "FILE", "parts": "A,B"}
    names = (*shown, "strict", "check")
    choices, flags = {"kind": ["quick", "slow"]}, {"files": "--file"}
    how = {"metavar": shown, "choices": choices, "flags": flags, "lists": ["parts"]}
    add_fields(made, Described, *names, **how)
    return made


def test_fields_become_options_with_their_description() -> None:
    lines = [" ".join(line.split()) for line in parser().format_help().splitlines()]
    assert lines[lines.index("-h, --help show this help message and exit") + 1 :] == [
        "--kind KIND quick or slow (quick)",
        "--size N largest size (all)",
        "--rate X ONNX's rate per second (30)",
        "--file FILE a file; repeatable",
        "--parts A,B parts of it",
        "--strict refuse doubtful input",
        "--no_check do not compare the outputs",
    ]


def test_options_from_fields_give_the_dataclass_back() -> None:
    assert options_of(Described, parser().parse_args([])) == Described()
    words = "--kind slow --size 3 --rate 0.5 --file a --file b --parts c,d --strict --no_check"
    wanted = Described(
        kind="slow",
        size=3,
        rate=0.5,
        files=("a", "b"),
        parts=("c", "d"),
        strict=True,
        check=False,
    )
    assert options_of(Described, parser().parse_args(words.split())) == wanted
    for wrong in ("--kind fast", "--size 1.5", "--rate x", "--hidden 1"):
        with pytest.raises(SystemExit):
            parser().parse_args(wrong.split())
