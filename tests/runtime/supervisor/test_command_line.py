"""What each host starts, for every way to launch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from palm_ds.common.errors import UserError
from palm_ds.runtime.deepspeed.deepspeed_import import import_deepspeed
from palm_ds.runtime.supervisor.command_line import (
    _FLAGS,
    _VALUED,
    Place,
    understand,
    variables_for_other_hosts,
)

HERE = Place(number=0, address="10.0.0.1", port=23456)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("deepspeed", "torchrun", "mpirun"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


PORT = "--master_port 23456"


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("deepspeed --num_gpus 2 s.py --x", f"deepspeed {PORT} --num_gpus 2 s.py --x"),
        ("deepspeed --master_port 7 s.py", "deepspeed --master_port 7 s.py"),
        ("deepspeed --master_port=7 s.py", "deepspeed --master_port=7 s.py"),
        ("deepspeed --no_ssh --node_rank 1 s.py", "deepspeed --no_ssh --node_rank 1 s.py"),
        ("deepspeed --module m --master_port 7", f"deepspeed {PORT} --module m --master_port 7"),
        ("torchrun --nproc_per_node 2 s.py", f"torchrun {PORT} --nproc_per_node 2 s.py"),
        ("torchrun --standalone s.py", "torchrun --standalone s.py"),
        ("torchrun --nnodes=2 s.py", "torchrun --nnodes=2 s.py"),
        ("mpirun -n 2 python s.py", "mpirun -n 2 python s.py"),
    ],
)
def test_one_host_has_a_free_port_unless_one_is_given(given, made, folder) -> None:
    assert (
        understand(given.split()).on(HERE)
        == [str(folder / "x")[:-1] + made.split()[0]] + (made.split()[1:])
    )


def test_python_and_a_module_are_launchers_too(folder) -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "s.py"]
    assert understand(words).on(HERE) == [*words[:3], "--master_port", "23456", "s.py"]


def test_hosts_take_the_place_of_pdsh(folder) -> None:
    (folder / "hosts").write_text("# ours\nw1 slots=2\n\nw2 slots=4  # larger\nw3 slots=2\n")
    words = "deepspeed -q -H hosts --master_port 29500 --num_gpus 2 --module m --lr 1"
    found = understand(words.split())
    assert list(found.slots) == ["w1", "w2", "w3"]
    assert found.hosts_file(["w1", "w3"]) == "w1 slots=2\nw3 slots=2\n"
    made = found.on(Place(number=1, address="10.0.0.1", port=23456))
    assert " ".join(made[1:]) == (
        "-q --num_gpus 2 --module --no_ssh --hostfile @FOLDER@/hosts --node_rank 1 "
        "--master_addr 10.0.0.1 --master_port 29500 m --lr 1"
    )


def test_a_hostfile_of_an_editor_that_marks_unicode(folder) -> None:
    (folder / "hosts").write_text("w1 slots=2\nw2 slots=2\n", encoding="utf-8-sig")
    assert list(understand(["deepspeed", "-H", "hosts", "s.py"]).slots) == ["w1", "w2"]


@pytest.mark.parametrize("option", ["--host hosts", "--hostf=hosts", "-H=hosts", "-Hhosts"])
def test_argparse_takes_a_hostfile_in_other_forms(option, folder) -> None:
    """A run on two hosts would have been one on this machine."""
    (folder / "hosts").write_text("w1 slots=2\nw2 slots=2\n")
    found = understand(f"deepspeed {option} --master_p 29500 --num_g=2 --mod m --lr 1".split())
    assert list(found.slots) == ["w1", "w2"]
    made = " ".join(found.on(Place(number=1, address="10.0.0.1", port=23456))[1:])
    assert made == (
        "--num_gpus 2 --module --no_ssh --hostfile @FOLDER@/hosts --node_rank 1 "
        "--master_addr 10.0.0.1 --master_port 29500 m --lr 1"
    )


def test_every_option_of_deepspeed_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    """Another one may have a value, or the first letters of one of these."""
    import_deepspeed()
    from deepspeed.launcher.runner import parse_args

    with pytest.raises(SystemExit):
        parse_args(["--help"])
    known = {name for name in (*_FLAGS, *_VALUED) if name.startswith("--")}
    assert set(re.findall(r"--\w+", capsys.readouterr().out)) == known


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "palm-ds run: no command; write it after `--`"),
        ("nothing-here s.py", "there is no program 'nothing-here'"),
        ("deepspeed --hostfile host s.py", 'no such file; did you mean "hosts"'),
        ("deepspeed --hostfile hosts --include w1 s.py", "--include: name the hosts in hosts only"),
        ("deepspeed --hostfile wrong s.py", "wrong:2: expected `HOST slots=N`, each host once"),
        ("deepspeed --hostfile letters s.py", "letters:1: expected `HOST slots=N`, each host once"),
        ("deepspeed --hostfile option s.py", "option:1: expected `HOST slots=N`, each host once"),
        ("deepspeed --hostfile empty s.py", "empty: names no host"),
        ("deepspeed --hostfile bytes s.py", "bytes: cannot be read as text: 'utf-8' codec"),
    ],
)
def test_mistakes_are_one_line(words, message, folder) -> None:
    (folder / "hosts").write_text("w1 slots=2\n")
    (folder / "wrong").write_text("w1 slots=2\nw1 slots=2\n")
    (folder / "letters").write_text("w1 slots=one\n")
    (folder / "option").write_text("-oProxyCommand=x slots=1\n")  # ssh would run x
    (folder / "empty").write_text("# none\n")
    (folder / "bytes").write_bytes(b"w1 slots=2\n\xff\n")
    with pytest.raises(UserError) as error:
        understand(words.split())
    assert message in str(error.value)


def test_variables_for_other_hosts(folder, monkeypatch) -> None:
    """A comment or a blank line in .deepspeed_env ends `deepspeed` itself with a traceback."""
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("SECRET", "mine")
    (folder / ".deepspeed_env").write_text("# comment\n\nA=b=c\nNCCL_DEBUG=INFO\n")
    found = variables_for_other_hosts()
    assert (found["A"], found["NCCL_DEBUG"]) == ("b=c", "INFO") and "SECRET" not in found
    (folder / "hosts").write_text("w1 slots=2\nw2 slots=2\n")
    assert understand(["deepspeed", "-H", "hosts", "s.py"]).variables == found
    assert understand(["deepspeed", "s.py"]).variables == {}


@pytest.mark.parametrize("line", ["NCCL_DEBUG INFO", "export A=b", "A = b", "=b", "1A=b", "A=\0"])
def test_a_line_that_sets_no_variable_is_named(line, folder, monkeypatch) -> None:
    """They were dropped, or became variables that nothing reads."""
    monkeypatch.setenv("HOME", str(folder))
    (folder / "hosts").write_text("w1 slots=2\n")
    (folder / ".deepspeed_env").write_text(f"A=b\n{line}\n")
    with pytest.raises(UserError) as error:
        understand(["deepspeed", "-H", "hosts", "s.py"])
    assert str(error.value).endswith(f".deepspeed_env:2: expected `NAME=VALUE`, got {line!r}")


def test_a_named_file_of_variables_must_exist(folder, monkeypatch) -> None:
    monkeypatch.setenv("DS_ENV_FILE", "enviroment")
    (folder / "environment").write_text("A=b\n")
    with pytest.raises(UserError, match='DS_ENV_FILE=enviroment: .*; did you mean "environment"'):
        variables_for_other_hosts()
    monkeypatch.setenv("DS_ENV_FILE", "environment")
    assert variables_for_other_hosts()["A"] == "b"


def test_it_is_light() -> None:
    """It runs for weeks, on every host, next to the training."""
    code = "import palm_ds.cli.run, palm_ds.runtime.supervisor.agent, sys\n"
    code += "import palm_ds.runtime.supervisor.supervise\n"
    code += "print({'torch', 'numpy', 'deepspeed'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
