"""A full disk: what is there stays, and what waits is written once there is space."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from palm_ds.common.atomic import write_folder_atomically
from palm_ds.common.errors import UserError
from palm_ds.runtime.checkpoint import checkpoint
from palm_ds.runtime.checkpoint.full_disk import at_rank0, may_pass, retried
from palm_ds.runtime.processes.process_group import SINGLE_PROCESS
from palm_ds.train.report.metrics_file import AppendFile
from tests.helpers.small_disk import empty, fill, small_disk
from tests.helpers.write_checkpoint import write_checkpoint


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "400k") as folder:
        yield folder


def save(folder: Path, step: int) -> None:
    write_checkpoint(
        folder,
        step,
        write=lambda path, written: written.write(
            path / "a.safetensors", lambda file: save_file({"w": torch.full((9999,), step)}, file)
        ),
        layout=checkpoint.Layout(world=1, stage=0, precision="fp32"),
        parameters={},
        engine={},
        state={},
        group=SINGLE_PROCESS,
        keep=1,
    )


def attempt(folder: Path, step: int) -> str:
    try:
        save(folder, step)
    except checkpoint.SaveError as error:
        return str(error)
    return ""


def test_a_checkpoint_waits_for_space_and_the_last_one_stays(disk: Path) -> None:
    folder, said = disk / "checkpoints", []
    save(folder, 1)
    fill(disk)

    def say(line: str) -> None:
        said.append(line)
        assert checkpoint.verify(folder / "step_00000001") == (1, [])
        empty(disk)

    problem = retried(
        lambda: attempt(folder, 2), group=SINGLE_PROCESS, say=say, patience=1.0, pause=0.01
    )
    assert problem == "" and checkpoint.steps_in(folder) == [2]
    (line,) = said
    assert "No space left on device" in line
    assert "the last one is step_00000001; tries again every" in line


def test_a_folder_of_weights_stays_until_the_new_one_is_complete(disk: Path) -> None:
    def write(value: float) -> str:
        weights = {"w": torch.full((9999,), value)}
        return at_rank0(
            SINGLE_PROCESS,
            lambda: write_folder_atomically(
                disk / "weights", lambda part: save_file(weights, part / "w.safetensors")
            ),
        )

    assert write(1.0) == ""
    fill(disk)
    assert may_pass(write(2.0))
    assert load_file(disk / "weights" / "w.safetensors")["w"][0] == 1.0
    empty(disk)
    assert write(3.0) == ""
    assert sorted(path.name for path in disk.iterdir()) == ["weights"]


def test_lines_of_a_log_are_kept_in_order(disk: Path) -> None:
    said: list[str] = []
    file = AppendFile(disk / "log", said.append)
    lines = [f"{number} {'x' * 700}" for number in range(40)]
    for number, line in enumerate(lines):
        if number == 10:
            fill(disk)
        if number == 30:
            empty(disk)
        file.append(line)
    file.close()
    file.close()
    assert (disk / "log").read_text().splitlines() == lines
    assert [line.partition(": ")[2] for line in said] == [
        "cannot be written (No space left on device); lines are kept",
        "can be written again; no line is lost",
    ]


def test_a_log_that_cannot_be_finished_says_so(disk: Path) -> None:
    said: list[str] = []
    file = AppendFile(disk / "log", said.append)
    fill(disk)
    for _ in range(3):
        file.append("x" * 5000)
    file.close()
    assert said[-1].endswith("log: 3 lines could not be written")


FULL = os.strerror(errno.ENOSPC)


def test_it_gives_up_after_its_patience_and_when_asked_to_stop() -> None:
    tries: list[int] = []

    def fail() -> str:
        tries.append(0)
        return FULL

    options = {"group": SINGLE_PROCESS, "say": print, "pause": 0.001}
    assert retried(fail, patience=0.005, **options) == FULL and len(tries) == 6
    assert retried(fail, patience=0.0, **options) == FULL and len(tries) == 7
    assert retried(fail, patience=9.0, stop=lambda: True, **options) == FULL and len(tries) == 8


def test_other_problems_are_not_waited_for() -> None:
    def refuse() -> None:
        raise UserError("no such encoder")

    assert at_rank0(SINGLE_PROCESS, refuse) == "no such encoder"
    assert retried(lambda: "no such encoder", group=SINGLE_PROCESS, say=print) == "no such encoder"
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE):
        assert may_pass(f"x.safetensors: {os.strerror(code)} (os error {code})")
