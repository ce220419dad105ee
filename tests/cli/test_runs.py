"""The commands of the runs that `ablate`, `suite` and `sweep` start, and their tables."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from palm_ds.cli.main import main
from palm_ds.cli.runs import command_of, slots_of, without_onnx
from palm_ds.cli.sweep import COMMAND as SWEEP
from palm_ds.common.errors import UserError
from tests.helpers.small_corpus import write_small_corpus
from tests.helpers.warm_python import run
from tests.train.sweeps.test_search_space import write


@pytest.mark.parametrize(
    ("launcher", "option"),
    [
        ("/usr/bin/python", "-m"),
        ("deepspeed --num_gpus 8", "--module"),
        ("/env/bin/deepspeed", "--module"),
        ("python -m deepspeed.launcher.runner", "--module"),
        ("torchrun --nproc_per_node 2", "-m"),
        ("python -m torch.distributed.run --standalone", "-m"),
        ("mpirun -n 2 python", "-m"),
    ],
)
def test_a_launcher_starts_the_module(launcher: str, option: str) -> None:
    command = command_of(launcher.split(), "pretrain", "x.yaml", "--run_dir", 3)
    end = [option, "palm_ds.cli.pretrain", "x.yaml", "--run_dir", "3"]
    assert command == [*launcher.split(), *end]


def test_runs_of_a_launcher_are_one_at_a_time() -> None:
    assert slots_of(0, True) == slots_of(1, True) == [{}]
    with pytest.raises(UserError, match="--jobs 2: the launcher gives each run all devices"):
        slots_of(2, True)


def test_many_runs_write_onnx_only_on_request() -> None:
    assert without_onnx({"seed": 1}) == ["export_onnx=[]"]
    assert without_onnx({"export_onnx": ["fp32"]}) == []


def test_a_sweep_without_a_best_recipe_names_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (out := tmp_path / "out").mkdir()
    words = ["--deepspeed_config", "cpu", "--out", str(out), "--table"]
    assert SWEEP.main([str(write(tmp_path)), *words]) == 0
    assert capsys.readouterr().out.endswith(f"also in {out}/sweep.md and sweep.json\n")


def test_a_table_of_a_folder_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").mkdir()
    words = ["--deepspeed_config", "cpu", "--out", str(tmp_path / "rus"), "--table"]
    with pytest.raises(SystemExit):
        SWEEP.main([str(write(tmp_path)), *words])
    assert f'no such folder; did you mean "{tmp_path}/runs"?' in capsys.readouterr().err
    assert not (tmp_path / "rus").exists()


PRETRAIN = """
backbone: {{preset: tiny}}
length: 32
batch: 4 rows
sources: {{mine: {{corpus: {corpus}}}}}
tasks: {{knowledge_masking: {{source: mine}}, sentence_distance: {{source: mine}}}}
stages: [{{knowledge_masking: 3}}, {{sentence_distance: 3}}]
held_out: 0.1
"""


ENDS = """
import os, signal, sys
from palm_ds.cli.command import CONTINUES, Command
from palm_ds.cli.runs import alone_in
from pathlib import Path

def run(args):
    with alone_in(Path(sys.argv[1])):
        signal.raise_signal(int(sys.argv[2]))

# The tests may run under `nohup`, or in the background of a shell, where Ctrl-C is ignored.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
Command(name="x", summary="", usage="", examples="", add_arguments=lambda parser: None, run=run,
        interrupted=CONTINUES).start([])
"""


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGINT, 130, "stopped"),
        (signal.SIGUSR1, 130, "stopped"),
        (signal.SIGTERM, 143, "ended by SIGTERM"),
        (signal.SIGHUP, 129, "ended by SIGHUP"),
    ],
)
def test_signals_end_a_command_of_runs_as_they_end_others(
    number: int, code: int, said: str, tmp_path: Path
) -> None:
    """SIGTERM and SIGHUP were 130."""
    done = run(["-c", ENDS, tmp_path, int(number)])
    assert done.stderr == f"{said}; run the same command again to continue\n"
    assert done.returncode == code
    assert not (tmp_path / "run.lock").exists()


class RunsError(Exception):
    """The runs of a command are not made here."""


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("suite", "suite.run_all"),
        ("ablate", "ablation.run_all"),
        ("sweep", "search.Search.run"),
    ],
)
def test_the_runs_of_a_folder_are_made_by_one_command(
    name: str,
    made: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A suite took the runs of another one for failed, and began its next ones."""
    sweep = write(tmp_path)
    (tmp_path / "suite.yaml").write_text(f"{{seeds: 1, recipes: [{tmp_path}/recipe.yaml]}}")
    write_small_corpus(tmp_path / "corpus")
    (tmp_path / "pretrain.yaml").write_text(PRETRAIN.format(corpus=tmp_path / "corpus"))
    files = {"suite": tmp_path / "suite.yaml", "ablate": tmp_path / "pretrain.yaml", "sweep": sweep}
    words = [name, str(files[name]), "--deepspeed_config", "cpu", "--out", str(tmp_path / "out")]

    def meanwhile(*_: object) -> None:
        monkeypatch.setattr(f"palm_ds.train.sweeps.{made}", another)
        with pytest.raises(SystemExit):
            main(words)
        raise RunsError

    def another(*_: object) -> None:
        pytest.fail("it began runs that another command makes")

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(f"palm_ds.train.sweeps.{made}", meanwhile)
    with pytest.raises(RunsError):
        main(words)
    assert f"error: run folder {tmp_path}/out: another run is using it" in capsys.readouterr().err
