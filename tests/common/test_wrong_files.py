"""Files left by failed downloads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from palm_ds.common.errors import UserError
from palm_ds.common.wrong_files import check_right_file


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
        (b"\xef\xbb\xbf \n<!DocType html>", "is an HTML page"),
        (b"<HTML lang=en>", "is an HTML page"),
        (b"\x89HDF\r\n\x1a\n\x00", "is a Keras file"),
    ],
)
def test_wrong_files_are_named(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        check_right_file(path)


@pytest.mark.parametrize("content", [b"", b"{}", b"PK\x03\x04", b"<htm", b"version 2"])
def test_other_files_pass(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    check_right_file(tmp_path / "file")
    check_right_file(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    check_right_file(tmp_path / "pipe")
