"""Clients that send or read too slowly, over real sockets."""

from __future__ import annotations

import http.client
import json
import logging
import re
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from palm_ds.serve.http import connection
from palm_ds.serve.http.connection import LARGEST_HEAD
from palm_ds.serve.model_set import ModelSet
from tests.helpers.serving import listening, local, opened

_ID = "x-request-id"


@pytest.fixture(scope="module")
def models(words_run: Path) -> ModelSet:
    return opened(words=words_run)[0]


@pytest.fixture
def client(models: ModelSet) -> Iterator[socket.socket]:
    """Connected to a server that waits 0.4 s."""
    with local(models, read_timeout=0.4) as server, listening(server.service) as url:
        address = url.removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1])), timeout=10) as connection:
            yield connection


def closed_after(client: socket.socket, piece: bytes, pause: float) -> float:
    """Seconds until the server closes the connection of a client that keeps sending."""
    began = time.monotonic()
    client.settimeout(pause)
    while time.monotonic() - began < 10:
        try:
            if piece:
                client.sendall(piece)
            if not client.recv(1000):
                break
        except TimeoutError:
            continue
        except ConnectionError:
            break
    return time.monotonic() - began


@pytest.mark.parametrize(
    "start", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nhost: localhost\r\n"]
)
def test_a_head_that_never_ends(client: socket.socket, start: bytes) -> None:
    client.sendall(start)
    assert 0.3 < closed_after(client, b"a" if start else b"", 0.1) < 3


def test_a_second_head_that_never_ends(client: socket.socket) -> None:
    client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert client.recv(1000).startswith(b"HTTP/1.1 200")
    time.sleep(0.6)  # between requests there is more time
    client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n")
    assert 0.3 < closed_after(client, b"a: b\r\n", 0.1) < 3


def test_a_head_of_any_size(client: socket.socket) -> None:
    client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n")
    line = b"a: " + b"b" * 4000 + b"\r\n"
    with pytest.raises(ConnectionError):
        for _ in range(1000 * LARGEST_HEAD // len(line)):
            client.sendall(line)


def test_many_requests_in_one_piece_are_answered_in_order(client: socket.socket) -> None:
    paths = [b"/health", b"/none", b"/ready"]
    client.sendall(b"".join(b"GET %s HTTP/1.1\r\nhost: localhost\r\n\r\n" % path for path in paths))
    found = b""
    while found.count(b"HTTP/1.1 ") < 3 or not found.endswith(b"}"):
        found += client.recv(1000)
    assert [part[:3] for part in found.split(b"HTTP/1.1 ")[1:]] == [b"200", b"404", b"200"]


def test_a_client_that_leaves_before_its_answers(
    client: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    """Its first request is being answered when the connection is lost."""
    address = client.getpeername()
    for pause in (0, 0.001, 0.003, 0.01):
        with socket.create_connection(address) as other:
            other.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 50)
            time.sleep(pause)
    time.sleep(0.2)
    with socket.create_connection(address, timeout=10) as later:
        later.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert later.recv(1000).startswith(b"HTTP/1.1 200")
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize("path", ["/health", "/", "/none"])
def test_head_is_get_without_its_body(client: socket.socket, path: str) -> None:
    """As some load balancers ask for a server's health."""
    connection = http.client.HTTPConnection("localhost")
    connection.sock = client
    found = {}
    for method in ("GET", "HEAD", "GET"):  # the last one fails if HEAD's answer has a body
        connection.request(method, path)
        answer = connection.getresponse()
        headers = {name: x for name, x in answer.getheaders() if name not in ("date", _ID)}
        assert found.setdefault("as GET", (answer.status, headers)) == (answer.status, headers)
        assert (answer.read() == b"") == (method == "HEAD")


def test_an_answer_that_nobody_reads(client: socket.socket) -> None:
    body = json.dumps({"texts": ["a " * 45_000] * 10}).encode()
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    client.sendall(b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\n" + head.encode() + body)
    found = bytearray(client.recv(1000))
    stated = re.search(rb"content-length: (\d+)", found)
    assert stated is not None and found.startswith(b"HTTP/1.1 200")
    time.sleep(1.5)
    with suppress(ConnectionError):
        while piece := client.recv(1 << 20):
            found += piece
    assert len(found) < int(stated[1])


def test_an_answer_that_is_read_slowly(client: socket.socket) -> None:
    body = json.dumps({"texts": ["a " * 45_000] * 4}).encode()
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    client.sendall(b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\n" + head.encode() + body)
    found = bytearray(client.recv(1000))
    stated = re.search(rb"content-length: (\d+)", found)
    assert stated is not None
    while len(found) < int(stated[1]):
        time.sleep(0.1)
        found += client.recv(1 << 20)


def test_one_connection_too_many_is_told_to_try_again(
    models: ModelSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others wait for nothing, and are served as before."""
    monkeypatch.setattr(connection, "_MOST", 2)
    with local(models) as server, listening(server.service) as url:
        host, port = url.removeprefix("http://").split(":")
        with ExitStack() as stack:
            idle = [
                stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
                for _ in range(3)
            ]
            client = http.client.HTTPConnection(host, int(port), timeout=10)
            client.request("GET", "/info")
            answer = client.getresponse()
            body = json.loads(answer.read())
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert body["error"]["message"] == (
                "2 connections are open, as many as this server keeps"
            )
            assert answer.headers["connection"] == "close" and answer.headers[_ID]
            assert closed_after(idle[2], b"", 0.1) < 3
            idle[0].sendall(b"GET /info HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert idle[0].recv(1000).startswith(b"HTTP/1.1 200 ")
        again = http.client.HTTPConnection(host, int(port), timeout=10)
        for _ in range(100):
            again.request("GET", "/info")
            if again.getresponse().status == 200:
                break
            again.close()
            time.sleep(0.02)
        else:
            pytest.fail("the connections that were closed still count")
        again.close()


@pytest.mark.parametrize(
    ("files", "most"),
    [
        (1024, 896),
        (20, 10),
        (1 << 20, connection._MOST),
        (resource.RLIM_INFINITY, connection._MOST),
    ],
)
def test_connections_leave_files_for_the_rest(
    files: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    assert connection.most_connections() == most
