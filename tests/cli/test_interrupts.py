"""Signals while a module is imported, and in code that loses what their handlers raise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CARELESS = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.{first})
    time.sleep(0.1)
except BaseException:
    pass  # as libraries do that try something
os.kill(os.getpid(), signal.{then})
time.sleep(0.1)
print("imported", flush=True)
"""
START = """
import signal, sys, time
from palm_ds.cli.command import Command

def run(args):
    import {imports}
    {imports}.work()
    time.sleep(60)

for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
Command(name="x", summary="", usage="", examples="", add_arguments=lambda parser: None, run=run,
        results=False).start([])
"""


WORK = "def work():\n    import careless\n"


def result(folder: Path, imports: str, first: str, then: str) -> tuple[int, str, str]:
    """The exit code and output of a command that imports a module, in which signals come."""
    (folder / "careless.py").write_text(CARELESS.format(first=first, then=then))
    (folder / "library.py").write_text(WORK)
    program = f"import sys; sys.path.insert(0, {str(folder)!r})\n{START.format(imports=imports)}"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("first", "then", "code", "out", "error"),
    [
        ("SIGINT", "SIGCHLD", 130, "imported\n", "interrupted\n"),
        ("SIGTERM", "SIGCHLD", 143, "imported\n", "ended by SIGTERM\n"),
        ("SIGINT", "SIGINT", 130, "", "interrupted\n"),
        ("SIGTERM", "SIGTERM", 143, "", "ended by SIGTERM\n"),
    ],
)
def test_a_signal_during_a_later_import_waits_for_its_end_and_a_second_one_does_not(
    first: str, then: str, code: int, out: str, error: str, tmp_path: Path
) -> None:
    assert result(tmp_path, "library", first, then) == (code, out, error)


@pytest.mark.parametrize(
    ("number", "code", "error"),
    [("SIGINT", 130, "interrupted\n"), ("SIGTERM", 143, "ended by SIGTERM\n")],
)
def test_a_signal_while_a_command_imports_ends_it_immediately(
    number: str, code: int, error: str, tmp_path: Path
) -> None:
    assert result(tmp_path, "careless", number, "SIGCHLD") == (code, "", error)


FINALIZER = """
import os, signal, time, weakref
from palm_ds.cli.interrupts import interrupt_between_imports

class Thing:
    def __del__(self):
        if by == "__del__":
            press()

class Key:
    def __hash__(self):
        return 0

def press():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.05)

class Values(dict):
    def __delitem__(self, key):
        press()
        super().__delitem__(key)

by = {by!r}
interrupt_between_imports()
thing, table, key = Thing(), weakref.WeakKeyDictionary(), Key()
table.data = Values()
if by == "remove":
    table[key] = 1
try:
    del thing, key
    os.write(1, b"after\\n")  # whole, which print() is not
    time.sleep(5)
except KeyboardInterrupt:
    print("raised")
"""


@pytest.mark.parametrize("by", ["__del__", "remove"])
def test_an_interrupt_in_a_finalizer_is_raised_after_it(by: str) -> None:
    """Within it, Python would print a traceback and go on."""
    command = [sys.executable, "-c", FINALIZER.replace("{by!r}", repr(by))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.stderr == "" and done.stdout.splitlines()[-1:] == ["raised"], done


UNRAISABLE = """
import ctypes, os, signal, time
from palm_ds.cli.interrupts import interrupt_between_imports

@ctypes.CFUNCTYPE(None)
def press():
    if of_a_signal:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
    else:
        raise KeyboardInterrupt("of its own")

of_a_signal = {of_a_signal}
interrupt_between_imports()
try:
    press()
    os.write(1, b"after\\n")
    time.sleep(1)
except KeyboardInterrupt:
    print("raised")
"""


@pytest.mark.parametrize("of_a_signal", [True, False])
def test_an_interrupt_in_code_that_cannot_raise_is_raised_after_it(of_a_signal: bool) -> None:
    """A callback of C, whose errors Python prints."""
    command = [sys.executable, "-c", UNRAISABLE.replace("{of_a_signal}", str(of_a_signal))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    if of_a_signal:
        assert done.stderr == "" and done.stdout.splitlines()[-1:] == ["raised"], done
    else:
        assert "of its own" in done.stderr and done.stdout == "after\n", done


LOSING = """
import signal
from palm_ds.cli.command import Command
from palm_ds.common.errors import UserError

def run(args):
    try:
        signal.raise_signal(signal.{number})
    except BaseException:
        raise {error} from None

signal.signal(signal.SIGINT, signal.default_int_handler)
Command(name="x", summary="", usage="", examples="", add_arguments=lambda parser: None, run=run,
        results=False).start([])
"""


@pytest.mark.parametrize("error", ["UserError('file: cannot be read')", "TypeError('no shape')"])
@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        ("SIGINT", 130, "interrupted\n"),
        ("SIGHUP", 129, "ended by SIGHUP\n"),
    ],
)
def test_an_error_in_the_place_of_a_signal_is_not_shown(
    error: str, number: str, code: int, line: str
) -> None:
    """As of torch's C++ while it reads weights."""
    program = LOSING.format(number=number, error=error)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", line)


def test_an_error_without_a_signal_is_shown() -> None:
    program = LOSING.format(number="SIGCHLD", error="UserError('x')")
    program = program.replace("    try:", "    try:\n        raise OSError")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "error: x\n")


def test_a_second_one_does_not_show_at_the_end_of_the_program() -> None:
    """Of an interrupt before the command's own work, as while its module is found."""
    code = (
        "import atexit, signal, sys\n"
        "from palm_ds import __main__\n"
        "from palm_ds.cli import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "main.start = lambda: signal.raise_signal(signal.SIGINT)\n"
        "atexit.register(signal.raise_signal, signal.SIGINT)\n"
        "__main__.start()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
