"""`palm-ds recipes`, `palm-ds recipes copy`, `palm-ds recipes import`"""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

from palm_ds.cli import shipped
from palm_ds.cli.command import Command, CommandGroup, table, typed
from palm_ds.cli.options import local_path
from palm_ds.cli.output import show, summarize
from palm_ds.common.errors import UserError

_LEAST_COLUMNS = 24
"""Of a description, however narrow the terminal is."""

# ---- list ----


def _list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--paths", action="store_true", help="show where each file is")


def _list(args: argparse.Namespace) -> int:
    record, lines = {}, []
    for title, files in (
        ("recipes", shipped.recipes()),
        ("DeepSpeed files", shipped.ds_configs()),
    ):
        short = sys.stdout.isatty() and not args.json
        about = {
            name: str(path) if args.paths else shipped.description(path, short=short)
            for name, path in files.items()
        }
        record[title] = about
        lines.append(f"{title}\n{table(_wrapped(about) if short else about)}\n")
    how = "Name one where a command takes a file; `palm-ds recipes copy NAME` copies it."
    show(args, record, *lines, *([] if args.quiet else [how]))
    return 0


def _wrapped(about: Mapping[str, str]) -> dict[str, str]:
    """Descriptions in as many lines as they take in the columns that names leave of a terminal."""
    taken = max(map(len, about), default=0) + 4
    columns = max(shutil.get_terminal_size().columns - taken, _LEAST_COLUMNS)
    return {
        name: f"\n{' ' * taken}".join(textwrap.wrap(text, columns, break_long_words=False))
        for name, text in about.items()
    }


LIST = Command(
    name="recipes",
    summary="List, copy or import recipes and DeepSpeed files.",
    usage="[--paths] | copy NAME [DESTINATION] | import CONFIG RECIPE",
    examples="""
palm-ds recipes
palm-ds recipes copy embedded.yaml
palm-ds recipes copy finetune/rte mine.yaml
palm-ds recipes import config.yaml mine.yaml --tasks tasks       # of PaddlePALM r0.3
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
        default=".",
        metavar="DESTINATION",
        help="a folder, or a new file (the current folder)",
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

# ---- import ----

_TITLES = {"changed": "carried over, but:", "left_out": "not carried over:"}


def _import_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("config", type=Path, metavar="CONFIG", help="the YAML file of a PaddlePALM r0.3 Controller")
    add("recipe", type=local_path, metavar="RECIPE", help="the recipe to write, a new file")
    add("--tasks", type=Path, metavar="DIR", help="folder of the task files (that of CONFIG)")
    add("--init_from", default="", metavar="PATH", help="weights (the folder that CONFIG names)")


def _import(args: argparse.Namespace) -> int:
    import yaml

    from palm_ds.common.atomic import write_file_atomically
    from palm_ds.common.files import make_folder
    from palm_ds.train.recipe.paddlepalm import import_config

    if args.recipe.exists():
        raise UserError(f"{args.recipe}: already exists; give another name, or remove it")
    made = import_config(args.config, args.tasks or args.config.parent, args.init_from)
    folder = made.save_path or "runs/NAME"
    run = f"--deepspeed_config FILE --run_dir {typed(folder)}"
    command = f"palm-ds finetune {typed(args.recipe)} {run}"
    head = f"# Made by palm-ds recipes import from {args.config}. Train it with\n# {command}\n"
    text = yaml.safe_dump(made.values, sort_keys=False, allow_unicode=True)
    make_folder(args.recipe.parent)
    write_file_atomically(args.recipe, head + text)
    notes = {"changed": made.changed, "left_out": made.left_out}
    lines = [x for key, found in notes.items() if found for x in (_TITLES[key], *found)]
    record = {"recipe": args.recipe, **notes, "command": command}
    summarize(args, record, *lines, f"written to {args.recipe}; train it with `{command}`")
    return 0


IMPORT = Command(
    name="recipes import",
    summary="Make a recipe from the YAML files of PaddlePALM r0.3.",
    usage="CONFIG RECIPE [--tasks DIR] [--init_from PATH]",
    examples="""
palm-ds recipes import config.yaml mine.yaml                     # TASK.yaml files beside it
palm-ds recipes import demo2/config.yaml mine.yaml --tasks demo2/tasks
palm-ds recipes import config.yaml mine.yaml --init_from ERNIE-v2-en-base
""",
    add_arguments=_import_arguments,
    run=_import,
)

_COMMANDS = {"copy": COPY, "import": IMPORT}
COMMAND = CommandGroup(name="recipes", summary=LIST.summary, commands=_COMMANDS, default=LIST)

if __name__ == "__main__":
    COMMAND.start()
