from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from palm_ds.common.errors import UserError
from palm_ds.common.files import (
    cache_folder,
    check_locks,
    check_right_file,
    fingerprint,
    hash_of_text,
    home_folder,
    locked,
    make_folder,
    sha256_of_file,
)


def test_the_hash_is_that_of_the_contents(tmp_path: Path) -> None:
    for data in (b"", b"x" * ((1 << 20) + 1)):
        (tmp_path / "file").write_bytes(data)
        assert sha256_of_file(tmp_path / "file") == hashlib.sha256(data).hexdigest()


def test_fingerprints_stay_as_they_are_stored() -> None:
    known = "895aab6349c4a3bd"
    assert fingerprint({"lr": 1e-4, "tasks": ["ä", None, True]}) == known
    assert fingerprint({"tasks": ("ä", None, True), "lr": 0.0001}) == known
    assert fingerprint([Path("a")], default=str) == fingerprint(["a"])
    assert hash_of_text("ä") == hashlib.sha256("ä".encode()).hexdigest()


HOLD = """
import sys, time
from pathlib import Path
from palm_ds.common.files import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def held(tmp_path: Path):
    """A file that another process has locked, and that process."""
    file = tmp_path / "x.lock"
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(file)], stdout=subprocess.PIPE)
    assert other.stdout and other.stdout.readline() == b"held\n"
    yield file, other
    other.kill()
    other.communicate()


def test_a_lock_is_refused_in_one_line_or_waited_for(held) -> None:
    file, other = held
    with pytest.raises(UserError, match="^busy here$"), locked(file, busy="busy here"):
        pass
    waits = threading.Event()
    threading.Thread(target=lambda: (waits.wait(60), other.kill())).start()
    with locked(file, on_wait=waits.set):  # a killed process has no lock
        assert waits.is_set()
    with locked(file, busy="busy here", on_wait=pytest.fail):
        pass


def test_an_error_inside_releases_the_lock_and_keeps_the_file(tmp_path: Path) -> None:
    file = tmp_path / "x.lock"
    file.write_text("kept")
    with pytest.raises(KeyError), locked(file):
        raise KeyError
    with locked(file, busy="busy"):
        assert file.read_text() == "kept"


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    make_folder(tmp_path / "a/b")
    make_folder(tmp_path / "a/b")
    (tmp_path / "file").touch()
    for wrong in ("/proc/new", f"{tmp_path}/file", f"{tmp_path}/file/below"):
        with pytest.raises(UserError, match=f"^{wrong}: cannot be created: "):
            make_folder(Path(wrong))


def test_users_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs with a number that no user has."""
    for name in ("HOME", "XDG_CACHE_HOME", "PALM_DS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert (home_folder(), cache_folder()) == (Path("/"), Path("/.cache/palm_ds"))
    monkeypatch.setenv("HOME", "/users/me")
    assert cache_folder() == Path("/users/me/.cache/palm_ds")
    monkeypatch.setenv("XDG_CACHE_HOME", "/else")
    assert cache_folder() == Path("/else/palm_ds")
    monkeypatch.setenv("PALM_DS_CACHE", "/fast")
    assert cache_folder() == Path("/fast")


def test_without_locks_of_the_file_system_nobody_waits(
    tmp_path: Path, no_locks: None, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "x.lock"
    with locked(file), locked(file):
        assert not caplog.messages
    with locked(file, busy="busy"):
        (message,) = caplog.messages
    assert (
        message
        == f"{file}: cannot be locked (Function not implemented); start no second command on it"
    )
    with pytest.raises(UserError, match="^where: .*: this file system has no locks .*local disk"):
        check_locks(file, "where")


def test_locks_of_others_are_locks(held) -> None:
    file, _ = held
    check_locks(file, "where")


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
