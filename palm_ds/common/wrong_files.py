"""Recognises files that are something else: Git LFS pointers, web pages, Keras files."""

from __future__ import annotations

from pathlib import Path

from palm_ds.common.errors import UserError

_POINTER = b"version https://git-lfs.github.com/spec/"
_PAGE = (b"<!doctype html", b"<html")
_KERAS = b"\x89HDF\r\n\x1a\n"


def check_right_file(path: Path) -> None:
    """Raises UserError if the file is a Git LFS pointer, an HTML page or a Keras (HDF5) file."""
    try:
        if not path.is_file():  # a pipe would wait for somebody to write
            return
        with path.open("rb") as file:
            head = file.read(256)
    except OSError:
        return  # its reader reports this
    if head.startswith(_POINTER):
        raise UserError(
            f"{path}: is a Git LFS pointer, not the file itself; fetch it with `git lfs pull`"
        )
    if head.removeprefix(b"\xef\xbb\xbf").lstrip().lower().startswith(_PAGE):
        raise UserError(f"{path}: is an HTML page, not the file itself; download it again")
    if head.startswith(_KERAS):
        raise UserError(
            f"{path}: is a Keras file (HDF5), which is not read; save the model for PyTorch"
        )
