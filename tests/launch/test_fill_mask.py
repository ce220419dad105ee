"""launch/fill_mask.py: texts, lines of the input, JSON, mistakes."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.inference.test_fill_mask import make_model, save

CAPITAL = "The capital of [MASK] is Paris."


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    save(folder, make_model())
    return folder


def test_texts_and_lines_give_the_same(run_folder: Path, enter) -> None:
    said = enter("fill_mask", run_folder, CAPITAL, "北京[MASK]", "--top", 2)
    lines = f"{CAPITAL}\n\n北京[MASK]\n".encode()
    read = enter("fill_mask", run_folder / "hf", "--top", 2, lines=lines)
    assert (said.code, said.err) == (0, "") and read.out == said.out and "\x1b" not in said.out
    first, guesses, second, _ = said.out.splitlines()
    assert first == "the capital of [MASK] is paris." and guesses.count("%") == 2
    assert second.replace(" ", "") == "北京[MASK]"


def test_json_is_one_object_per_line(run_folder: Path, enter) -> None:
    options = ("--json", "--top", 3, "--task", "phrases", "--hide", "Paris")
    said = enter("fill_mask", run_folder, *options, "Paris", "The [MASK] of Paris")
    first, second = map(json.loads, said.out.splitlines())
    assert first["task"] == "phrases" and first["masks"][0]["was"] == "paris"
    assert [len(mask["guesses"]) for mask in second["masks"]] == [3, 3]


@pytest.mark.parametrize(
    ("arguments", "lines", "message"),
    [
        (("nowhere", CAPITAL), b"", "error: nowhere: no such file or folder"),
        (("RUN", "no mask here"), b"", "error: there is no [MASK] in 'no mask here'; write"),
        (("RUN", CAPITAL, "--task", "x"), b"", "error: --task x: no such task"),
        (("RUN", CAPITAL, "--top", "0"), b"", "error: --top 0: expected at least 1"),
        (("RUN",), b"a [MASK]\n\xff [MASK]\n", "error: <stdin>:2: not UTF-8 text"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    run_folder: Path, enter, arguments: tuple[str, ...], lines: bytes, message: str
) -> None:
    named = [run_folder if a == "RUN" else a for a in arguments]
    said = enter("fill_mask", *named, lines=lines)
    assert said.code == 2
    assert said.err.startswith(message) and said.err.count("\n") == 1


@pytest.mark.slow
def test_a_process_whose_output_is_closed_early(run_folder: Path, root: Path) -> None:
    """`| head -1`: the command ends quietly when its output is closed."""
    command = shlex.join([sys.executable, str(root / "launch/fill_mask.py"), str(run_folder)])
    endless = f"yes {shlex.quote(CAPITAL)} | {command} | head -1"
    done = subprocess.run(endless, shell=True, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("the capital of [MASK] is paris.\n", "")
