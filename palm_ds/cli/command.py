"""The base of all sub-commands: arguments, help on one screen, errors and exit codes.

    COMMAND = Command(name="report", summary="...", usage="...", examples="...",
                      add_arguments=add_arguments, run=run)

Exit codes: 0 success; 1 a negative result (`verify`: the checkpoints differ); 2 a mistake in the
arguments or the input, explained in one line; 130 interrupted, 143 and 129 ended by SIGTERM and
SIGHUP, which clean up as Ctrl-C does. Training has more (common/errors.py).
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import re
import resource
import select
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

from palm_ds.cli.interrupts import between_imports, interrupt_between_imports, line_of, raise_again
from palm_ds.cli.output import add_output_options, direct_messages
from palm_ds.common.errors import (
    FAILED,
    MISTAKE,
    UserError,
    exit_on_user_error,
    named_line,
    suggest,
)
from palm_ds.common.messages import print_error
from palm_ds.runtime.processes.launch_env import adapt_to_open_mpi, rank_of_launcher

CONTINUES = "run the same command again to continue"
FILES_CONTINUE = "with files, the same command again continues"
_TURN_SECONDS = 3.0
"""In which rank 0 has made a mistake too, and a launcher has ended the others."""
_OPEN_FILES = 1 << 16
_WIDTH = 100
"""Columns of a help text at most."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One sub-command."""

    name: str
    """As typed after `palm-ds`: `fill-mask`, `corpus inspect`."""
    summary: str
    """One line, in the list of commands and at the top of its help."""
    usage: str
    """Its arguments in one line."""
    examples: str
    """Command lines that start with `palm-ds NAME`; a script shows its own name instead."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    """Runs the command and returns the exit code."""
    notes: str = ""
    """More help, below the examples."""
    piped: bool = False
    """End quietly when the reader of the output closes it, as in `| head`."""
    wraps: bool = False
    """What follows `--` is another command line, in `args.command`."""
    interrupted: str = ""
    """How to continue it, which the line after an interrupt says."""
    results: bool = True
    """It prints results, so it has --json and --quiet (cli/output.py)."""

    def parser(self) -> Parser:
        invocation, launched = _invocation(self.name)
        examples = self.examples.replace(f"palm-ds {self.name}", invocation)
        examples = re.sub(r"(-m|--module) palm_ds\.cli\.\w+", launched or r"\g<0>", examples)
        parts = [f"examples:\n{_indented(examples)}", self.notes.strip()]
        parser = Parser(
            allow_abbrev=False,  # a part of an option may be that of another one tomorrow
            prog=invocation,
            usage=f"{invocation} {self.usage}",
            description=self.summary,
            epilog="\n\n".join(filter(None, parts)),
            formatter_class=_Formatter,
            add_help=False,
        )
        parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
        self.fill(parser)
        return parser

    def fill(self, parser: argparse.ArgumentParser) -> None:
        """Add all arguments to a parser."""
        self.add_arguments(parser)
        if self.results:
            add_output_options(parser)

    def call(self, argv: Sequence[str] | None = None) -> int:
        """Parse and run. Raises UserError."""
        args = self.parse(argv)
        if self.results:
            direct_messages(args)
        return self.run(args)

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        words = list(sys.argv[1:] if argv is None else argv)
        at = words.index("--") if self.wraps and "--" in words else len(words)
        parser = self.parser()
        try:
            args = parser.parse_intermixed_args(parser.with_underscores(words[:at]))
        except UserError as error:
            if self.wraps and at == len(words) and "unrecognized" in str(error):
                raise UserError(f"{error}; write the command after `--`") from None
            raise
        if self.wraps:
            args.command = words[at + 1 :]
        return args

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Parse and run; a user error ends with one line and exit code 2."""
        with exit_on_user_error(_say_once):
            return self.call(argv)
        return 2

    def start(self, argv: Sequence[str] | None = None) -> NoReturn:
        """Run as the whole program and end this process."""
        _open_closed_outputs()
        _allow_open_files()
        if self.piped:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        with suppress(OSError):  # what a locale lacks is escaped, unless the output was exchanged
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(errors="backslashreplace")
        adapt_to_open_mpi()
        _fork_processes()
        _leave(_until_interrupted(lambda: self.main(argv), self.interrupted))


@dataclass(frozen=True, kw_only=True)
class CommandGroup:
    """Sub-commands under one word, as in `palm-ds corpus inspect`."""

    name: str
    summary: str
    commands: Mapping[str, Command]
    default: Command | None = None
    """Runs without a sub-command; None: the list of them is shown."""

    def find(self, argv: Sequence[str]) -> tuple[Command, Sequence[str]]:
        """The sub-command that the words name, and its arguments. Raises UserError."""
        word = argv[0].replace("_", "-") if argv else "--help"
        if word in self.commands:
            return self.commands[word], argv[1:]
        if self.default is not None and (not argv or word.startswith("-")):
            return self.default, argv
        if word in ("-h", "--help"):
            print(self.help())
            raise SystemExit(0)
        raise UserError(
            f"palm-ds {self.name} {word}: no such command{suggest(word, self.commands)}"
        )

    def help(self) -> str:
        head = f"usage: palm-ds {self.name} COMMAND [options]\n\n{self.summary}\n"
        rows = {word: command.summary for word, command in self.commands.items()}
        return f"{head}\n{table(rows)}\n\n`palm-ds {self.name} COMMAND --help` has examples."

    def main(self, argv: Sequence[str] | None = None) -> int:
        with exit_on_user_error():
            command, rest = self.find(sys.argv[1:] if argv is None else argv)
            return command.call(rest)
        return 2

    def start(self, argv: Sequence[str] | None = None) -> NoReturn:
        with exit_on_user_error():
            command, rest = self.find(sys.argv[1:] if argv is None else argv)
        command.start(rest)


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors that suggest the nearest option. Options may be written with
    dashes or underscores: `--run-dir`, `--run_dir`."""

    def with_underscores(self, words: Sequence[str]) -> list[str]:
        """The words of a command line, options spelled as they were added. Raises UserError for an
        unknown one: argparse would rather miss the one that is meant."""
        known = {_with_dashes(text): text for text in self._option_string_actions}
        end = words.index("--") if "--" in words else len(words)
        options = [
            word.partition("=") if word.startswith("--") else (word, "", "") for word in words[:end]
        ]
        for name, *value in options:
            if re.fullmatch(r"--[\w-]+", name) and _with_dashes(name) not in known:
                self.error(f"unrecognized arguments: {name}{''.join(value)}")
        spelled = [
            known.get(_with_dashes(name), name) + equals + value for name, equals, value in options
        ]
        return [*spelled, *words[end:]]

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if unknown:
            known = [text for text in self._option_string_actions if text.startswith("--")]
            meant = [text for names in _SYNONYMS if unknown[1] in names for text in names]
            close = [text for text in known if text in meant or text.startswith(unknown[1])]
            hint = f'; did you mean "{close[0]}"?' if close else suggest(unknown[1], known)
            message += hint if "did you mean" in hint else ""
        raise UserError(f"{message}; see `{self.prog} --help`")


_SYNONYMS = (
    ("--out", "--output", "--output_dir", "--save", "--save_dir", "--run_dir"),
    ("--load", "--model", "--model_name_or_path", "--pretrained", "--init_from"),
)
"""What other toolkits call the same option."""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """One line per option, if it fits."""

    def __init__(self, prog: str):
        columns = min(shutil.get_terminal_size().columns - 2, _WIDTH)
        super().__init__(prog, max_help_position=30, width=columns)


class Ended(KeyboardInterrupt):
    """SIGTERM or SIGHUP was received."""

    def __init__(self, number: int):
        self.number = number


def _until_interrupted(run: Callable[[], int], continues: str) -> int:
    """The exit code of `run`, which can clean up after the signals that end a program."""
    program = os.getpid()

    def end(number: int, _frame: FrameType | None) -> None:
        if os.getpid() == program:
            raise Ended(number)
        signal.signal(number, signal.SIG_DFL)  # a forked worker has nothing to clean up
        signal.raise_signal(number)

    interrupt_between_imports()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # `nohup` ignores SIGHUP
            signal.signal(number, between_imports(end))
    try:
        with _signals_before_errors(), quiet_at_closed_pipe():
            return run()
    except Ended as ended:
        print_error("; ".join(filter(None, (line_of(ended.number), continues))))
        return 128 + ended.number
    except KeyboardInterrupt:
        print_error(f"stopped; {continues}" if continues else line_of(signal.SIGINT))
        return 130
    except SystemExit as ended:
        _report_end(ended.code if isinstance(ended.code, int) else FAILED)
        raise
    except Exception as error:
        _report_crash(error)
        raise
    finally:  # the end of the interpreter would print the traceback of another one
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def _signals_before_errors() -> Iterator[None]:
    try:
        yield
    except Exception:
        raise_again()
        raise


@contextmanager
def quiet_at_closed_pipe() -> Iterator[None]:
    """End as SIGPIPE would when the reader of the output has closed it, as in `| head`; with one
    line when its disk, or that of another file, is full."""
    try:
        yield
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout, 0)
        if not output.poll(0):  # some other pipe
            raise
        raise SystemExit(128 + signal.SIGPIPE) from None
    except OSError as error:
        if error.errno == errno.ENOSPC and _is_full(sys.stdout):
            _end_full_output()
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print_error(f"error: {error.strerror}")  # of a file whose name the system does not say
        raise SystemExit(FAILED) from None
    finally:
        try:
            if sys.stdout is not None:  # `>&-` closes it
                sys.stdout.flush()
        except BrokenPipeError:
            _drop_output()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            _end_full_output()


def _is_full(output: TextIO) -> bool:
    """Whether it has no room for another line."""
    try:
        os.write(output.fileno(), b"\n")
    except OSError as error:
        return error.errno == errno.ENOSPC
    return False


def _end_full_output() -> NoReturn:
    _drop_output()
    print(f"error: standard output: {os.strerror(errno.ENOSPC)}", file=sys.stderr, flush=True)
    raise SystemExit(MISTAKE) from None


def _open_closed_outputs() -> None:
    """Write to nowhere where a parent has closed an output (`>&-`): a file that is opened later
    would take its place."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = open(os.devnull, "w", encoding="utf-8", errors="replace")  # noqa: SIM115
            setattr(sys, name, nowhere)


def _allow_open_files() -> None:
    """Raise the limit of open files, as far as this user may: systems keep it at 1,024 for programs
    that call select(). Corpora behind URLs, and servers, have more open."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = _OPEN_FILES if most == resource.RLIM_INFINITY else min(most, _OPEN_FILES)
    if limit != resource.RLIM_INFINITY and limit < raised:
        with suppress(OSError, ValueError):  # macOS allows fewer than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, most))


def _drop_output() -> None:
    """What is left would be written again at the end of the program."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say_once(message: str, code: int) -> None:
    """Print an error once for all processes of a run that make the same mistake: rank 0 does. Those
    that have joined it have reported to it; others wait until a launcher has ended them, and print
    if none does, as then rank 0 has not made the mistake. After a signal it is none."""
    raise_again()
    rank = rank_of_launcher()
    reported = _report_end(code, message)
    if rank and reported:
        return
    if rank:
        try:
            time.sleep(_TURN_SECONDS * (1 if os.environ.get("LOCAL_RANK") == "0" else 2))
        except KeyboardInterrupt:
            return
    print_error(f"error: {message}")


def _report_crash(error: Exception) -> None:
    """Tell the other processes of a run; ends this one, without a traceback, if it only failed
    because another one was lost."""
    if "palm_ds.runtime.processes.liveness" in sys.modules:
        from palm_ds.runtime.processes import liveness

        liveness.leave_if_another_was_lost(error)
    _report_end(FAILED, named_line(error)[:300])


def _report_end(code: int, why: str = "") -> bool:
    """Tell `palm-ds run`, as launchers change codes, and the other processes of the run. Returns
    whether rank 0 has heard of it."""
    if "PALM_DS_STATUS" in os.environ:
        from palm_ds.runtime.processes import rank_status

        rank_status.report(code=code, why=why)
    if "palm_ds.runtime.processes.liveness" in sys.modules:
        from palm_ds.runtime.processes import liveness

        return liveness.end(code, why)
    return False


def hint_next(*lines: str) -> None:
    """Suggest what to run next, on a terminal only."""
    if sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":
        print("next:", *lines, sep="\n  ", file=sys.stderr, flush=True)


def typed(word: object) -> str:
    """A word of a command line as a shell reads it: in quotes if it has a space."""
    return shlex.quote(str(word))


def table(rows: Mapping[str, str], indent: int = 2) -> str:
    """Words and their meanings in two columns."""
    width = max(map(len, rows)) + 2
    return "\n".join(f"{' ' * indent}{word:<{width}}{text}" for word, text in rows.items())


def _with_dashes(option: str) -> str:
    return option.replace("_", "-")


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.strip().splitlines())


def _invocation(name: str) -> tuple[str, str]:
    """Command as it was called, and its name for a launcher ("" means the module)."""
    script = Path(sys.argv[0])
    if script.suffix == ".py" and script.parent.name in ("launch", "convert_ckpt"):
        return f"python {script}", str(script)
    return f"palm-ds {name}", ""


def _fork_processes() -> None:
    """As Python before 3.14 does on Linux. The fork server of 3.14 would warn of the semaphores of
    locks, such as tqdm's, as leaked when a training process leaves."""
    if sys.version_info >= (3, 14) and sys.platform == "linux":
        import multiprocessing

        multiprocessing.set_start_method("fork")


def _leave(code: int) -> NoReturn:
    """End this process, without interpreter shutdown if DeepSpeed is loaded: its threads may abort
    it."""
    _report_end(code)
    if "deepspeed" in sys.modules:
        from palm_ds.runtime.processes.processes import leave

        leave(code)
    sys.exit(code)
