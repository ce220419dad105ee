"""`palm-ds verify`: that two checkpoints compute the same, or that one folder is as written."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from palm_ds.cli.command import Command
from palm_ds.cli.output import show
from palm_ds.common.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("a", metavar="A", help="a checkpoint of any format; alone, also a corpus")
    add("b", type=Path, nargs="?", metavar="B", help="another checkpoint, to compare outputs with")
    add("--eps", type=float, metavar="X", help="LayerNorm's eps in A, if A states a wrong one")
    add("--config", type=Path, metavar="FILE", help="the encoder's config, if it is not in A")
    add("--tokenizer", type=Path, metavar="PATH", help="the tokenizer, if it is not in A")
    add(
        "--tolerance",
        type=float,
        metavar="X",
        help="difference allowed, relative to the largest value (1e-5)",
    )


def run(args: argparse.Namespace) -> int:
    return _same_bytes(args) if args.b is None else _same_outputs(args)


def _same_bytes(args: argparse.Namespace) -> int:
    """Whether every file in the manifests of a folder is as it was written."""
    from palm_ds.inference.verify import verify_folder

    options = ("eps", "config", "tokenizer", "tolerance")
    if given := [name for name in options if getattr(args, name) is not None]:
        raise UserError(f"--{given[0]}: compares outputs; name two checkpoints, A and B")
    verdicts = verify_folder(args.a)
    record = {str(verdict.folder): verdict.problems for verdict in verdicts}
    lines = [
        "\n  ".join([f"{verdict.folder}: {verdict}", *verdict.problems]) for verdict in verdicts
    ]
    show(args, record, *lines)
    return 1 if any(verdict.problems for verdict in verdicts) else 0


def _same_outputs(args: argparse.Namespace) -> int:
    from palm_ds.weights.convert.convert import verify_only

    if args.tolerance is not None and not 0 <= args.tolerance < math.inf:
        raise UserError(f"--tolerance {args.tolerance}: expected a number of at least 0")
    opening = {name: getattr(args, name) for name in ("eps", "config", "tokenizer")}
    parity = verify_only(Path(args.a), args.b, tolerance=args.tolerance, **opening)
    lines = [
        f"{each.kind}\t{each.name}\t{each.largest:.1e}\tof {each.scale:.3g}"
        for each in ([] if args.quiet else parity.differences)
    ]
    verdict = "the same" if parity.passed else "NOT the same"
    show(args, parity.record(), *lines, f"{verdict}: {parity}")
    return 0 if parity.passed else 1


COMMAND = Command(
    name="verify",
    summary="Verify that two checkpoints give the same outputs, or that a folder is undamaged.",
    usage="A [B] [options]",
    examples="""
palm-ds verify runs/mine out
palm-ds verify ernie/params other/hf --eps 1e-5
palm-ds verify runs/mine
palm-ds verify data/wiki
palm-ds verify s3://bucket/wiki
""",
    notes="""
A and B can have any format that `palm-ds convert` reads. Heads are compared if both sides have one
of that name, or exactly one of that kind. A alone: a corpus, a run, or its weights or one of its
checkpoints, whose files are compared with the sizes and hashes that were written with them.
Exit codes: 0 equal or undamaged; 1 not; 2 could not be checked.""",
    piped=True,
    add_arguments=add_arguments,
    run=run,
)

if __name__ == "__main__":
    COMMAND.start()
