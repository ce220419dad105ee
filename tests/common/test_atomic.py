"""A file or folder is the old one or the new one, whatever fails in between."""

from __future__ import annotations

from pathlib import Path

import pytest

from palm_ds.common.atomic import (
    move_into_place,
    write_file_atomically,
    write_folder_atomically,
)


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


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    write_folder_atomically(folder, lambda part: (part / "a").write_text("1") and None)
    write_folder_atomically(folder, lambda part: (part / "b").write_text("2") and None)
    assert (names(folder), names(folder.parent)) == (["b"], ["folder"])


def test_a_folder_that_fails_leaves_the_older_one(tmp_path: Path) -> None:
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


def test_an_existing_folder_is_only_replaced_with_aside(tmp_path: Path) -> None:
    for name in ("part", "target"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    with pytest.raises(OSError):
        move_into_place(tmp_path / "part", tmp_path / "target")
    assert names(tmp_path / "target") == ["target"]
    move_into_place(tmp_path / "part", tmp_path / "target", aside=tmp_path / "old")
    assert (names(tmp_path / "target"), names(tmp_path / "old")) == (["part"], ["target"])
