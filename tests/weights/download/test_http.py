"""Files over HTTP from a server that breaks off, ignores, lies and stalls, all on loopback."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from palm_ds.common.errors import UserError
from palm_ds.weights.download import http as transfer
from palm_ds.weights.download.http import Patience, fetch
from tests.helpers import loopback
from tests.helpers.loopback import Server, broken_off

DATA = random.Random(1).randbytes(300_000)
SHA = hashlib.sha256(DATA).hexdigest()
QUICK = Patience(tries=3, wait=0.01, timeout=30, most=10 << 20)
IMPATIENT = replace(QUICK, timeout=0.3)
"""For servers that stall. A busy machine may be silent as long, so the others are waited for."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with loopback.serve() as server:
        server.files["/a.tgz"] = DATA
        yield server


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "a.tgz"


def get(server: Server, file: Path, patience: Patience = QUICK, **options: Any) -> bytes:
    return fetch(server.url + "/a.tgz", file, patience=patience, **options).read_bytes()


def patience_for(case: str) -> Patience:
    return IMPATIENT if case in ("stalled", "stalls", "slow") else QUICK


def left(file: Path) -> list[str]:
    """The files in the folder, except the lock."""
    return sorted(name for name in os.listdir(file.parent) if not name.endswith(".lock"))


def test_a_complete_file_is_not_requested_again(server: Server, file: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    assert get(server, file, progress=lambda *x: seen.append(x), sha256=SHA, size=300_000) == DATA
    assert seen[0] == (0, 300_000) and seen[-1] == (300_000, 300_000)
    assert get(server, file) == DATA
    assert server.asked == [("/a.tgz", "")] and left(file) == ["a.tgz"]


def test_a_broken_download_is_resumed(server: Server, file: Path) -> None:
    server.does(broken_off(1000), broken_off(99_000), broken_off(1), loopback.gone)
    assert get(server, file, sha256=SHA) == DATA
    ranges = ["", "bytes=1000-", "bytes=100000-", "bytes=100001-", "bytes=100001-"]
    assert [asked for _, asked in server.asked] == ranges


def test_another_process_can_resume(server: Server, file: Path) -> None:
    server.does(broken_off(5000), loopback.gone, loopback.gone, loopback.gone)
    with pytest.raises(UserError, match="3 times .5,000 bytes are kept for the next try."):
        get(server, file)
    assert left(file) == ["a.tgz.part", "a.tgz.part.json"]
    server.asked.clear()
    server.planned.clear()
    assert get(server, file, sha256=SHA) == DATA
    assert server.asked == [("/a.tgz", "bytes=5000-")] and left(file) == ["a.tgz"]


def test_a_new_version_is_not_mixed_with_the_old(server: Server, file: Path) -> None:
    server.does(broken_off(5000), loopback.gone, loopback.gone, loopback.gone)
    with pytest.raises(UserError):
        get(server, file)
    server.planned.clear()
    server.version, server.files["/a.tgz"] = '"2"', DATA[::-1]
    assert get(server, file) == DATA[::-1]


@pytest.mark.parametrize("about", ["", "{", "[1]", '{"url": "http://other/a.tgz"}', "{}"])
def test_a_part_of_unknown_origin_is_not_used(server: Server, file: Path, about: str) -> None:
    file.parent.mkdir()
    file.with_name("a.tgz.part").write_bytes(b"of something else")
    if about:
        file.with_name("a.tgz.part.json").write_text(about)
    assert get(server, file) == DATA and server.asked == [("/a.tgz", "")]


PUT_RIGHT = {
    "range ignored": [broken_off(1000), loopback.ignoring_range],
    "range ignored, broken off": [
        broken_off(1000),
        loopback.ignoring_range_broken_off(70_000),
        loopback.ignoring_range,
    ],
    "another part": [broken_off(1000), loopback.another_part],
    "stalled": [loopback.stalled(2000)],
    "slow": [loopback.slow],
    "no size": [loopback.without_size],
    "chunked": [loopback.in_chunks()],
    "chunked, broken off": [loopback.in_chunks(150_000)],
    "busy": [loopback.status(503, Retry_After=0), loopback.status(429)],
    "gone": [loopback.gone, loopback.gone],
    "gibberish": [loopback.gibberish],
    "redirected": [loopback.redirect("/a.tgz")],
    "size too large once": [loopback.saying(300_001)],
}


@pytest.mark.parametrize("case", PUT_RIGHT)
def test_temporary_errors_are_retried(case: str, server: Server, file: Path) -> None:
    server.does(*PUT_RIGHT[case])
    assert get(server, file, patience_for(case), sha256=SHA) == DATA
    assert left(file) == ["a.tgz"]


class Wrong(NamedTuple):
    behaviors: list[loopback.Behavior]
    words: str
    kept: bool = False
    options: dict[str, Any] = {}  # noqa: RUF012


URL = r"http://127.0.0.1:\d+/a.tgz: "
WRONG = {
    "not found": Wrong([loopback.status(404)], URL + "the server answered 404 Not Found"),
    "forbidden": Wrong([loopback.status(403)], URL + "the server answered 403"),
    "a reason of escape codes": Wrong(
        [loopback.status(404, "\x1b[2Jall is well")], r"answered 404 \?\[2Jall is well"
    ),
    "always busy": Wrong([loopback.status(503)] * 3, "answered 503 Service Unavailable, 3 times"),
    "always gone": Wrong([loopback.gone] * 3, "the connection broke .*, 3 times"),
    "always gibberish": Wrong([loopback.gibberish] * 3, "the connection broke .*, 3 times"),
    "breaks at one place": Wrong(
        [loopback.ignoring_range_broken_off(999)] * 9, "ended after 999 of 300,000 bytes", True
    ),
    "stalls": Wrong([loopback.stalled(0)] * 3, "timed out.*, 3 times"),
    "says too much, always": Wrong(
        [loopback.saying(300_001)] * 9, "ended after 300,000 of 300,001", True
    ),
    "redirects in circles": Wrong([loopback.redirect("/a.tgz")] * 20, "infinite loop"),
    "redirects to a file": Wrong([loopback.redirect("file:///etc/passwd")], "not allowed"),
    "redirects to ftp": Wrong(
        [loopback.redirect("ftp://127.0.0.1/a")], "redirects to 'ftp://127.0.0.1/a', not foll"
    ),
    "another size than is right": Wrong(
        [], "300,000 bytes; 300,001 expected", options={"size": 300_001}
    ),
    "no size said, and wrong": Wrong(
        [loopback.without_size],
        "300,000 bytes received, 5 expected; the file is deleted",
        options={"size": 5},
    ),
    "sends more than it says": Wrong([loopback.saying(50)], "sha256 is", options={"sha256": SHA}),
    "another checksum": Wrong([], f"sha256 is {SHA}, 00 expected", options={"sha256": "00"}),
    "a size of many digits": Wrong(
        [loopback.saying("9" * 5000)],
        "bytes received, 1,048,576 expected",
        options={"size": 1 << 20},
    ),
    "too large": Wrong([loopback.saying(11 << 20)], "at most 10,485,760 are accepted"),
}


@pytest.mark.parametrize("case", WRONG)
def test_permanent_errors_are_one_clear_line(case: str, server: Server, file: Path) -> None:
    server.does(*WRONG[case].behaviors)
    with pytest.raises(UserError, match=WRONG[case].words) as caught:
        get(server, file, patience_for(case), **WRONG[case].options)
    message = str(caught.value)
    assert message.startswith(server.url) and message.isprintable()
    assert left(file) == (["a.tgz.part", "a.tgz.part.json"] if WRONG[case].kept else [])


def test_an_endless_response_without_a_size(server: Server, file: Path) -> None:
    server.files["/a.tgz"] = bytes(11 << 20)
    server.does(loopback.without_size)
    with pytest.raises(UserError, match="the server sends more than it announced"):
        get(server, file)
    assert left(file) == []


def test_a_long_wait_is_announced(
    server: Server, file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    server.does(*[loopback.gone] * 4, loopback.status(503, Retry_After=3600))
    patience = Patience(tries=6, wait=0.5, longest_wait=3)
    fetch(server.url + "/a.tgz", file, patience=patience)
    assert waits == [0.5, 1, 2, 3, 3]
    assert len(caplog.messages) == 4 and caplog.messages[-1].endswith(
        "503 Service Unavailable; again in 3 s"
    )


def test_an_unreachable_server(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(UserError, match=rf"127.0.0.1:{port} cannot be reached \(Connection ref"):
        fetch(f"http://127.0.0.1:{port}/a.tgz", file, patience=QUICK)


def test_a_host_that_drops_what_it_gets(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener's queue is full, so that the kernel drops further connections."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(transfer, "_CONNECT_SECONDS", 1.0)
    with socket.socket() as full, contextlib.ExitStack() as waiting:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        began = time.monotonic()
        with pytest.raises(UserError, match=r"cannot be reached \(timed out\)$"):
            fetch(f"http://127.0.0.1:{full.getsockname()[1]}/a", file)
    assert 1 <= time.monotonic() - began < 20


def test_an_answer_may_take_longer_than_a_connection(
    server: Server, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_CONNECT_SECONDS", 0.5)

    def thoughtful(handler: loopback.Handler, data: bytes) -> None:
        time.sleep(1)
        loopback.proper(handler, data)

    server.does(thoughtful)
    assert fetch(server.url + "/a.tgz", file, patience=Patience(tries=1)).exists()


def test_an_unknown_host_is_not_waited_for(
    file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    with pytest.raises(UserError, match=r"^http://nowhere.invalid/.* cannot be reached .*2 times$"):
        fetch("http://nowhere.invalid/a.tgz", file)
    assert slept == [1.0] and caplog.messages == []


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://127.0.0.1/a",
        "a.tgz",
        "",
        "http://",
        "http:///a",
        "http://a b/c",
    ],
)
def test_unsupported_addresses(url: str, file: Path) -> None:
    with pytest.raises(UserError, match="not an http or https URL"):
        fetch(url, file)
    assert not file.parent.exists()


def test_a_full_disk_is_detected_before_downloading(
    server: Server, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage(NamedTuple):
        free: int = 4000

    monkeypatch.setattr(transfer.shutil, "disk_usage", lambda path: Usage())
    with pytest.raises(
        UserError, match="not enough disk space: 300,000 more bytes are needed, 4,000"
    ):
        get(server, file)


def test_a_disk_that_fills_up(server: Server, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    file.parent.mkdir()
    file.with_name("a.tgz.part").symlink_to(full)
    monkeypatch.setattr(transfer._PartialFile, "forget", lambda part: None)
    with pytest.raises(UserError, match="a.tgz.part: cannot be written: No space left on device"):
        get(server, file)


def test_a_folder_that_cannot_be_created(server: Server, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match="cache: cannot be written"):
        get(server, tmp_path / "cache" / "a.tgz")


def test_only_one_of_two_processes_downloads(server: Server, file: Path) -> None:
    server.does(loopback.held_back)
    code = (
        "import sys; from pathlib import Path; from palm_ds.weights.download.http import fetch; "
        "fetch(sys.argv[1], Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", code, server.url + "/a.tgz", str(file)]
    first = threading.Thread(target=fetch, args=(server.url + "/a.tgz", file))  # with patience
    first.start()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as second:
        assert second.stderr is not None
        said = second.stderr.readline()
        server.gate.set()
        assert second.wait(60) == 0
    first.join()
    assert said == "a.tgz: another process is working on it; waiting\n"
    assert file.read_bytes() == DATA and len(server.asked) == 1


def test_a_process_that_is_killed_leaves_no_lock(server: Server, file: Path) -> None:
    server.does(loopback.stalled(3000))
    code = (
        "import sys; from pathlib import Path; from palm_ds.weights.download.http import fetch; "
        "fetch(sys.argv[1], Path(sys.argv[2]), progress=lambda done, _: print(done, flush=True))"
    )
    command = [sys.executable, "-c", code, server.url + "/a.tgz", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert "3000\n" in iter(child.stdout.readline, "")
        child.kill()
    assert get(server, file, sha256=SHA) == DATA
    assert [asked for _, asked in server.asked] == ["", "bytes=3000-"]
