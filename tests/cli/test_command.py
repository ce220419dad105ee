"""The display of sub-commands, and how they end."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.table import Table

from palm_ds.cli import inspect, prepare
from palm_ds.cli.command import hint_next
from palm_ds.cli.output import show
from palm_ds.cli.pretrain import COMMAND
from palm_ds.inference import inspect_stream

START = """
import signal, sys
from palm_ds.cli.command import Command
from palm_ds.common.errors import UserError

def run(args):
    {body}

# The tests may run under `nohup`, or in the background of a shell, where Ctrl-C is ignored.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
Command(name="x", summary="", usage="", examples="", add_arguments=lambda parser: None, run=run,
        piped={piped}).start([])
"""


CLEANS_UP = """
    import signal
    try:
        signal.raise_signal(signal.{})
    finally:
        print("cleaned", file=sys.stderr)
"""
FORKS = """
    import os, signal
    child = os.fork()
    if not child:
        signal.raise_signal(signal.SIGTERM)
    return int(os.waitpid(child, 0)[1] != signal.SIGTERM)
"""


FULL_DISK = """
    with open("/dev/full", "w") as file:
        file.write("x")
"""


def start(body: str, *, piped: bool = False, tail: str = "") -> subprocess.CompletedProcess[str]:
    """A command with this body as a program; `tail` reads its output."""
    program = [sys.executable, "-c", START.format(body=body, piped=piped)]
    if not tail:
        return subprocess.run(program, capture_output=True, text=True)
    shell = ["bash", "-c", f'"$0" "$@" | {tail}; exit ${{PIPESTATUS[0]}}']
    return subprocess.run([*shell, *program], capture_output=True, text=True)


@pytest.mark.parametrize("script", ["launch/pretrain.py", "/clone/launch/pretrain.py"])
def test_a_script_shows_its_own_name(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [script])
    text = COMMAND.parser().format_help()
    assert text.startswith(f"usage: python {script} RECIPE")
    assert f"deepspeed --num_gpus 8 {script} mine.yaml" in text
    assert f"torchrun --nproc_per_node 8 {script} mine.yaml" in text
    assert "palm-ds pretrain" not in text and "palm_ds.cli" not in text


@pytest.mark.parametrize(
    ("body", "code", "error"),
    [
        ("return 0", 0, ""),
        ("return 1", 1, ""),
        ("raise UserError('x: wrong')", 2, "error: x: wrong\n"),
        ("raise UserError('x\\x1b[2J: wrong')", 2, "error: x\\x1b[2J: wrong\n"),
        ("raise KeyboardInterrupt", 130, "interrupted\n"),
        (CLEANS_UP.format("SIGTERM"), 143, "cleaned\nended by SIGTERM\n"),
        (CLEANS_UP.format("SIGHUP"), 129, "cleaned\nended by SIGHUP\n"),
        (CLEANS_UP.format("SIGINT"), 130, "cleaned\ninterrupted\n"),
        (FORKS, 0, ""),
        (FULL_DISK, 1, "error: No space left on device\n"),
    ],
)
def test_exit_codes(body: str, code: int, error: str) -> None:
    done = start(body)
    assert (done.returncode, done.stderr) == (code, error)


def test_what_the_locale_cannot_show_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = start("print('a \\u4e2d \\xe4')\n    return 0")
    assert (done.returncode, done.stdout, done.stderr) == (0, "a \\u4e2d \\xe4\n", "")


def test_a_reader_may_close_the_output_early() -> None:
    done = start("while True: print('y')", piped=True, tail="head -1")
    assert (done.stdout, done.stderr) == ("y\n", "")


@pytest.mark.parametrize(
    ("output", "code", "error"),
    [("/dev/full", 2, "error: standard output: No space left on device\n"), ("&-", 0, "")],
)
@pytest.mark.parametrize("count", [1, 10**5])  # written at the end, or before
def test_an_output_without_room_is_one_line(count: int, output: str, code: int, error: str) -> None:
    program = START.format(body=f"print('y' * {count})\n    return 0", piped=False)
    shell = ["bash", "-c", f'"$0" "$@" >{output}', sys.executable, "-c", program]
    done = subprocess.run(shell, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, error)


@pytest.mark.parametrize(
    ("limits", "allowed"), [("ulimit -Sn 300; ulimit -Hn 500", 500), ("ulimit -n 300", 300)]
)
def test_as_many_files_may_be_open_as_the_hard_limit_allows(limits: str, allowed: int) -> None:
    program = START.format(
        body="import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))\n    return 0",
        piped=False,
    )
    shell = ["bash", "-c", f'{limits}; "$0" "$@"', sys.executable, "-c", program]
    done = subprocess.run(shell, capture_output=True, text=True)
    assert done.stdout == f"({allowed}, {allowed})\n"


def test_a_closed_output_is_no_error() -> None:
    """Nor does a file that is opened later take its place."""
    body = """
    with open("/dev/null") as file:
        return int(file.fileno() < 3 or sys.stdout.isatty() or sys.stderr.isatty())
    """
    program = START.format(body=body.strip(), piped=False)
    closed = ["bash", "-c", '"$0" "$@" <&- >&- 2>&-', sys.executable, "-c", program]
    assert subprocess.run(closed).returncode == 0


def test_names_with_brackets_are_shown_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not as markup, of which [/x] would be an error: those of files, and of classes."""
    table = Table("notes [draft].txt")
    table.add_row("[/x]")
    show(argparse.Namespace(json=False, quiet=False), {}, table)
    monkeypatch.setattr(inspect_stream, "summary", lambda _: [table])
    inspect._show(SimpleNamespace(shown=[]))  # type: ignore[arg-type]
    shown = capsys.readouterr().out
    assert shown.count("notes [draft].txt") == shown.count("[/x]") == 2


def test_the_scripts_only_call_the_commands(root: Path) -> None:
    scripts = [*(root / "launch").glob("*.py"), *(root / "tools/convert_ckpt").glob("*.py")]
    assert len(scripts) == 15
    for script in scripts:
        lines = script.read_text().splitlines()
        assert len(lines) <= 40 and "COMMAND.start()" in lines[-1], script


@pytest.mark.parametrize(
    ("terminal", "rank", "shown"), [(True, "0", True), (True, "1", False), (False, "0", False)]
)
def test_what_to_run_next_is_for_the_user_at_a_terminal(
    terminal: bool,
    rank: str,
    shown: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    hint_next("palm-ds report runs/mine", "palm-ds fill-mask runs/mine")
    expected = "next:\n  palm-ds report runs/mine\n  palm-ds fill-mask runs/mine\n"
    assert capsys.readouterr().err == (expected if shown else "")


def test_what_to_run_next_can_be_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if the folder has a space in its name."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    (tmp_path / "texts.txt").write_text("A text here. Another one.\n\n" * 9)
    words = [f"{tmp_path}/my corpus", f"{tmp_path}/texts.txt", "--train", "wordpiece"]
    assert prepare.COMMAND.main([*words, "--vocab_size", "100"]) == 0
    assert f"  palm-ds corpus inspect '{tmp_path}/my corpus'\n" in capsys.readouterr().err
