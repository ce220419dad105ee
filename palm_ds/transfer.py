"""One file over HTTP, whole: goes on where it broke off, waits and tries again, checks, publishes.

    file.part        what is there so far       file.part.json   of which URL and version
    file.lock        held by the process that downloads
    file             there whole or not at all

A server that ignores `Range`, or has another version by now, makes it begin from 0. What a server
states is believed for its size alone; `size` and `sha256` are for what is known beforehand.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import json
import os
import re
import shutil
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palm_ds.errors import UserError

Progress = Callable[[int, int | None], None]
"""Called with the bytes that are there and, where known, those of the whole."""

_CHUNK = 1 << 18
_AGAIN = {408, 425, 429, 500, 502, 503, 504}  # what another try may put right


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to try. A try that brings new bytes starts the count again."""

    tries: int = 6
    wait: float = 1.0
    """Seconds before the second try; twice as long before each further one."""
    longest_wait: float = 30.0
    timeout: float = 60.0
    """Seconds without a byte after which a connection is broken."""
    most: int = 64 << 30
    """Bytes after which a file is no file."""


PATIENCE = Patience()


class _Broken(Exception):  # noqa: N818  a state of a try, nobody else sees it
    """This try failed and another may do better. `wait`: as long as the server asks for."""

    def __init__(self, why: str, wait: float | None = None):
        super().__init__(why)
        self.wait = wait


def fetch(
    url: str,
    file: Path,
    *,
    size: int | None = None,
    sha256: str | None = None,
    patience: Patience = PATIENCE,
    progress: Progress = lambda done, total: None,
) -> Path:
    """Download `url` as `file`, unless it is there; returns it.

    Other processes wait for the one that downloads. Raises UserError in one line: what the server
    said, a host that cannot be reached, a full disk, a wrong size or checksum; of a wrong file
    nothing is kept, of a broken connection the part.
    """
    if not re.match(r"https?://[^/\s]+/\S*$", url, re.IGNORECASE):
        raise UserError(f"{url}: not an http or https address")
    with locked(file, file.name):
        if not file.exists():
            part = _Part(url, file, size)
            try:
                _fetch(part, patience, progress)
            except UserError:
                if not part.done:
                    part.forget()
                raise
            _check(file.with_name(file.name + ".part"), url, size, sha256)
            _publish(file)
    return file


def _fetch(part: _Part, patience: Patience, progress: Progress) -> None:
    failed, best = 0, part.done
    while True:
        try:
            _one_try(part, patience, progress)
            return
        except _Broken as broken:
            failed = 1 if part.done > best else failed + 1
            best = max(best, part.done)
            if failed >= patience.tries:
                so_far = f" ({part.done:,} bytes are kept to go on from)" if part.done else ""
                raise UserError(f"{part.url}: {broken}, {failed} times{so_far}") from None
            wait = patience.wait * 2 ** (failed - 1) if broken.wait is None else broken.wait
            wait = min(wait, patience.longest_wait)
            if wait >= 1:
                print(f"{part.url}: {broken}; again in {wait:.0f} s", file=sys.stderr, flush=True)
            time.sleep(wait)


# ---- the part that is there ----


class _Part:
    """The bytes that are there, and what they are bytes of."""

    def __init__(self, url: str, file: Path, size: int | None):
        self.url, self.known_size = url, size
        self.path = file.with_name(file.name + ".part")
        self.about = file.with_name(file.name + ".part.json")
        self.version, self.total = "", size
        self._recall()

    @property
    def done(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def _recall(self) -> None:
        """What `remember` wrote; a part of another URL, or of an unknown one, is none."""
        try:
            about = json.loads(self.about.read_text("utf-8"))
            url, version, total = (about[key] for key in ("url", "version", "total"))
        except (OSError, ValueError, LookupError, TypeError):
            url, version, total = "", "", None
        if url == self.url and isinstance(version, str) and isinstance(total, int | None):
            self.version, self.total = version, total
        else:
            self.forget()

    def remember(self, version: str, total: int | None) -> None:
        self.version, self.total = version, total
        about = {"url": self.url, "version": version, "total": total}
        with _writing(self.about):
            self.about.write_text(json.dumps(about) + "\n", "utf-8")

    def forget(self) -> None:
        self.version, self.total = "", self.known_size
        for path in (self.path, self.about):
            path.unlink(missing_ok=True)


# ---- one try ----


def _one_try(part: _Part, patience: Patience, progress: Progress) -> None:
    headers = {"User-Agent": "palm_ds", "Accept-Encoding": "identity"}
    if part.done:
        headers["Range"] = f"bytes={part.done}-"
        if part.version:
            headers["If-Range"] = part.version
    try:
        with _open(part.url, headers, patience.timeout) as response:
            total = _settle(part, response)
            _check_room(part, total, patience)
            _read(part, response, total, patience, progress)
    except urllib.error.HTTPError as error:
        error.close()
        _http_error(part, error)
    except urllib.error.URLError as error:
        raise _Broken(f"{_host(part.url)} cannot be reached ({_reason(error.reason)})") from None
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        raise _Broken(f"the connection broke ({_reason(error)})") from None


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Redirects stay with http and https, and never leave https."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str):
        old, new = (urllib.parse.urlsplit(url).scheme for url in (req.full_url, newurl))
        if new not in ("http", "https") or (old, new) == ("https", "http"):
            fp.close()
            raise UserError(f"{req.full_url}: leads to {newurl[:200]!r}, which is not followed")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _open(url: str, headers: dict[str, str], timeout: float) -> Any:
    opener = urllib.request.build_opener(_Redirects)
    return opener.open(urllib.request.Request(url, headers=headers), timeout=timeout)


def _settle(part: _Part, response: Any) -> int | None:
    """Whether the answer goes on with the part or begins anew; the size of the whole, if said."""
    version = _version(response.headers)
    length = response.headers.get("Content-Length", "")
    if response.status == 206:
        found = re.fullmatch(
            r"bytes (\d{1,18})-\d+/(\d{1,18}|\*)", response.headers.get("Content-Range", "").strip()
        )
        total = int(found[2]) if found and found[2] != "*" else None
        if found and int(found[1]) == part.done and part.total in (None, total):
            part.remember(version or part.version, total)
            return total
        part.forget()
        raise _Broken("the server sent another part than was asked for", wait=0)
    total = int(length) if re.fullmatch(r"\d{1,18}", length) else None
    part.forget()
    part.remember(version, total)
    return total


def _version(headers: Any) -> str:
    """What tells versions of a file apart: a strong ETag, or a date."""
    tag = headers.get("ETag", "")
    return tag if tag.startswith('"') else headers.get("Last-Modified", "")


def _check_room(part: _Part, total: int | None, patience: Patience) -> None:
    if total is None:
        return
    if part.known_size is not None and total != part.known_size:
        part.forget()
        raise UserError(f"{part.url}: {total:,} bytes there, {part.known_size:,} are right")
    if total > patience.most:
        part.forget()
        raise UserError(f"{part.url}: {total:,} bytes; more than {patience.most:,} are not taken")
    free = shutil.disk_usage(part.path.parent).free
    if total - part.done > free:
        raise UserError(
            f"{part.path}: the disk is full: {total - part.done:,} bytes are to come, "
            f"{free:,} are free"
        )


def _read(
    part: _Part, response: Any, total: int | None, patience: Patience, progress: Progress
) -> None:
    done = part.done
    progress(done, total)
    with _writing(part.path):
        file = part.path.open("ab")
    with file:
        while chunk := response.read1(_CHUNK):
            done += len(chunk)
            if done > (patience.most if total is None else total):
                part.forget()
                raise UserError(f"{part.url}: the server sends more than it should")
            with _writing(part.path):
                file.write(chunk)
                file.flush()
            progress(done, total)
    if total is not None and done < total:
        raise _Broken(f"the connection ended after {done:,} of {total:,} bytes")


def _http_error(part: _Part, error: urllib.error.HTTPError) -> None:
    if error.code == 416:  # nothing beyond the part: it is the whole, or of another file
        whole = re.fullmatch(r"bytes \*/(\d{1,18})", error.headers.get("Content-Range", "").strip())
        if whole and int(whole[1]) == part.done:
            return
        part.forget()
        raise _Broken("the server has nothing beyond the part that is here", wait=0)
    said = f"the server says {error.code} {_line(error.reason)}"
    if error.code in _AGAIN:
        asked = error.headers.get("Retry-After", "")
        raise _Broken(said, wait=float(asked) if asked.isdecimal() else None)
    raise UserError(f"{part.url}: {said}") from None


def _host(url: str) -> str:
    return urllib.parse.urlsplit(url).netloc


def _reason(error: object) -> str:
    return _line((error.strerror if isinstance(error, OSError) else None) or error or repr(error))


def _line(said: object) -> str:
    """One line of what a stranger said, without what a terminal would obey."""
    first = (str(said).splitlines() or [""])[0][:200]
    return "".join(letter if letter.isprintable() else "?" for letter in first)


# ---- publishing ----


def _check(part: Path, url: str, size: int | None, sha256: str | None) -> None:
    found = part.stat().st_size
    wrong = f"{found:,} bytes came, {size:,} are right" if size not in (None, found) else ""
    if not wrong and sha256 is not None:
        with part.open("rb") as file:
            digest = hashlib.sha256()
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        if digest.hexdigest() != sha256.lower():
            wrong = f"sha256 is {digest.hexdigest()}, {sha256.lower()} is right"
    if wrong:
        for path in (part, part.with_name(part.name + ".json")):
            path.unlink(missing_ok=True)
        raise UserError(f"{url}: {wrong}; nothing is kept of it")


def _publish(file: Path) -> None:
    part = file.with_name(file.name + ".part")
    with _writing(file):
        os.replace(part, file)
    part.with_name(part.name + ".json").unlink(missing_ok=True)


@contextmanager
def locked(file: Path, name: str) -> Iterator[None]:
    """One process at a time, by `file`.lock. The lock goes with its process, however that ends.
    `name`: of what others wait for."""
    with _writing(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle = file.with_name(file.name + ".lock").open("ab")
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{name}: another process is at it; waiting", file=sys.stderr, flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """A disk that is full, a folder that is not ours: no fault of the connection's."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
