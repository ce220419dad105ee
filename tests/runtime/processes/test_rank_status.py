"""What a process tells `palm-ds run`."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import psutil
import pytest

from palm_ds.runtime.processes import rank_status
from tests.helpers import warm_python


def test_nothing_is_written_unless_asked_for(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv(rank_status.FOLDER, raising=False)
    rank_status.report(0, step=1)
    monkeypatch.setenv(rank_status.FOLDER, str(tmp_path / "gone"))
    rank_status.report(0, step=1)
    assert not list(tmp_path.iterdir())


def test_reports_add_up_and_end_with_the_code(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(rank_status.FOLDER, str(tmp_path))
    rank_status.report(3, step=6, saved=4)
    rank_status.report(3, step=7)
    rank_status.report(1, code=2, why="a very long reason " * 9)
    first, second = rank_status.read_all(tmp_path)
    assert (second.rank, second.step, second.saved, second.code) == (3, 7, 4, None)
    assert second.running and second.pid == os.getpid()
    assert (first.rank, first.code) == (1, 2)
    assert (tmp_path / "3.json").stat().st_size == (tmp_path / "1.json").stat().st_size


def test_a_shorter_report_replaces_a_long_one(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(rank_status.FOLDER, str(tmp_path))
    rank_status.report(0, saved=4, code=2, why="a reason " * 200)
    rank_status.report(0, code=1, why="another")
    (found,) = rank_status.read_all(tmp_path)
    assert (found.saved, found.code, found.why) == (4, 1, "another")


def test_a_full_disk_ends_no_process(tmp_path: Path, monkeypatch) -> None:
    """The threads that end a process whose peers are lost, or that hangs, report first: they ended
    instead, and the process went on waiting."""

    def full(*words: object, **options: object) -> object:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv(rank_status.FOLDER, str(tmp_path))
    rank_status.report(0, step=3)
    monkeypatch.setattr(rank_status, "open", full, raising=False)
    rank_status.report(0, code=42, why="no step for 10 minutes")
    (found,) = rank_status.read_all(tmp_path)
    assert (found.step, found.code) == (3, None)
    with pytest.raises(OSError, match="No space left"):
        rank_status.report(1)  # `palm-ds run` would not know that it has begun


def test_a_clock_that_is_set_ends_no_process(tmp_path: Path, monkeypatch) -> None:
    """psutil adds the time of the start of the machine, which Linux derives from the clock."""
    monkeypatch.setenv(rank_status.FOLDER, str(tmp_path))
    rank_status.report(0)
    boot = psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot + 1)
    (found,) = rank_status.read_all(tmp_path)
    assert found.running


@pytest.mark.parametrize(("end", "code"), [("os._exit(0)", None), ("sys.exit(2)", None)])
def test_a_process_that_ends_without_a_word(end, code, tmp_path: Path) -> None:
    text = "import os, sys\nfrom palm_ds.runtime.processes import rank_status\n"
    text += f"rank_status.report(0)\n{end}"
    warm_python.run(["-c", text], env={rank_status.FOLDER: str(tmp_path)})
    (found,) = rank_status.read_all(tmp_path)
    assert found.code == code and not found.running


def test_commands_report_their_exit_code(tmp_path: Path) -> None:
    words = ["-m", "palm_ds.cli.pretrain", "nowhere.yaml", "--deepspeed_config", "none.json"]
    done = warm_python.run(words, env={rank_status.FOLDER: str(tmp_path), "RANK": "5"})
    (found,) = rank_status.read_all(tmp_path)
    assert (found.rank, found.code, done.returncode) == (5, 2, 2)


def test_a_rank_that_makes_no_sense_is_one_line(tmp_path: Path) -> None:
    words = ["-m", "palm_ds.cli.pretrain", "nowhere.yaml", "--deepspeed_config", "none.json"]
    done = warm_python.run(words, env={rank_status.FOLDER: str(tmp_path), "RANK": "x"})
    assert done.returncode == 2 and "Traceback" not in done.stdout + done.stderr
