"""`palm-ds resize`"""

from __future__ import annotations

import argparse
from pathlib import Path

from palm_ds.cli.command import Command
from palm_ds.cli.options import local_path, options_of
from palm_ds.cli.output import summarize


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("weights", type=Path, metavar="WEIGHTS", help="a checkpoint of any format")
    add("out", type=local_path, metavar="OUT", help="a new folder")
    add("--add_tokens", type=Path, dest="tokens", metavar="FILE", help="new tokens, one per line")
    add(
        "--reuse_unused", action="store_true", help="put new tokens in place of [unused1] ... first"
    )
    add("--multiple", type=int, metavar="N", help="pad the vocabulary to a multiple of N")
    add("--positions", type=int, metavar="N", help="new maximum length in tokens")
    add(
        "--how",
        default="tile",
        metavar="H",
        help="how to fill new positions: tile or interpolate (tile)",
    )
    add("--tokenizer", type=Path, metavar="PATH", help="the tokenizer, if it is not in WEIGHTS")
    add("--seed", type=int, default=0, metavar="N", help="seed of randomly initialized rows (0)")


def run(args: argparse.Namespace) -> int:
    from palm_ds.weights.convert.resize import ResizeOptions, resize_checkpoint

    wanted = options_of(ResizeOptions, args)
    lines = resize_checkpoint(args.weights, args.out, wanted)
    summarize(args, {"out": args.out, "changes": lines}, *lines)
    return 0


COMMAND = Command(
    name="resize",
    summary="Resize a checkpoint's embeddings: more tokens, a padded vocabulary, longer texts.",
    usage="WEIGHTS OUT [options]",
    examples="""
palm-ds resize runs/mine out --add_tokens tokens.txt --multiple 64
palm-ds resize models/bert out --positions 1024 --how tile
""",
    notes="""
A Hugging Face folder is written as one, any other format as a weights/ folder. FILE has one token
per line and, after a tab, words whose mean embedding initializes it (by default, the pieces into
which the tokenizer splits it now).""",
    add_arguments=add_arguments,
    run=run,
)

if __name__ == "__main__":
    COMMAND.start()
