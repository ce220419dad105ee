"""A file or folder is either the old or the new one, whatever fails in between."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from palm_ds.common.atomic import (
    check_new_folder,
    follow_umask,
    move_into_place,
    write_file_atomically,
    write_folder_atomically,
    write_new_folder,
)
from palm_ds.common.errors import UserError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("data", ["ä\n", b"\x00\xff"])
def test_a_file_is_replaced(data: str | bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    write_file_atomically(path, data)
    assert path.read_bytes() == (data if isinstance(data, bytes) else data.encode())
    assert names(tmp_path) == ["file"]


def test_a_file_that_cannot_be_replaced_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="disk full"):
        write_file_atomically(path, "after")
    assert (path.read_text(), names(tmp_path)) == ("before", ["file"])


def test_an_error_names_the_file_and_not_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(IsADirectoryError) as error:
        write_file_atomically(tmp_path, "after")
    assert (error.value.filename, error.value.filename2) == (str(tmp_path), None)
    monkeypatch.setattr("os.fsync", failing(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left on device") as error:
        write_file_atomically(tmp_path / "file", "after")
    assert error.value.filename == f"{tmp_path}/file" and names(tmp_path) == []
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError) as error:
        write_file_atomically(tmp_path / "file/below", "after")
    assert error.value.filename == f"{tmp_path}/file/below"


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_where_no_file_can_be_made() -> None:
    """The kernel says of a new file in /proc that there is none."""
    with pytest.raises(UserError, match="^/proc/new: cannot be written: No such file or directory"):
        write_file_atomically("/proc/new", "")


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_file_systems_that_cannot_sync(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", failing(code))
    write_file_atomically(tmp_path / "file", "after")
    assert (tmp_path / "file").read_text() == "after"
    monkeypatch.setattr("os.fsync", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        write_file_atomically(tmp_path / "file", "lost")
    assert (tmp_path / "file").read_text() == "after"


def test_file_systems_without_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch(0o600)
    follow_umask(tmp_path / "file")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) != 0o600
    monkeypatch.setattr("os.chmod", failing(errno.EPERM))
    follow_umask(tmp_path / "file")
    assert names(tmp_path) == ["file"]


def failing(code: int) -> Callable[..., None]:
    def fail(*_: object, **options: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def test_a_folder_is_replaced_completely(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    write_folder_atomically(folder, lambda part: (part / "a").write_text("1") and None)
    write_folder_atomically(folder, lambda part: (part / "b").write_text("2") and None)
    assert (names(folder), names(folder.parent)) == (["b"], ["folder"])


def test_a_failed_folder_leaves_the_old_one(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    write_folder_atomically(folder, lambda part: (part / "a").write_text("1") and None)

    def fail(part: Path) -> None:
        (part / "b").write_text("2")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder_atomically(folder, fail)
    assert (names(folder), names(tmp_path)) == (["a"], ["folder"])


def test_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    for end in ("part", "old"):
        (tmp_path / f".folder.{end}").mkdir()
        (tmp_path / f".folder.{end}" / "junk").write_text("x")
    write_folder_atomically(tmp_path / "folder", lambda part: (part / "a").touch())
    assert (names(tmp_path / "folder"), names(tmp_path)) == (["a"], ["folder"])


def test_a_running_process_keeps_its_temporary_folder(tmp_path: Path) -> None:
    """Two processes write the same folder: neither removes the other's files, and one of them
    wins."""
    folder = tmp_path / "folder"

    def second(part: Path) -> None:
        (part / "b").touch()

    def first(part: Path) -> None:
        (part / "a").touch()
        write_new_folder(folder, second)
        assert names(part) == ["a"]

    with pytest.raises(UserError, match="folder: already exists and is not empty"):
        write_new_folder(folder, first)
    assert (names(folder), names(tmp_path)) == (["b"], ["folder"])
    write_folder_atomically(folder, lambda part: write_folder_atomically(folder, second))
    assert (names(folder), names(tmp_path)) == ([], ["folder"])


def test_a_full_disk_is_no_mistake_and_names_the_folder(tmp_path: Path) -> None:
    """It had the exit code of a mistake."""

    def fill(part: Path) -> None:
        with open("/dev/full", "w") as full:
            full.write("x")

    with pytest.raises(OSError, match="No space left on device") as raised:
        write_new_folder(tmp_path / "folder", fill)
    assert raised.value.filename == str(tmp_path / "folder") and not names(tmp_path)


def test_leftovers_of_a_killed_process_are_removed_for_that_folder_only(tmp_path: Path) -> None:
    for name in (".folder.0123abcd.part", ".folder.0123abcd.old", ".folders.0123abcd.part"):
        (tmp_path / name).mkdir()
    write_new_folder(tmp_path / "folder", lambda part: (part / "a").touch())
    assert names(tmp_path) == [".folders.0123abcd.part", "folder"]


def test_a_failed_rename_leaves_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    write_folder_atomically(folder, lambda part: (part / "a").touch())
    rename = os.replace

    def full(source: Path, target: Path) -> None:
        if source.suffix == ".part":
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        write_folder_atomically(folder, lambda part: (part / "b").touch())
    assert (names(folder), names(tmp_path)) == (["a"], ["folder"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/proc/out", "cannot be written: No such file or directory"),
        ("/sys/out", "cannot be written: "),
        ("x" * 256, "cannot be written: File name too long"),
        ("dangling", "is a broken link; choose another folder"),
        ("loop", "is a broken link"),
        ("file", "already exists and is not empty"),
        ("file/in", "file is not a folder"),
    ],
)
def test_targets_that_cannot_be_folders(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError, match=message):
        write_new_folder(tmp_path / name, lambda part: (part / "a").touch())
    assert names(tmp_path) == ["dangling", "file", "loop"]


@pytest.mark.parametrize("name", ["x" * 255, "\u00e4" * 127, "link"])
def test_targets_that_can_be_folders(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    write_new_folder(tmp_path / name, lambda part: (part / "a").touch())
    assert names(tmp_path / name) == ["a"] and (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("name", [".", "../here"])
def test_the_current_folder_is_no_target(name: str, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UserError, match="is or contains the current folder"):
        check_new_folder(Path(name))
    check_new_folder(Path("new"))


def test_an_existing_folder_is_only_replaced_with_aside(tmp_path: Path) -> None:
    for name in ("part", "target"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    with pytest.raises(OSError):
        move_into_place(tmp_path / "part", tmp_path / "target")
    assert names(tmp_path / "target") == ["target"]
    move_into_place(tmp_path / "part", tmp_path / "target", aside=tmp_path / "old")
    assert (names(tmp_path / "target"), names(tmp_path / "old")) == (["part"], ["target"])


def test_writers_with_the_same_process_number(tmp_path: Path) -> None:
    """As two containers that share a cache: one moved the other's half-written file."""
    text = "x" * 100_000
    with ThreadPoolExecutor(4) as writers:
        list(writers.map(lambda _: write_file_atomically(tmp_path / "a", text), range(40)))
    assert [path.read_text() for path in tmp_path.iterdir()] == [text]
