"""What is checked before a route: tokens, sizes, time, ids; and clients that leave."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from palm_ds.serve.forward import Scores
from palm_ds.serve.http.app import make_app
from palm_ds.serve.http.connection import LARGEST_HEAD
from palm_ds.serve.model_set import ModelSet
from palm_ds.serve.scheduler import compute
from tests.helpers.serving import Local, listening, local, opened


@pytest.fixture(scope="module")
def models(words_run: Path) -> ModelSet:
    return opened(words=words_run)[0]


@pytest.fixture
def guarded(models: ModelSet) -> Iterator[Local]:
    with local(models, token="a-secret", max_bytes=200, read_timeout=0.2) as found:
        yield found


BODY = {"texts": ["good"]}


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer a-secre", "Basic a-secret", "a-secret"])
def test_without_the_token_nothing_is_answered(guarded: Local, header: str) -> None:
    headers = {"authorization": header} if header else {}
    for path in ("/embed", "/reload", "/v1/embeddings", "/"):
        status, message = guarded.refusal(path, BODY, headers=headers)
        assert (status, message) == (401, "send the server's token: Authorization: Bearer TOKEN")
    for path in ("/metrics", "/info"):
        found = guarded.get(path, headers=headers)
        assert (found.status_code, found.headers["www-authenticate"]) == (401, "Bearer")
    for path in ("/", "/docs", "/health", "/ready", "/static/app.js"):
        assert guarded.get(path, headers=headers).status_code == 200


def test_with_the_token_everything_is(guarded: Local) -> None:
    headers = {"authorization": "bearer a-secret"}
    assert guarded.post("/embed", BODY, headers=headers).status_code == 200
    assert guarded.get("/metrics", headers=headers).status_code == 200


OURS = ("localhost", "LOCALHOST:8080", "a.localhost", "localhost.", "127.0.0.1:80", "[::1]:80")
ALLOWED = ("models.example.org", "Models.Example.org:443")
REBOUND = ("evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil", "[::1")


@pytest.mark.parametrize("host", [*OURS, *ALLOWED, *REBOUND, "127.0.0.1@evil.example"])
def test_a_page_elsewhere_cannot_rebind_its_name_to_this_server(
    models: ModelSet, host: str
) -> None:
    with local(models) as server:
        for allowed in ((), ("models.example.org",), ("*",)):
            named = replace(server, allowed_hosts=allowed)
            found = named.post("/embed", BODY, headers={"host": host})
            if host in OURS or "*" in allowed or (host in ALLOWED and allowed):
                assert found.status_code == 200, (host, allowed)
            else:
                error = found.json()["error"]
                assert (found.status_code, error["type"]) == (421, "misdirected_request")
                assert f"Host {host!r}: not a name of this server; --allowed" in error["message"]
                assert named.get("/", headers={"host": host}).status_code == 421


def test_one_host_is_needed(models: ModelSet) -> None:
    with local(models) as server, listening(server.service) as url:
        hosts = {"HTTP/1.1": 400, "HTTP/1.1\r\nhost: localhost\r\nhost: evil": 400, "HTTP/1.0": 200}
        for rest, status in hosts.items():
            answer = sent_raw(url, f"GET /health {rest}\r\n\r\n".encode())
            assert answer.status_code == status, rest


def sent_raw(url: str, request: bytes) -> httpx.Response:
    """The answer to these bytes, after which the server closes the connection."""
    port = int(url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(request)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return httpx.Response(int(first.split()[1]), headers=headers, content=body)


def check_headers(answer: httpx.Response) -> None:
    policy = answer.headers["content-security-policy"]
    for rule in ("default-src 'self'", "frame-ancestors 'none'", "form-action 'none'"):
        assert rule in policy.split("; ")
    assert "base-uri 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_every_answer_has_the_headers_that_keep_other_pages_out(guarded: Local) -> None:
    paths = ("/", "/docs", "/static/app.js", "/static/none", "/openapi.json", "/health", "/info")
    for path in paths:
        check_headers(guarded.get(path))
    check_headers(guarded.post("/embed", BODY, headers={"host": "evil"}))


WRONG_HTTP = [
    b"nothing\r\n\r\n",
    b"GET / HTTP/9.9.9\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost localhost\r\n\r\n",
    b"POST /embed HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"POST /embed HTTP/1.1\r\nhost: localhost\r\ncontent-length: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS handshake
]


@pytest.mark.parametrize("request_", WRONG_HTTP)
def test_what_is_no_request_gets_the_one_form_of_errors(
    models: ModelSet, request_: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "palm_ds.serve.access")
    with local(models) as server, listening(server.service) as url:
        answer = sent_raw(url, request_)
        assert answer.status_code == 400
        check_headers(answer)
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("bad_request", 400)
        assert error["request_id"] == answer.headers["x-request-id"]
        assert [x for x in caplog.messages if x.startswith(f"{error['request_id']} 127.0.0.1 ")]
        large = b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * (LARGEST_HEAD + 9)
        assert sent_raw(url, large).json()["error"]["type"] == "headers_too_large"


def test_the_answer_of_one_request_is_never_taken_for_that_of_another(
    models: ModelSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that are no request follow one that is still computed."""
    ended = threading.Event()

    def held(*values: Any) -> list[Scores]:
        ended.wait(20)
        return compute(*values)

    monkeypatch.setattr("palm_ds.serve.scheduler.compute", held)
    body = json.dumps(BODY).encode()
    head = f"POST /embed HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    request = head.encode() + b"content-type: application/json\r\n\r\n" + body
    with local(models) as server, listening(server.service) as url:
        port = int(url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(request)
            time.sleep(0.1)
            connection.sendall(b"nothing\r\n\r\n")
            assert connection.recv(1000) == b""
        ended.set()


def test_a_wrong_method_names_the_right_ones(models: ModelSet) -> None:
    with local(models) as server:

        async def ask(client: httpx.AsyncClient) -> list[httpx.Response]:
            asked = [("DELETE", "/embed"), ("POST", "/info"), ("TRACE", "/openapi.json")]
            return [await client.request(*each) for each in asked]

        found = server.run(ask)
        assert [each.status_code for each in found] == [405] * 3
        allowed = [sorted(each.headers["allow"].split(", ")) for each in found]
        assert allowed == [["POST"], ["GET", "HEAD"], ["GET", "HEAD"]]


@pytest.mark.parametrize("stated", [True, False])
def test_large_bodies_are_refused(guarded: Local, stated: bool) -> None:
    """By their stated length, and by what comes if they state none."""
    body = json.dumps({"texts": ["good " * 60]}).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 50):
            yield body[at : at + 50]

    async def ask(client: httpx.AsyncClient) -> httpx.Response:
        headers = {"authorization": "Bearer a-secret", "content-type": "application/json"}
        return await client.post("/embed", content=body if stated else pieces(), headers=headers)

    found = guarded.run(ask)
    assert found.status_code == 413
    assert found.json()["error"]["message"] == "the body has more than 200 bytes"


def test_a_client_that_sends_too_slowly(guarded: Local) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"texts": ["good'
        await asyncio.sleep(5)
        yield b'"]}'

    async def ask(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(
            "/embed", content=pieces(), headers={"authorization": "Bearer a-secret"}
        )

    found = guarded.run(ask)
    assert found.status_code == 408
    assert found.json()["error"]["message"] == "no whole request in 0.2 s"


def test_ids_of_requests(models: ModelSet, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "palm_ds.serve.access")
    with local(models) as server:
        own = server.post("/embed", BODY, headers={"x-request-id": "mine-1"})
        assert own.headers["x-request-id"] == "mine-1"
        other = server.post("/embed", BODY, headers={"x-request-id": "forged\x0bline " * 9})
        made = other.headers["x-request-id"]
        assert made.isalnum() and made != server.post("/embed", BODY).headers["x-request-id"]
        assert server.get("/%0Aforged").status_code == 404
        server.get("/health")
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("mine-1 127.0.0.1 POST /embed 200 ")
    assert lines[1].startswith(f"{made} 127.0.0.1 POST /embed 200 ")
    assert r"GET /\nforged 404" in lines[3]
    assert len(lines) == 4  # those who only ask for the health are not logged


@pytest.mark.parametrize("given", ["soon", "-1", "0", "nan", "inf"])
def test_a_deadline_must_be_seconds(models: ModelSet, given: str) -> None:
    with local(models) as server:
        status, message = server.refusal("/embed", BODY, headers={"x-request-timeout": given})
        assert status == 422
        assert message.startswith(f"X-Request-Timeout: '{given}'")


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/health"])
def test_a_client_with_the_whole_answer_did_not_leave(
    models: ModelSet, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Files are closed after they were sent."""
    caplog.set_level(logging.INFO, "palm_ds.serve.access")
    with local(models) as server:
        with listening(server.service) as url:
            for method in ("GET", "HEAD"):
                assert httpx.request(method, url + path).status_code == 200
        text = server.service.metrics.text().decode()
    assert 'status="499"' not in text and 'status="200"} 2.0' in text
    assert not [line for line in caplog.messages if " 499 " in line]


def asgi(path: str, body: bytes) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
        "query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 5),
        "server": ("here", 80),
    }  # fmt: skip
    return scope, [{"type": "http.request", "body": body, "more_body": False}]


def test_what_a_client_that_left_asked_for_is_dropped(models: ModelSet) -> None:
    """Its texts leave the queue, and nothing is sent."""
    with local(models) as server:
        scope, given = asgi("/embed", json.dumps(BODY).encode())
        sent: list[Any] = []

        async def main() -> None:
            left = asyncio.Event()

            async def receive() -> dict[str, Any]:
                if given:
                    return given.pop()
                await left.wait()
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                sent.append(message)

            scheduler = server.service._scheduler
            with scheduler._changed:  # no device takes anything meanwhile
                asking = asyncio.ensure_future(make_app(server.service)(scope, receive, send))
                await asyncio.sleep(0.05)
                assert server.service.in_work == 1
                left.set()
                await asyncio.wait_for(asking, 5)

        asyncio.run(main())
        assert sent == []
        assert server.service.in_work == 0
        text = server.service.metrics.text().decode()
        assert 'palm_ds_requests_total{endpoint="embed",status="499"} 1.0' in text
        assert server.post("/embed", BODY).status_code == 200


def test_what_a_stopping_server_gives_up_has_the_usual_form(models: ModelSet) -> None:
    """uvicorn cancels what has not been answered in --drain_timeout."""
    with local(models) as server:
        scope, given = asgi("/embed", json.dumps(BODY).encode())
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return given.pop() if given else await asyncio.Future()

        async def send(message: Any) -> None:
            sent.append(message)

        async def main() -> None:
            with server.service._scheduler._changed:
                asking = asyncio.ensure_future(make_app(server.service)(scope, receive, send))
                await asyncio.sleep(0.05)
                asking.cancel()
                await asyncio.wait_for(asking, 5)

        asyncio.run(main())
        assert sent[0]["status"] == 503 and (b"retry-after", b"1") in sent[0]["headers"]
        assert json.loads(sent[1]["body"])["error"]["message"] == "this server has stopped"
        assert server.service.in_work == 0


def test_an_error_of_the_server_keeps_its_details(
    models: ModelSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local(models) as server:

        def broken(*_: object) -> None:
            raise RuntimeError("of a device: /secret/path")

        monkeypatch.setattr("palm_ds.serve.scheduler.compute", broken)
        found = server.post("/embed", BODY)
        assert found.status_code == 500
        assert "secret" not in found.text
        assert found.json()["error"]["request_id"] == found.headers["x-request-id"]
        monkeypatch.undo()
        assert server.post("/embed", BODY).status_code == 200
