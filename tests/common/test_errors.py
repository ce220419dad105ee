"""Mistakes are one line with the nearest known name, and exit code 2."""

from __future__ import annotations

import errno
import os
import pickle
import re
import tempfile
from pathlib import Path

import pytest

from palm_ds.common.errors import (
    UserError,
    exit_on_user_error,
    first_line,
    named_line,
    suggest,
    suggest_path,
)


def test_an_error_of_a_library_is_its_first_line_or_its_class() -> None:
    assert first_line(RuntimeError("\n  out of memory\ntry less")) == "out of memory"
    assert first_line(AssertionError()) == named_line(AssertionError(" ")) == "AssertionError"
    assert named_line(ValueError("no\nmore")) == "ValueError: no"


def test_the_nearest_name_or_all() -> None:
    assert suggest("lerning", ["learning", "weight"]) == '; did you mean "learning"?'
    assert suggest("x", ["b", "a"]) == "; known: a, b"


def test_the_nearest_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs/mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert suggest_path("runs/mien") == '; did you mean "runs/mine"?'
    assert suggest_path("run") == '; did you mean "runs"?'
    (tmp_path / "latest").symlink_to("runs/lost")
    assert suggest_path("latest") == "; it is a link to runs/lost, which does not exist"
    assert suggest_path("other") == suggest_path("nowhere/mine") == ""


def test_a_path_that_the_system_refuses_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended, exit_on_user_error():
        (tmp_path / "file/folder").mkdir()
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/file/folder: Not a directory\n"


def test_an_error_shows_no_password(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), exit_on_user_error():
        raise UserError("https://me:secret@host/a: no such file")
    assert capsys.readouterr().err == "error: https://***@host/a: no such file\n"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_full_disk_is_no_mistake(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    """After a mistake nothing starts a run again."""
    with pytest.raises(SystemExit) as ended, exit_on_user_error():
        raise OSError(number, os.strerror(number), "runs/mine/recipe.yaml")
    assert ended.value.code == 1
    said = f"error: runs/mine/recipe.yaml: {os.strerror(number)}\n"
    assert capsys.readouterr().err == said


def test_no_temporary_folder_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was a traceback."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/dev/full", "/none"])
    with pytest.raises(SystemExit) as ended, exit_on_user_error():
        tempfile.mkdtemp()
    assert ended.value.code == 1
    text = r"error: No usable temporary .*'/none'\]: each is full .* name another in TMPDIR\n"
    assert re.fullmatch(text, capsys.readouterr().err)


def test_other_system_errors_keep_their_traceback(tmp_path: Path) -> None:
    """A file that the program itself lost is a defect."""
    with pytest.raises(FileNotFoundError), exit_on_user_error():
        (tmp_path / "none").read_text()


def test_a_message_is_one_line_whatever_it_quotes() -> None:
    assert str(UserError("x\x1b[2J\n: wrong")) == r"x\x1b[2J\n: wrong"
    line = str(UserError("begin" + "a" * 10_000 + "end"))
    assert len(line) < 2_000 and line.startswith("begin") and line.endswith("end")
    assert str(pickle.loads(pickle.dumps(UserError("a\nb")))) == r"a\nb"
