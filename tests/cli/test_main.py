"""`palm-ds`: every sub-command is listed, shows its help quickly, and has correct examples."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from palm_ds import __version__
from palm_ds.cli.command import Command
from palm_ds.cli.main import SECTIONS, find, help_text, load, main

WORDS = [word for words in SECTIONS.values() for word in words]
SCREEN = 50
"""Lines of a screen of 100 columns."""


def commands(word: str) -> Iterator[Command]:
    found = load(word)
    if isinstance(found, Command):
        yield found
    else:
        yield from found.commands.values()
        yield from [found.default] if found.default else []


COMMANDS = {command.name: command for word in WORDS for command in commands(word)}


def test_every_module_with_a_command_is_listed(root: Path) -> None:
    files = (root / "palm_ds/cli").glob("*.py")
    modules = {file.stem for file in files if "\nCOMMAND = " in file.read_text()}
    assert modules == {word.replace("-", "_") for word in WORDS}


def test_the_list_of_commands_fits_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    out = capsys.readouterr().out
    assert not ended.value.code and out == help_text() + "\n"
    assert len(out.splitlines()) <= SCREEN and max(map(len, out.splitlines())) <= 100
    assert all(re.search(rf"^  {word}  ", out, re.M) for word in WORDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_one_screen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "102")
    text = COMMANDS[name].parser().format_help()
    assert text.startswith(f"usage: palm-ds {name} ") and f"examples:\n  palm-ds {name}" in text
    assert len(text.splitlines()) <= SCREEN
    assert max(map(len, text.splitlines())) <= 100
    assert "==SUPPRESS==" not in text and "local_rank" not in text


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_are_right(name: str) -> None:
    """Each one names an existing command and existing options."""
    lines = COMMANDS[name].examples.replace("\\\n", " ").splitlines()
    found = 0
    for line in lines:
        words = shlex.split(line.partition(" < ")[0], comments=True)
        if words[:1] == ["palm-ds"]:
            command, rest = find(words[1:])
        elif words:
            at = next(i for i, word in enumerate(words) if word.startswith("palm_ds.cli."))
            command, rest = find([words[at].rpartition(".")[2].replace("_", "-"), *words[at + 1 :]])
        else:
            continue
        assert command.parse(rest)
        found += 1
    assert found >= 1


def test_help_needs_no_torch() -> None:
    """Nor does the list of recipes: help appears in a fraction of a second."""
    code = (
        "import sys\nfrom palm_ds.cli import main, recipes\n"
        "for words in main.SECTIONS.values():\n"
        "    for word in words:\n"
        "        found = main.load(word)\n"
        "        found = found.commands.values() if hasattr(found, 'commands') else [found]\n"
        "        print(*(each.parser().format_help() for each in found))\n"
        "main.main(['recipes'])\n"
        "sys.exit(str({'torch', 'deepspeed', 'transformers'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == "set()\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("pretian", 'palm-ds pretian: no such command; did you mean "pretrain"?'),
        ("corpus inspct", 'palm-ds corpus inspct: no such command; did you mean "inspect"?'),
        ("recipes cop small", 'palm-ds recipes cop: no such command; did you mean "copy"?'),
        ("report", "the following arguments are required: RUN; see `palm-ds report --help`"),
        (
            "pretrain x --deepspeed_config y --run-dir z",
            'unrecognized arguments: --run-dir z; did you mean "--run_dir"?; see',
        ),
        (
            "embed m --input t --output o --norm",
            'unrecognized arguments: --norm; did you mean "--normalize"?; see',
        ),
        ("report /nowhere", "/nowhere: not a run folder"),
    ],
)
def test_mistakes_are_one_line(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and out == ""
    assert err.startswith(f"error: {message}") and err.count("\n") == 1


def test_version_and_the_help_of_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    for words, expected in (
        (["--version"], f"palm_ds {__version__}\n"),
        (["corpus"], "usage: palm-ds corpus COMMAND [options]"),
        (["corpus", "--help"], "  export-ernie  "),
        (["recipes", "--help"], "usage: palm-ds recipes [--paths] | copy"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert not ended.value.code and expected in capsys.readouterr().out


def test_as_a_module(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "palm_ds.cli.main", "recipes", "copy", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "cpu.json\n", "")
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 2 and again.stderr.startswith("error: cpu.json: already exists")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("pretrain mine.yml --deepspeed_config cpu", '; did you mean "mine.yaml"?'),
        ("pretrain embedded --deepspeed_config folder", "folder: is a folder; expected a file"),
        ("pretrain folder --deepspeed_config cpu", "folder: is a folder; expected a file"),
        ("suite mine.yaml --deepspeed_config cpu --out x", "mine.yaml: is empty; expected keys"),
        ("suite mine.yml --deepspeed_config cpu --out x", 'file; did you mean "mine.yaml"?'),
        (
            "evaluate --gold x --predictions folder",
            "is a folder; name a file in it, such as folder/",
        ),
        ("evaluate --gold x --predictions foldr/a", "--predictions foldr/a: no such file"),
        ("prepare mine.yaml folder --train wordpiece", "mine.yaml: is a file; name a new folder"),
        ("prepare x folder --train wordpiece --vocab_size 9", "--vocab_size 9: must be at least"),
    ],
)
def test_wrong_files_are_named(
    words: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/mood.predictions.json").touch()
    (tmp_path / "folder/text.txt").write_text("A text.")
    (tmp_path / "mine.yaml").touch()
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    lines = [x for x in capsys.readouterr().err.splitlines() if not x.startswith("note: ")]
    assert ended.value.code == 2 and len(lines) == 1 and lines[0].startswith("error: ")
    assert message in lines[0]
