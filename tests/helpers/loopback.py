"""A server on loopback that does what is asked of it, mostly wrong.

server.files["/a"] = b"..."          what there is
server.does(broken_off(1000))        the next request is treated so, the ones after it properly
server.asked                         what came: (path, Range or "")
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Behavior = Callable[["Handler", bytes], None]


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.version = '"1"'
        self.asked: list[tuple[str, str]] = []
        self.planned: list[Behavior] = []
        self.over = threading.Event()
        self.gate = threading.Event()
        """What `held_back` waits for."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def does(self, *behaviors: Behavior) -> None:
        self.planned += behaviors

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that disconnects is not an error here."""


class Handler(BaseHTTPRequestHandler):
    server: Server  # type: ignore[assignment]

    def do_GET(self) -> None:  # noqa: N802
        self.server.asked.append((self.path, self.headers.get("Range", "")))
        data = self.server.files.get(self.path.partition("?")[0])
        behavior = self.server.planned.pop(0) if self.server.planned else proper
        if data is None and behavior is proper:
            self.answer(404, X_Error_Code="RepoNotFound", Content_Length=0)
        else:
            behavior(self, data or b"")
        self.close_connection = True

    def do_HEAD(self) -> None:  # noqa: N802
        """As the hub answers, which says the commit too."""
        data = self.server.files.get(self.path)
        self.send_response(404 if data is None else 200)
        if data is None:
            self.send_header("X-Error-Code", "RepoNotFound")
        else:
            commit = self.path.split("/resolve/")[-1].split("/")[0]
            headers = {"Content-Length": len(data), "ETag": f'"{len(data)}"'}
            for name, value in {**headers, "X-Repo-Commit": commit}.items():
                self.send_header(name, str(value))
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def answer(self, status: int, body: bytes = b"", **headers: object) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serve() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.gate.set()
        server.shutdown()
        thread.join()
        server.server_close()


def proper(handler: Handler, data: bytes) -> None:
    """Range, If-Range and ETag as they should be."""
    version = handler.server.version
    found = re.fullmatch(r"bytes=(\d+)-(\d*)", handler.headers.get("Range", ""))
    start = int(found[1]) if found else 0
    if found and found[2]:
        part = data[start : int(found[2]) + 1]
        said = f"bytes {start}-{start + len(part) - 1}/{len(data)}"
        handler.answer(206, part, Content_Length=len(part), Content_Range=said, ETag=version)
    elif start and handler.headers.get("If-Range", version) == version:
        if start >= len(data):
            handler.answer(416, Content_Range=f"bytes */{len(data)}")
            return
        handler.answer(
            206,
            data[start:],
            Content_Length=len(data) - start,
            Content_Range=f"bytes {start}-{len(data) - 1}/{len(data)}",
            ETag=version,
        )
    else:
        handler.answer(200, data, Content_Length=len(data), ETag=version)


def broken_off(after: int) -> Behavior:
    """A correct answer, but the connection ends after `after` bytes."""

    def behave(handler: Handler, data: bytes) -> None:
        real, written = handler.wfile, 0

        class Short:
            def write(self, piece: bytes) -> None:
                nonlocal written
                body = not piece.startswith(b"HTTP/")
                real.write(piece[: after - written] if body else piece)
                written += len(piece) if body else 0

            def flush(self) -> None:
                real.flush()

        handler.wfile = Short()  # type: ignore[assignment]
        proper(handler, data)
        handler.wfile = real

    return behave


def ignoring_range(handler: Handler, data: bytes) -> None:
    handler.answer(200, data, Content_Length=len(data))


def ignoring_range_broken_off(after: int) -> Behavior:
    return lambda handler, data: handler.answer(200, data[:after], Content_Length=len(data))


def another_part(handler: Handler, data: bytes) -> None:
    """From the middle, whatever was requested."""
    start = len(data) // 2
    said = f"bytes {start}-{len(data) - 1}/{len(data)}"
    handler.answer(206, data[start:], Content_Length=len(data) - start, Content_Range=said)


def saying(size: int | str) -> Behavior:
    """A wrong Content-Length."""
    return lambda handler, data: handler.answer(200, data, Content_Length=size)


def without_size(handler: Handler, data: bytes) -> None:
    handler.answer(200, data)


def in_chunks(break_after: int | None = None) -> Behavior:
    def behave(handler: Handler, data: bytes) -> None:
        handler.protocol_version = "HTTP/1.1"
        handler.answer(200, Transfer_Encoding="chunked", Connection="close")
        for start in range(0, len(data), 1000):
            if break_after is not None and start >= break_after:
                return
            piece = data[start : start + 1000]
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        handler.wfile.write(b"0\r\n\r\n")

    return behave


def status(code: int, reason: str = "", **headers: object) -> Behavior:
    def behave(handler: Handler, _data: bytes) -> None:
        handler.send_response(code, reason or None)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), str(value))
        handler.end_headers()

    return behave


def redirect(url: str) -> Behavior:
    return status(302, Location=url)


def stalled(after: int) -> Behavior:
    """`after` bytes, and then silence."""

    def behave(handler: Handler, data: bytes) -> None:
        handler.answer(200, data[:after], Content_Length=len(data))
        handler.wfile.flush()
        handler.server.over.wait(5)

    return behave


def slow(handler: Handler, data: bytes) -> None:
    handler.answer(200, Content_Length=len(data), ETag=handler.server.version)
    for start in range(0, len(data), 1 + len(data) // 8):
        handler.wfile.write(data[start : start + 1 + len(data) // 8])
        handler.wfile.flush()
        handler.server.over.wait(0.05)


def held_back(handler: Handler, data: bytes) -> None:
    """Nothing until the server's `gate` is open."""
    handler.server.gate.wait(60)
    proper(handler, data)


def gone(_handler: Handler, _data: bytes) -> None:
    """Closes the connection without an answer."""


def gibberish(handler: Handler, _data: bytes) -> None:
    handler.wfile.write(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
