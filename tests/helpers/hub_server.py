"""A stand-in of the hub on loopback: repositories, branches, commits and LFS uploads, as
huggingface_hub asks for them.

    with hub_server() as hub:
        hub.url; hub.token                 # HF_ENDPOINT, and the only token it accepts
        hub.repos["org/name"].branches     # {branch: {path: content}}
        hub.refuse("commit", 429, **{"Retry-After": "7"})   # the next request with this in its path
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

Answer = tuple[int, Any]


@dataclass
class Repo:
    private: bool = False
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    commits: list[dict[str, Any]] = field(default_factory=list)
    """{revision, summary, regular, lfs, deleted} of each commit."""


class HubServer(ThreadingHTTPServer):
    daemon_threads = True
    token = "hf_" + "x" * 34
    writes_to = ("org",)
    """Where the token may create repositories."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, Repo] = {}
        self.stored: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.refusals: list[tuple[str, int, dict[str, str]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def refuse(self, part: str, status: int, **headers: str) -> None:
        self.refusals.append((part, status, headers))

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that disconnects is not an error here."""


class _Handler(BaseHTTPRequestHandler):
    server: HubServer  # type: ignore[assignment]

    def do_GET(self) -> None:  # noqa: N802
        self._answer("GET")

    def do_POST(self) -> None:  # noqa: N802
        self._answer("POST")

    def do_PUT(self) -> None:  # noqa: N802
        self._answer("PUT")

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def _answer(self, method: str) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        hub.asked.append(f"{method} {path}")
        for refusal in hub.refusals:
            if refusal[0] in path:
                hub.refusals.remove(refusal)
                return self._send(refusal[1], {"error": "refused"}, refusal[2])
        if path.startswith("/lfs/"):  # presigned
            return self._send(*self._store(path.removeprefix("/lfs/"), body), {})
        if self.headers.get("Authorization") != f"Bearer {hub.token}":
            message = "Invalid credentials in Authorization header"
            return self._send(401, {"error": message}, {"X-Error-Message": message})
        for pattern, answer in _ROUTES:
            if found := re.fullmatch(pattern, f"{method} {path}"):
                status, content = answer(hub, body, *found.groups())
                missing = {"X-Error-Code": "RepoNotFound"} if status == 404 else {}
                return self._send(status, content, missing)
        return self._send(501, {"error": f"no {method} {path} here"}, {})

    def _store(self, oid: str, body: bytes) -> Answer:
        if hashlib.sha256(body).hexdigest() != oid:
            return 400, {"error": "another sha256"}
        self.server.stored[oid] = body
        return 200, {}

    def _send(self, status: int, content: Any, headers: dict[str, str]) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(text)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)


def _create(hub: HubServer, body: bytes) -> Answer:
    about = json.loads(body)
    name = f"{about['organization']}/{about['name']}"
    if name in hub.repos:
        return 409, {"error": "You already created this model repo", "url": f"{hub.url}/{name}"}
    if about["organization"] not in hub.writes_to:
        return 403, {"error": f"You don't have the rights to create a model under {name}"}
    hub.repos[name] = Repo(private=about.get("visibility") == "private")
    return 200, {"url": f"{hub.url}/{name}"}


def _info(hub: HubServer, _body: bytes, name: str) -> Answer:
    if name not in hub.repos:
        return 404, {"error": "Repository not found"}
    return 200, {"id": name, "private": hub.repos[name].private, "sha": "0" * 40, "tags": []}


def _branch(hub: HubServer, _body: bytes, name: str, revision: str) -> Answer:
    branches = hub.repos[name].branches
    if revision in branches:
        return 409, {"error": "Reference already exists"}
    branches[revision] = dict(branches["main"])
    return 200, {}


def _tree(hub: HubServer, _body: bytes, name: str, revision: str) -> Answer:
    files = hub.repos[name].branches[revision]
    listed = [
        {"type": "file", "path": path, "size": len(content), "oid": "0" * 40}
        for path, content in files.items()
    ]
    return 200, listed


def _preupload(hub: HubServer, body: bytes, name: str, _revision: str) -> Answer:
    if name not in hub.repos:
        return 404, {"error": "Repository not found"}
    files = [
        {
            "path": each["path"],
            "uploadMode": "lfs" if each["path"].endswith((".safetensors", ".onnx")) else "regular",
            "shouldIgnore": False,
        }
        for each in json.loads(body)["files"]
    ]
    return 200, {"files": files}


def _batch(hub: HubServer, body: bytes, _name: str) -> Answer:
    objects = [
        {**each, "actions": {"upload": {"href": f"{hub.url}/lfs/{each['oid']}"}}}
        for each in json.loads(body)["objects"]
    ]
    return 200, {"transfer": "basic", "objects": objects}


def _commit(hub: HubServer, body: bytes, name: str, revision: str) -> Answer:
    repo = hub.repos[name]
    files = repo.branches[revision]
    done: dict[str, Any] = {"regular": [], "lfs": [], "deleted": []}
    for line in body.splitlines():
        item = json.loads(line)
        key, value = item["key"], item["value"]
        if key == "header":
            done |= {"revision": revision, "summary": value["summary"]}
        elif key == "file":
            files[value["path"]] = base64.b64decode(value["content"])
            done["regular"].append(value["path"])
        elif key == "lfsFile":
            files[value["path"]] = hub.stored[value["oid"]]
            done["lfs"].append(value["path"])
        elif key == "deletedFile":
            del files[value["path"]]
            done["deleted"].append(value["path"])
    repo.commits.append(done)
    oid = f"{len(repo.commits):040d}"
    return 200, {"commitUrl": f"{hub.url}/{name}/commit/{oid}", "commitOid": oid}


_REPO = "([^/]+/[^/]+)"
_ROUTES: list[tuple[str, Callable[..., Answer]]] = [
    ("POST /api/repos/create", _create),
    ("POST /api/validate-yaml", lambda _hub, _body: (200, {"errors": [], "warnings": []})),
    (f"GET /api/models/{_REPO}", _info),
    (f"POST /api/models/{_REPO}/branch/(.+)", _branch),
    (f"GET /api/models/{_REPO}/tree/(.+)", _tree),
    (f"POST /api/models/{_REPO}/preupload/(.+)", _preupload),
    (rf"POST /{_REPO}\.git/info/lfs/objects/batch", _batch),
    (f"POST /api/models/{_REPO}/commit/(.+)", _commit),
]


@contextmanager
def hub_server() -> Iterator[HubServer]:
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
