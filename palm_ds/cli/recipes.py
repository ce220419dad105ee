"""`palm-ds recipes`, `palm-ds recipes copy`"""

from __future__ import annotations

import argparse
from pathlib import Path

from palm_ds.cli import shipped
from palm_ds.cli.command import Command, CommandGroup, table
from palm_ds.cli.output import show, summarize

# ---- list ----


def _list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--paths", action="store_true", help="show where each file is")


def _list(args: argparse.Namespace) -> int:
    record, lines = {}, []
    for title, files in (
        ("recipes", shipped.recipes()),
        ("DeepSpeed files", shipped.ds_configs()),
    ):
        about = {
            name: str(path) if args.paths else shipped.description(path)
            for name, path in files.items()
        }
        record[title] = about
        lines.append(f"{title}\n{table(about)}\n")
    how = "Name one where a command takes a file; `palm-ds recipes copy NAME` copies it here."
    show(args, record, *lines, *([] if args.quiet else [how]))
    return 0


LIST = Command(
    name="recipes",
    summary="List the shipped recipes and DeepSpeed files, or copy one.",
    usage="[--paths] | copy NAME [DESTINATION]",
    examples="""
palm-ds recipes
palm-ds recipes copy embedded.yaml
palm-ds recipes copy finetune/rte mine.yaml
palm-ds pretrain embedded.yaml --deepspeed_config cpu.json       # shipped files by name
""",
    piped=True,
    add_arguments=_list_arguments,
    run=_list,
)


# ---- copy ----


def _copy_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", metavar="NAME", help="a shipped recipe or DeepSpeed file")
    add(
        "destination",
        nargs="?",
        default=Path(),
        type=Path,
        metavar="DESTINATION",
        help="an existing folder or a new file (this folder)",
    )


def _copy(args: argparse.Namespace) -> int:
    copied = shipped.copy(args.name, args.destination)
    summarize(args, {"file": copied}, str(copied))
    return 0


COPY = Command(
    name="recipes copy",
    summary="Copy a shipped recipe or DeepSpeed file to edit it.",
    usage="NAME [DESTINATION]",
    examples="""
palm-ds recipes copy embedded.yaml
palm-ds recipes copy finetune/rte mine.yaml
palm-ds recipes copy cpu.json
""",
    add_arguments=_copy_arguments,
    run=_copy,
)

COMMAND = CommandGroup(name="recipes", summary=LIST.summary, commands={"copy": COPY}, default=LIST)

if __name__ == "__main__":
    COMMAND.start()
