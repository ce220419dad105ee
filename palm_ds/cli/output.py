"""Output of a command, as its options `--json` and `--quiet` say.

                   results               what it did, such as files written     notes, progress
                   `show`                `summarize`                            log, `console_of`
    (neither)      text                  text                                   text
    --json         JSON                  JSON                                   on standard error
    --quiet        text                  -                                      -
    both           JSON                  JSON                                   -

Results are on standard output. A line of JSON is a whole object.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from palm_ds.common.messages import (
    json_line,
    nan_to_null,
    only_warnings,
    printable,
    progress_to_stderr,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """--json and --quiet, unless the command has one of its own; at the end of its help."""
    add, known = parser._action_groups[-1].add_argument, parser._option_string_actions
    if "--json" not in known:
        add("--json", action="store_true", help="print results as JSON")
    if "--quiet" not in known:
        add("--quiet", action="store_true", help="print results and errors only")


def direct_messages(args: argparse.Namespace) -> None:
    """Direct the library's messages from now on as `--json` and `--quiet` say."""
    if args.quiet:
        only_warnings()
    elif args.json is True:
        progress_to_stderr()


def console_of(args: argparse.Namespace, width: int | None = None) -> Console:
    """For notes and progress. `width`: of tables in a file or a pipe; elsewhere they fit the
    terminal."""
    stream = sys.stderr if args.json is True else sys.stdout
    size = None if stream.isatty() else width
    return _console(file=stream, quiet=args.quiet, soft_wrap=width is None, width=size)


def _console(**options: Any) -> Console:
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise  # the BrokenPipeError: rich would end the program with code 1

    # without markup, also in tables: names of files and classes may have brackets
    return Plain(highlight=False, markup=False, **options)


def show(args: argparse.Namespace, record: object, *lines: RenderableType) -> None:
    """Print a result: `record` as JSON, or the lines. Text is printed as it is, without markup."""
    if args.json is True:
        print(json_line(nan_to_null(record)), flush=True)
        return
    for line in lines:
        if isinstance(line, str):
            print(printable(line, keep="\n\t"), flush=True)
        else:
            _console(soft_wrap=True).print(line)


def summarize(args: argparse.Namespace, record: object, *lines: RenderableType) -> None:
    """Print what a command did, likewise; with --quiet only as JSON."""
    if args.json is True or not args.quiet:
        show(args, record, *lines)
