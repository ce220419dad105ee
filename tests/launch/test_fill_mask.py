"""launch/fill_mask.py as a command: texts, lines of the input, JSON, mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_fill_mask import make_model, save

CAPITAL = "The capital of [MASK] is Paris."


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    save(folder, make_model())
    return folder


def command(root: Path, *arguments: object, lines: bytes = b"") -> subprocess.CompletedProcess:
    script = [sys.executable, str(root / "launch/fill_mask.py"), *map(str, arguments)]
    return subprocess.run(script, input=lines, capture_output=True, timeout=120)


def test_texts_and_lines_give_the_same(run_folder: Path, root: Path) -> None:
    said = command(root, run_folder, CAPITAL, "北京[MASK]", "--top", 2)
    read = command(root, run_folder / "hf", "--top", 2, lines=f"{CAPITAL}\n\n北京[MASK]\n".encode())
    assert (said.returncode, said.stderr) == (0, b""), said.stderr.decode()
    assert read.stdout == said.stdout and b"\x1b" not in said.stdout
    first, guesses, second, _ = said.stdout.decode().splitlines()
    assert first == "the capital of [MASK] is paris." and guesses.count("%") == 2
    assert second.replace(" ", "") == "北京[MASK]"


def test_json_is_one_object_a_line(run_folder: Path, root: Path) -> None:
    options = ("--json", "--top", 3, "--task", "phrases", "--hide", "Paris")
    done = command(root, run_folder, *options, "Paris", "The [MASK] of Paris")
    first, second = map(json.loads, done.stdout.decode().splitlines())
    assert first["task"] == "phrases" and first["masks"][0]["was"] == "paris"
    assert [len(mask["guesses"]) for mask in second["masks"]] == [3, 3]


@pytest.mark.parametrize(
    ("arguments", "lines", "message"),
    [
        (("nowhere", CAPITAL), b"", "error: nowhere: no such folder"),
        (("RUN", "no mask here"), b"", "error: there is no [MASK] in 'no mask here'; write"),
        (("RUN", CAPITAL, "--task", "x"), b"", "error: --task x: no such task"),
        (("RUN", CAPITAL, "--top", "0"), b"", "error: --top 0: at least 1 guess"),
        (("RUN",), b"a [MASK]\n\xff [MASK]\n", "error: line 2 of the input is not UTF-8 text"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    run_folder: Path, root: Path, arguments: tuple[str, ...], lines: bytes, message: str
) -> None:
    named = [str(run_folder) if a == "RUN" else a for a in arguments]
    done = command(root, *named, lines=lines)
    assert done.returncode == 2
    assert done.stderr.decode().startswith(message) and done.stderr.count(b"\n") == 1
