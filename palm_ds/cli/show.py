"""`palm-ds show`"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from palm_ds.cli.command import Command
from palm_ds.cli.output import show
from palm_ds.common.errors import UserError
from palm_ds.common.messages import printable, short_number

if TYPE_CHECKING:
    from palm_ds.weights.formats.contents import CheckpointContents, HeadInfo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", type=Path, metavar="PATH", help="a run folder, or a checkpoint of any format")
    add("--eps", type=float, metavar="X", help="LayerNorm's eps, if PATH states a wrong one")
    add("--tensors", action="store_true", help="show every tensor's norm and extremes")
    other = "with --tensors: show differences from this checkpoint"
    add("--other", type=Path, metavar="OTHER", help=other)
    add("--config", type=Path, metavar="FILE", help="the encoder's config, if it is not in PATH")


def run(args: argparse.Namespace) -> int:
    from palm_ds.weights.model_folder import open_model

    if args.other and not args.tensors:
        raise UserError("--other: needs --tensors")
    contents = open_model(args.path, eps=args.eps, config=args.config)
    if args.tensors:
        _show_tensors(args, contents, open_model(args.other) if args.other else None)
    elif args.json:
        show(args, _record(contents))
    else:
        _show(contents)
    return 0


def _record(contents: CheckpointContents) -> Mapping[str, object]:
    """Plain values for JSON."""
    return {
        "path": str(contents.path),
        "format": contents.format,
        "config": asdict(contents.config),
        "heads": {name: asdict(head) for name, head in contents.heads.items()},
        "task_ids": dict(contents.task_ids),
        "tensors": {
            name: {
                "shape": list(entry.shape),
                "source_names": list(entry.source_names),
                "transform": entry.transform,
            }
            for name, entry in contents.entries.items()
        },
        "skipped": dict(contents.skipped),
        "tokenizer": str(contents.tokenizer) if contents.tokenizer else None,
        "notes": list(contents.all_notes),
    }


def _show_tensors(
    args: argparse.Namespace, contents: CheckpointContents, other: CheckpointContents | None
) -> None:
    from palm_ds.weights.convert import tensor_report

    numbers = list(tensor_report.numbers_of(contents, other))
    lines = tensor_report.shown(numbers, compared=other is not None, terminal=sys.stdout.isatty())
    show(args, {"tensors": [each.record() for each in numbers]}, *lines)


def _show(contents: CheckpointContents) -> None:
    from rich.console import Console

    from palm_ds.weights.convert import mapping_report

    console = Console(soft_wrap=True, highlight=False)
    mapping_report.show(mapping_report.of_contents(contents).rows(), console)
    count = sum(math.prod(entry.shape) for entry in contents.entries.values())
    heads = [f"{name} ({_describe(head)})" for name, head in contents.heads.items()]
    heads += [f"{name} ({what})" for name, what in _further_heads(contents).items()]
    numbers = {k: v for k, v in asdict(contents.config).items() if v not in ("", {}, None)}
    lines = [
        f"{contents.format}: {len(contents.entries)} tensors, {short_number(count)} parameters",
        f"encoder: {', '.join(f'{k} {v}' for k, v in numbers.items())}",
        f"heads: {', '.join(heads) or 'none'}",
        f"tasks: {dict(contents.task_ids) or 'none named'}",
        f"tokenizer: {contents.tokenizer or 'none'}",
        *(f"note: {note}" for note in contents.all_notes),
    ]
    for line in lines:
        console.print(printable(line), markup=False)


def _describe(head: HeadInfo) -> str:
    """A head's kind in a few words."""
    if head.kind == "masked_words":
        return "masked words"
    if head.kind == "replaced_tokens":
        return "replaced tokens"
    means = " (the means of their tokens)" if head.outputs.averaged else ""
    return f"{head.classes} classes of {f'whole texts{means}' if head.pooled else 'tokens'}"


_PARTS = {"transform.weight": "regions of images", "match.weight": "images that match texts"}
"""{part of a head: what such a head is about}"""


def _further_heads(contents: CheckpointContents) -> Mapping[str, str]:
    """{head that nothing but palm_ds knows, of pretraining or a custom one: what it is about}"""
    found: dict[str, str] = {}
    for entry in contents.entries:
        first, _, rest = entry.partition(".")
        name, _, part = rest.partition(".")
        if first == "heads" and name not in contents.heads:
            found[name] = _PARTS.get(part, found.get(name, "for palm_ds alone"))
    return found


COMMAND = Command(
    name="show",
    summary="Show what is in a checkpoint of any format, without converting it.",
    usage="PATH [options]",
    examples="""
palm-ds show models/ernie/params
palm-ds show runs/mine/checkpoints/step_00001000 --json
palm-ds show runs/mine --tensors --other models/bert   # how far has training moved each tensor?
""",
    piped=True,
    add_arguments=add_arguments,
    run=run,
)

if __name__ == "__main__":
    COMMAND.start()
