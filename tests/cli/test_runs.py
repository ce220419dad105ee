"""The commands of the runs that `ablate`, `suite` and `sweep` start, and their tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from palm_ds.cli.runs import command_of, slots_of, without_onnx
from palm_ds.cli.sweep import COMMAND as SWEEP
from palm_ds.common.errors import UserError
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
