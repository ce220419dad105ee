"""`palm-ds`: finds the sub-command, imports only that, and runs it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from palm_ds.cli.command import Command, CommandGroup, quiet_at_closed_pipe, table
from palm_ds.common.errors import UserError, exit_on_user_error, suggest

SECTIONS: Mapping[str, Sequence[str]] = {
    "Text to corpus": ("prepare", "corpus"),
    "Training": (
        "pretrain",
        "finetune",
        "adapt",
        "run",
        "submit",
        "suite",
        "sweep",
        "ablate",
        "inspect",
        "report",
        "augment",
        "mine",
        "teach",
    ),
    "Using a model": ("predict", "evaluate", "fill-mask", "embed", "index", "serve"),
    "Checkpoints": ("convert", "verify", "show", "merge", "resize", "push", "download"),
    "Shipped files and shell": ("recipes", "completion"),
}
"""Every sub-command; `fill-mask` is the module fill_mask."""
_HEAD = """usage: palm-ds COMMAND [options]

Multi-task pretraining and fine-tuning of text encoders on a DeepSpeed engine.
"""
_TAIL = """
`palm-ds COMMAND --help` has its options, with defaults in parentheses, and examples. To train on
several GPUs, start the command's module with a launcher:
  deepspeed --module palm_ds.cli.pretrain RECIPE --deepspeed_config FILE   (or finetune, predict)
  torchrun --nproc_per_node 8 --module palm_ds.cli.pretrain RECIPE --deepspeed_config FILE"""


def load(word: str) -> Command | CommandGroup:
    """The sub-command or group with this name."""
    return importlib.import_module(f"palm_ds.cli.{word.replace('-', '_')}").COMMAND


def help_text() -> str:
    """Every sub-command with its summary."""
    parts = [_HEAD]
    width = max(len(word) for words in SECTIONS.values() for word in words)
    for title, words in SECTIONS.items():
        rows = {f"{word:<{width}}": load(word).summary for word in words}
        parts.append(f"{title}\n{table(rows)}")
    return "\n".join([*parts, _TAIL])


def find(argv: Sequence[str]) -> tuple[Command, Sequence[str]]:
    """The sub-command that the words name, and its arguments. Raises UserError, or SystemExit after
    printing help or the version."""
    word = argv[0] if argv else "--help"
    if word == "help" and argv[1:]:
        return find([*argv[1:], "--help"])
    if word in ("-h", "--help", "help"):
        print(help_text())
        raise SystemExit(0)
    if word == "--version":
        from palm_ds.common.version import __version__

        print(f"palm_ds {__version__}")
        raise SystemExit(0)
    known = [word for words in SECTIONS.values() for word in words]
    word = word.replace("_", "-")
    if word not in known:
        raise UserError(f"palm-ds {word}: no such command{suggest(word, known)}")
    command = load(word)
    return command.find(argv[1:]) if isinstance(command, CommandGroup) else (command, argv[1:])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    with exit_on_user_error():
        command, rest = find(sys.argv[1:] if argv is None else argv)
        return command.call(rest)
    return 2


def start() -> NoReturn:
    """The console script."""
    with exit_on_user_error(), quiet_at_closed_pipe():
        command, rest = find(sys.argv[1:])
    command.start(rest)


if __name__ == "__main__":
    start()
