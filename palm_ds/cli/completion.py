"""`palm-ds completion`: TAB completes commands, options, shipped files and paths.

The shell runs `palm-ds` with `_ARGCOMPLETE` in the environment for each TAB, and `answer` prints
what fits. It needs no torch, so that takes a fraction of a second.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NoReturn

from palm_ds.cli import shipped
from palm_ds.cli.command import Command, CommandGroup, Parser
from palm_ds.cli.main import SECTIONS, load
from palm_ds.common.errors import UserError

SHELLS = ("bash", "zsh", "fish")
_SHIPPED: Mapping[str, Callable[[], Iterable[str]]] = {
    "recipe": shipped.recipes,
    "deepspeed_config": shipped.ds_configs,
}
"""Arguments that take a file or the name of a shipped one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shell", nargs="?", metavar="SHELL", help=f"{', '.join(SHELLS)} (that of $SHELL)"
    )


def run(args: argparse.Namespace) -> int:
    from argcomplete.shell_integration import shellcode

    shell = args.shell or Path(os.environ.get("SHELL", "")).name
    if shell not in SHELLS:
        raise UserError(f"completion {shell}: expected one of {', '.join(SHELLS)}")
    print(shellcode(["palm-ds"], shell=shell))
    return 0


def answer() -> NoReturn:
    """Print the completions of the command line in the environment, and end this process."""
    import argcomplete

    argcomplete.autocomplete(_parser(os.environ.get("COMP_LINE", "").split()[1:2]))
    raise SystemExit(0)


def _parser(typed: list[str]) -> argparse.ArgumentParser:
    """All commands; the one that is `typed` with its arguments."""
    parser = Parser(prog="palm-ds")
    commands = parser.add_subparsers()
    known = [word for words in SECTIONS.values() for word in words]
    commands.add_parser("help").add_argument("command", choices=known)
    for word in known:
        made = commands.add_parser(word)
        if [word] == typed:
            _fill(made, load(word))
    return parser


def _fill(parser: argparse.ArgumentParser, command_or_group: Command | CommandGroup) -> None:
    from argcomplete.completers import FilesCompleter

    if isinstance(command_or_group, CommandGroup):
        commands = parser.add_subparsers()
        for word, command in command_or_group.commands.items():
            _fill(commands.add_parser(word), command)
        return
    command_or_group.fill(parser)
    for action in parser._actions:
        if names := _SHIPPED.get(action.dest):
            files, known = FilesCompleter(), tuple(names())
            action.completer = lambda prefix, files=files, known=known, **_: [  # pyright: ignore
                *(name for name in known if name.startswith(prefix)),
                *files(prefix),
            ]


COMMAND = Command(
    name="completion",
    summary="Print a script that completes commands, options and files in your shell.",
    usage="[SHELL]",
    examples="""
palm-ds completion bash      # append what it prints to ~/.bashrc
palm-ds completion zsh       # to ~/.zshrc
palm-ds completion fish      # write it to ~/.config/fish/completions/palm-ds.fish
""",
    piped=True,
    results=False,
    add_arguments=add_arguments,
    run=run,
)

if __name__ == "__main__":
    COMMAND.start()
