"""`palm-ds`: every sub-command is listed, shows its help quickly, and has correct examples."""

from __future__ import annotations

import os
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
from palm_ds.corpus.options import LANGUAGES
from tests.helpers.saved_model import save_model
from tests.helpers.small_corpus import write_small_corpus

WORDS = [word for words in SECTIONS.values() for word in words]
ROOT = Path(__file__).resolve().parents[2]
SCREEN = 52
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


def test_the_list_of_commands_needs_no_settings() -> None:
    """pydantic takes longer to import than everything else that the list needs."""
    code = (
        "import sys\nfrom palm_ds.cli import main\n"
        "try:\n    main.main(['--help'])\n"
        "finally:\n    sys.exit(str({'pydantic', 'yaml'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == "set()\n" and "pretrain" in done.stdout


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
            "pretrain x --deepspeed_config y --run-dri=z",
            'unrecognized arguments: --run-dri=z; did you mean "--run_dir"?; see',
        ),
        (
            "embed m --input t --output o --norm",
            'unrecognized arguments: --norm; did you mean "--normalize"?; see',
        ),
        ("predict m --inptu t", 'unrecognized arguments: --inptu; did you mean "--input"?; see'),
        ("report /nowhere", "/nowhere: not a run folder"),
        ("help pretian", 'palm-ds pretian: no such command; did you mean "pretrain"?'),
        ("completion tcsh", "completion tcsh: expected one of bash, zsh, fish"),
        (
            "pretrain x --deepspeed_config y --run_dir s3://b/x",
            "argument --run_dir: s3://b/x: is a",
        ),
        ("pretrain x --deepspeed_config y --run_dir=", "argument --run_dir: empty; name a place"),
        ("suite x --deepspeed_config y --out hf://b/x", "argument --out: hf://b/x: is a URL"),
        ("run --restarts -1 -- true", "--restarts: expected 0 or more, got -1"),
        (
            "run deepspeed x",
            "unrecognized arguments: deepspeed x; see `palm-ds run --help`; write the",
        ),
        ("convert m n --to hf", "--to hf: no such format; known: huggingface, onnx, paddle, palm"),
        ("run --silence nan -- true", "--silence: expected a finite number, got NaN"),
        ("mine m x --output y --column text", "--column: needs --passages, the files that have it"),
        ("merge a b --out o --held_out 0.1", "--held_out: needs --corpus"),
        ("merge a b --out o --corpus c --examples 0", "--examples: expected a number above 0"),
        ("merge a b --out o --corpus nowhere", "corpus nowhere: no such folder"),
        ("evaluate --pairs x --model m --json .", "--json .: is a folder; name a file in it"),
        ("evaluate --gold x --predictions y --json x", "x: is also an input"),
        (
            "evaluate --pairs x --model m --kind ranking",
            "--kind: is not for --pairs; remove it",
        ),
        ("evaluate --gold x --predictions y --score masked", "--score: needs --pairs"),
        ("evaluate --gold x --predictions y --html .", "--html .: is a folder; name a file in it"),
        ("evaluate --pairs x --model m --format text", "--format: is not for --pairs"),
        ("predict m --input x --output o --html .", "--html .: is a folder; name a file in it"),
        ("predict m --input x --output o --html x", "x: is also an input; name"),
        ("resize m o --multiple 8 --reuse_unused", "reuse_unused: only with new tokens; give --a"),
        ("resize m o --multiple 8 --how interpolate", "how: only with new positions; give --pos"),
        (
            "prepare o x --tokenizer t --vocab_size 99",
            "--vocab_size: is of a tokenizer to --train; --tokenizer has its own",
        ),
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


def test_what_cannot_be_compared_is_not_merged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = str(save_model(tmp_path / "model")), tmp_path / "out"
    write_small_corpus(tmp_path / "corpus")
    with pytest.raises(SystemExit):
        main(["merge", model, model, "--out", str(out), "--corpus", str(tmp_path / "corpus")])
    assert "prepared with a tokenizer other than that of" in capsys.readouterr().err
    assert not out.exists()


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
    command = [sys.executable, "-m", "palm_ds", "recipes", "copy", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "cpu.json\n", "")
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 2 and again.stderr.startswith("error: cpu.json: already exists")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("pretrain mine.yml --deepspeed_config cpu", '; did you mean "mine.yaml"?'),
        ("pretrain mine.yaml --output_dir runs/a", '--output_dir; did you mean "--run_dir"?'),
        ("pretrain mine.yaml --model_name_or_path x", '_path; did you mean "--init_from"?'),
        ("pretrain mine.yaml --deepspeed x", '--deepspeed; did you mean "--deepspeed_config"?'),
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


def test_help_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["pretrain"], ["corpus"], ["corpus", "inspect"], ["fill_mask"]):
        shown = []
        for line in (["help", *words], [*words, "--help"]):
            with pytest.raises(SystemExit) as ended:
                main(line)
            assert not ended.value.code
            shown.append(capsys.readouterr().out)
        assert shown[0] == shown[1] and shown[0].startswith("usage: palm-ds ")


def test_options_may_be_written_with_dashes() -> None:
    """As a word or with `=`; values, and what follows `--`, stay as they are."""
    line = "x --deepspeed-config=a-b.json --run-dir my-run a.b=c-d --print-config"
    args = COMMANDS["pretrain"].parse(line.split())
    assert (args.deepspeed_config, str(args.run_dir)) == ("a-b.json", "my-run")
    assert args.overrides == ["a.b=c-d"] and args.print_config
    line = "m --input a --output b --no_normalize --max-length 9"
    args = COMMANDS["embed"].parse(line.split())
    assert args.normalize is False and args.max_length == 9
    args = COMMANDS["run"].parse(["--min-hosts", "2", "--", "x", "--run-dir", "y"])
    assert args.min_hosts == 2 and args.command == ["x", "--run-dir", "y"]


@pytest.mark.parametrize("name", COMMANDS)
def test_results_can_be_json_and_all_else_quiet(name: str) -> None:
    command = COMMANDS[name]
    options = {text for action in command.parser()._actions for text in action.option_strings}
    assert command.results == (name not in ("run", "serve", "completion"))
    assert not command.results or {"--json", "--quiet"} <= options


def test_an_empty_plan_is_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["pretrain", "embedded", "--deepspeed_config", "cpu", "--plan", ""])
    assert ended.value.code == 2 and "error: plan: no GPUs" in capsys.readouterr().err


# Ctrl-C while modules are imported --------------------------------------------------------------

HOOK = """
import signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupts())
sys.argv = ["palm-ds", *{words!r}]
from palm_ds.__main__ import start
start()
"""


@pytest.mark.parametrize(
    "name",
    [
        "palm_ds.cli",
        "palm_ds.cli.interrupts",
        "palm_ds.cli.main",
        "palm_ds.common.errors",
        "palm_ds.cli.serve",
        "torch",
    ],
)
def test_ctrl_c_at_the_start_is_one_line(name: str, tmp_path: Path) -> None:
    code = HOOK.format(name=name, words=["serve", str(save_model(tmp_path)), "--port", "0"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr, done.stdout) == (130, "interrupted\n", "")


def test_the_package_imports_nothing_slow_before_ctrl_c_is_caught() -> None:
    code = (
        "import sys; known = {*sys.modules}; import palm_ds.__main__; print({*sys.modules} - known)"
    )
    done = subprocess.run([sys.executable, "-SsEc", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "typing" not in done.stdout, done.stdout + done.stderr


def test_the_console_script_starts_there(root: Path) -> None:
    assert 'palm-ds = "palm_ds.__main__:start"' in (root / "pyproject.toml").read_text()


# Completion -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("palm-ds pre", {"prepare", "pretrain", "predict"}),
        ("palm-ds help ser", {"serve"}),
        ("palm-ds corpus ", {"inspect", "annotate", "export-ernie"}),
        ("palm-ds pretrain --pr", {"--profile", "--profile_memory", "--print_config"}),
        ("palm-ds pretrain finetune/r", {"finetune/rte.yaml"}),
        ("palm-ds pretrain mi", {"mine.yaml"}),
        ("palm-ds pretrain x --deepspeed_config zero1", {"zero1_bf16.json"}),
        ("palm-ds prepare out in --language ", set(LANGUAGES)),
    ],
)
def test_completion(line: str, expected: set[str], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").touch()
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    asked["_ARGCOMPLETE_STDOUT_FILENAME"] = str(tmp_path / "found")
    command = [sys.executable, "-m", "palm_ds"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **asked}, capture_output=True)
    assert not done.stderr
    found = {word.strip() for word in (tmp_path / "found").read_text().split("\v")}
    assert expected <= found and all(word.startswith(line.split(" ")[-1]) for word in found)


def test_a_shell_completes(tmp_path: Path) -> None:
    """bash's own function, with the script that the command prints."""
    program = f'palm-ds() {{ {sys.executable} -m palm_ds "$@"; }}; export -f palm-ds\n'
    ask = 'eval "$(palm-ds completion bash)"; complete -p palm-ds'
    done = subprocess.run(["bash", "-c", program + ask], capture_output=True, text=True)
    assert done.returncode == 0 and "palm-ds" in done.stdout and not done.stderr
