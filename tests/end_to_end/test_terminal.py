"""Every command on a terminal: whole and narrow, without colors, and with Ctrl-C; and into a pipe,
as JSON and closed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from palm_ds.cli.main import SECTIONS
from palm_ds.runtime.checkpoint.checkpoint import steps_in
from tests.helpers.saved_model import save_model, texts, write_rows
from tests.helpers.small_corpus import write_small_corpus
from tests.helpers.small_index import small_index
from tests.helpers.terminal import COLOR, Terminal
from tests.helpers.warm_python import Program, run

TINY = "{num_layers: 1, hidden_size: 16, num_heads: 2, intermediate_size: 32, max_positions: 64}"
RECIPE = """
backbone: %s
length: 32
batch: 4 rows
sources: {mine: {corpus: corpus}}
tasks: {knowledge_masking: {source: mine}}
stages: [{knowledge_masking: 3}]
held_out: 0.1
export_onnx: []
"""
TABLE = """
init_from: model
length: 32
batch: 4 examples
sources: {mine: {table: rows.jsonl, validation: rows.jsonl}}
tasks: {mood: {kind: classification, source: mine}}
stages: [{mood: 3}]
export_onnx: []
"""
TRAINING = ("--deepspeed_config", "cpu")
IN_ONE_PROCESS = """
import sys
from palm_ds.cli.main import main
from palm_ds.train.sweeps import ablation

def here(words):
    at = words.index("-m")
    return main([words[at + 1].rpartition(".")[2], *words[at + 2 :]])

ablation.run_and_wait = here
sys.exit(main(sys.argv[1:]))
"""
"""`palm-ds` whose ablation starts no programs."""
COMMANDS: dict[str, Sequence[str]] = {
    "prepare": ("{out}", "texts.txt", "--train", "wordpiece", "--vocab_size", "100"),
    "corpus": ("inspect", "corpus"),
    "adapt": ("run", "texts.txt", "--out", "{out}", "--recipe_only"),
    "pretrain": ("pretrain.yaml", *TRAINING, "--run_dir", "{out}"),
    "finetune": ("table.yaml", *TRAINING, "--run_dir", "{out}"),
    "run": ("--restarts", "1", "--", "true"),
    "submit": ("--slurm", "pretrain.yaml", *TRAINING, "--run_dir", "{out}", "--print"),
    "suite": ("suite.yaml", *TRAINING, "--out", "no_runs", "--table"),
    "sweep": ("sweep.yaml", *TRAINING, "--out", "no_runs", "--table"),
    "ablate": ("pretrain.yaml", *TRAINING, "--out", "ablation", "--schedules", "joint"),
    "inspect": ("pretrain.yaml", "--rows", "1"),
    "report": ("run",),
    "augment": ("rows.jsonl", "--output", "{out}.jsonl", "--copies", "2"),
    "mine": ("run", "pairs.jsonl", "--output", "{out}.jsonl"),
    "teach": ("taught.yaml", "--output", "{out}.parquet"),
    "predict": ("model", "--input", "rows.jsonl", "--output", "{out}", "--tasks", "mood"),
    "evaluate": ("--gold", "rows.jsonl", "--predictions", "rows.jsonl", "--kind", "classification"),
    "fill-mask": ("run", "w1 [MASK] w3"),
    "embed": ("run", "--input", "texts.txt", "--output", "{out}.npy"),
    "index": ("info", "index"),
    "serve": ("model", "--port", "0"),
    "convert": ("model", "{out}", "--unchecked"),
    "verify": ("run",),
    "show": ("model",),
    "merge": ("model", "model", "--out", "{out}"),
    "resize": ("model", "{out}", "--multiple", "64"),
    "push": ("hf", "org/name", "--dry_run"),
    "download": ("ls",),
    "recipes": (),
    "completion": ("bash",),
}
QUIET = {
    "prepare",
    "pretrain",
    "finetune",
    "report",
    "augment",
    "mine",
    "teach",
    "embed",
    "convert",
    "merge",
    "resize",
}
"""Those whose result is a file."""
SLOW = {"pretrain", "finetune", "teach"}
"""Those that train."""


SOME = {"corpus", "finetune", "inspect", "evaluate", "fill-mask", "show", "recipes", "completion"}
"""Those that the default run also has in a narrow window, interrupted, and with a closed pipe."""


def each(names: Iterable[str], usual: Container[str] = COMMANDS) -> list[ParameterSet]:
    """`usual`: those of the default run."""
    slow, further = pytest.mark.slow, pytest.mark.exhaustive
    return [
        pytest.param(x, marks=[slow] * (x in SLOW) + [further] * (x not in usual)) for x in names
    ]


NAMES = each(COMMANDS)
WITH_RESULTS = each(x for x in COMMANDS if x not in ("run", "serve", "completion"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the input of every command."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "no_runs").mkdir()
    write_small_corpus(folder / "corpus")
    save_model(folder / "model")
    write_rows(folder / "rows.jsonl", texts(12))
    pairs = [{"query": f"what is w{n}?", "positive": f"w{n} is here"} for n in range(9)]
    write_rows(folder / "pairs.jsonl", pairs)
    (folder / "texts.txt").write_text("A text here. Another one.\n\n" * 40)
    (folder / "pretrain.yaml").write_text(RECIPE % TINY)
    (folder / "table.yaml").write_text(TABLE)
    (folder / "taught.yaml").write_text(f"{TABLE}teacher: {{path: model}}\n")
    (folder / "suite.yaml").write_text("{seeds: 1, recipes: [table.yaml]}")
    space = "{optimizer.lr: [1.0e-4, 2.0e-4]}"
    (folder / "sweep.yaml").write_text(
        f"{{recipe: table.yaml, metric: mood.accuracy, space: {space}}}"
    )
    trained = palm_ds(folder, "pretrain", "pretrain.yaml", *TRAINING, "--run_dir", "run")
    assert trained.returncode == 0, trained.stderr
    (folder / "hf").symlink_to("run/hf")
    small_index(folder / "index", ["a", "b"]).close()
    # Its table alone is shown here; tests/distributed/test_ablate.py has its programs.
    ablated = run(["-c", IN_ONE_PROCESS, "ablate", *COMMANDS["ablate"]], cwd=folder)
    assert ablated.returncode == 0, ablated.stderr
    return folder


def words(name: str, out: Path) -> list[str]:
    return ["-m", "palm_ds", name, *(word.format(out=out) for word in COMMANDS[name])]


def palm_ds(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(["-m", "palm_ds", *arguments], cwd=folder)


def on_terminal(place: Path, name: str, out: Path, **options: Any) -> tuple[int, str, str]:
    """The exit code of a command, what was written, and that without control sequences."""
    terminal = Terminal(words(name, out), cwd=place, **options)
    if name == "serve":
        terminal.wait_for("serving on")
        terminal.press("\x03")
    code, text = terminal.end()
    assert "Traceback" not in text and "Error:" not in text, text
    return code, text, terminal.raw


def test_every_command_is_here() -> None:
    assert set(COMMANDS) == {word for words in SECTIONS.values() for word in words}


@pytest.mark.parametrize("name", NAMES)
def test_on_a_terminal(name: str, place: Path, tmp_path: Path) -> None:
    code, text, _ = on_terminal(place, name, tmp_path / "out")
    assert code == 0, text
    assert text or name == "run"


@pytest.mark.parametrize("name", each(COMMANDS, SOME | {"convert", "suite"}))
def test_in_a_narrow_window_without_colors(name: str, place: Path, tmp_path: Path) -> None:
    no_color = {"NO_COLOR": "1"}
    code, text, raw = on_terminal(place, name, tmp_path / "out", columns=32, rows=8, env=no_color)
    assert code == 0, text
    assert not COLOR.search(raw)


@pytest.mark.parametrize("name", each(COMMANDS, SOME | {"serve", "prepare", "run"}))
def test_ctrl_c_is_one_line(name: str, place: Path, tmp_path: Path) -> None:
    """At any time, and more than once."""
    terminal = Terminal(words(name, tmp_path / "out"), cwd=place)
    began = time.monotonic()
    while terminal.program.poll() is None and time.monotonic() - began < 60:
        time.sleep(0.15)
        terminal.press("\x03")
    code, text = terminal.end()
    assert code in (0, 75, 130), text
    assert "Traceback" not in text and "Exception ignored" not in text, text


@pytest.mark.slow
def test_a_run_whose_terminal_is_closed_saves(place: Path, tmp_path: Path) -> None:
    """It ended with an error of its next line, and without a checkpoint."""
    long = ("stages=[{knowledge_masking: 100000}]", "log.every=1", "held_out=0")
    terminal = Terminal([*words("pretrain", tmp_path / "out"), *long], cwd=place)
    terminal.wait_for("2/100000")
    terminal.close()
    assert terminal.end()[0] == 75
    assert steps_in(tmp_path / "out/checkpoints")


@pytest.mark.parametrize("name", WITH_RESULTS)
def test_json_is_all_that_is_printed(name: str, place: Path, tmp_path: Path) -> None:
    done = run([*words(name, tmp_path / "out"), "--json"], cwd=place)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.mark.parametrize("name", each(sorted(QUIET)))
def test_quiet_is_silent(name: str, place: Path, tmp_path: Path) -> None:
    done = run([*words(name, tmp_path / "out"), "--quiet"], cwd=place)
    notes = [line for line in done.stderr.splitlines() if not line.startswith("note: cpu: ")]
    assert (done.returncode, done.stdout, notes) == (0, "", [])


@pytest.mark.parametrize("name", each((x for x in COMMANDS if x != "serve"), SOME))
def test_a_reader_that_has_gone_is_no_error(name: str, place: Path, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb", buffering=0) as output:
        program = Program(words(name, tmp_path / "out"), cwd=place, output=output, apart=True)
    code = program.wait(120)
    error = program.errors()
    program.clear_away()
    assert code in (0, 128 + signal.SIGPIPE, -signal.SIGPIPE), error
    assert "Traceback" not in error and "BrokenPipe" not in error
