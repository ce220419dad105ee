"""Locks between processes, which end with them."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from palm_ds.common.errors import UserError
from palm_ds.common.file_lock import locked

HOLD = """
import sys, time
from pathlib import Path
from palm_ds.common.file_lock import locked
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
