"""Downloads one file over HTTP: resumes, retries, checks size and hash, then renames it into place.

    file.part        the bytes so far           file.part.json   their URL and version
    file.lock        held by the process that downloads
    file             complete or absent

If the server ignores `Range` or has a new version of the file, the download restarts from 0. Not
`pooch`, which has no resume and no lock, nor huggingface_hub's `http_get`, which can join bytes of
two versions of a file (no If-Range, no check of Content-Range) and takes files of any size.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from email.message import Message
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPMessage, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import IO

from palm_ds.common.atomic import move_into_place
from palm_ds.common.errors import UserError
from palm_ds.common.files import locked, sha256_of_file
from palm_ds.common.remote_files import Retries, RetryableError, retried

log = logging.getLogger(__name__)

Progress = Callable[[int, int | None], None]
"""Called with the bytes so far and, if known, the size of the whole file."""

_CHUNK = 1 << 18
_CONNECT_SECONDS = 10.0
_RETRY_CODES = {408, 425, 429, 500, 502, 503, 504}  # worth a retry


@dataclass(frozen=True, kw_only=True)
class Patience(Retries):
    """Limits of a download."""

    reaches: int = 2
    """Tries while the host cannot be reached and nothing has come from it."""
    timeout: float = 60.0
    """Seconds without a byte after which a connection counts as broken."""
    most: int = 64 << 30
    """Bytes; a larger file is refused."""


PATIENCE = Patience()


def fetch(
    url: str,
    file: Path,
    *,
    size: int | None = None,
    sha256: str | None = None,
    patience: Patience = PATIENCE,
    progress: Progress = lambda done, total: None,
) -> Path:
    """Download `url` to `file` unless it exists; returns the file.

    Other processes wait for the one that downloads. Raises UserError with one line: the server's
    answer, an unreachable host, a full disk, a wrong size or hash. The partial file is kept after a
    broken connection; a wrong file never is.
    """
    if not re.match(r"https?://[^/\s]+/\S*$", url, re.IGNORECASE):
        raise UserError(f"{url}: not an http or https URL")
    with one_at_a_time(file, file.name):
        if not file.exists():
            part = _PartialFile(url, file, size)
            try:
                _fetch(part, patience, progress)
            except UserError:
                if not part.done:
                    part.forget()
                raise
            _check(part, sha256)
            with _writing(file):
                move_into_place(part.path, file)
            part.forget()
    return file


def _fetch(part: _PartialFile, patience: Patience, progress: Progress) -> None:
    def failure(error: RetryableError, times: int) -> UserError:
        so_far = f" ({part.done:,} bytes are kept for the next try)" if part.done else ""
        many = f", {times} times" if times > 1 else ""
        return UserError(f"{part.url}: {error}{many}{so_far}")

    retried(
        lambda: _one_try(part, patience, progress),
        part.url,
        patience,
        failure=failure,
        progress=lambda: part.done,
    )


# ---- the partial file ----


class _PartialFile:
    """The bytes so far, and the URL and version they belong to."""

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
        """Read what `remember` wrote; bytes of another or unknown URL are deleted."""
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


def _one_try(part: _PartialFile, patience: Patience, progress: Progress) -> None:
    headers = {"User-Agent": "palm_ds", "Accept-Encoding": "identity"}
    if part.done:
        headers["Range"] = f"bytes={part.done}-"
        if part.version:
            headers["If-Range"] = part.version
    try:
        with _open(part.url, headers, patience.timeout) as response:
            total = _resume_or_restart(part, response)
            _check_room(part, total, patience)
            _read(part, response, total, patience, progress)
    except urllib.error.HTTPError as error:
        error.close()
        _http_error(part, error)
    except urllib.error.URLError as error:
        silent = isinstance(error.reason, TimeoutError)  # TCP itself has retried
        why = (
            f"{urllib.parse.urlsplit(part.url).netloc} cannot be reached ({_reason(error.reason)})"
        )
        raise RetryableError(why, tries=1 if silent else patience.reaches) from None
    except (OSError, HTTPException, UnicodeError) as error:
        raise RetryableError(f"the connection broke ({_reason(error)})") from None


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects only to http and https, and never from https to http."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        old, new = (urllib.parse.urlsplit(url).scheme for url in (req.full_url, newurl))
        if new not in ("http", "https") or (old, new) == ("https", "http"):
            fp.close()
            why = "not followed: only to http and https, and never from https to http"
            raise UserError(f"{req.full_url}: redirects to {newurl[:200]!r}, {why}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _Connection(HTTPConnection):
    """Waits less for the host than for its answers."""

    def connect(self) -> None:
        answer, self.timeout = self.timeout, _CONNECT_SECONDS
        super().connect()
        self.sock.settimeout(answer)


class _SecureConnection(_Connection, HTTPSConnection):
    pass


class _Connections(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    def http_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(_Connection, req)

    def https_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(_SecureConnection, req)


def _open(url: str, headers: dict[str, str], timeout: float) -> HTTPResponse:
    opener = urllib.request.build_opener(_Redirects, _Connections)
    return opener.open(urllib.request.Request(url, headers=headers), timeout=timeout)


def _resume_or_restart(part: _PartialFile, response: HTTPResponse) -> int | None:
    """Resume the partial file or restart it, as the answer allows; returns the size of the complete
    file, if known."""
    version = _version(response.headers)
    length = response.headers.get("Content-Length", "")
    if response.status == 206:
        match = re.fullmatch(
            r"bytes (\d{1,18})-\d+/(\d{1,18}|\*)", response.headers.get("Content-Range", "").strip()
        )
        total = int(match[2]) if match and match[2] != "*" else None
        if match and int(match[1]) == part.done and part.total in (None, total):
            part.remember(version or part.version, total)
            return total
        part.forget()
        raise RetryableError("the server sent a range that was not requested", wait=0)
    total = int(length) if re.fullmatch(r"\d{1,18}", length) else None
    part.forget()
    part.remember(version, total)
    return total


def _version(headers: Message) -> str:
    """Identifies the version of a file: a strong ETag, or a date."""
    tag = headers.get("ETag", "")
    return tag if tag.startswith('"') else headers.get("Last-Modified", "")


def _check_room(part: _PartialFile, total: int | None, patience: Patience) -> None:
    if total is None:
        return
    if part.known_size is not None and total != part.known_size:
        part.forget()
        raise UserError(f"{part.url}: has {total:,} bytes; {part.known_size:,} expected")
    if total > patience.most:
        part.forget()
        raise UserError(f"{part.url}: has {total:,} bytes; at most {patience.most:,} are accepted")
    free = shutil.disk_usage(part.path.parent).free
    if total - part.done > free:
        raise UserError(
            f"{part.path}: not enough disk space: {total - part.done:,} more bytes are needed, "
            f"{free:,} are free"
        )


def _read(
    part: _PartialFile,
    response: HTTPResponse,
    total: int | None,
    patience: Patience,
    progress: Progress,
) -> None:
    done = part.done
    progress(done, total)
    with _writing(part.path):
        file = part.path.open("ab")
    try:
        while chunk := response.read1(_CHUNK):
            done += len(chunk)
            if done > (patience.most if total is None else total):
                part.forget()
                raise UserError(f"{part.url}: the server sends more than it announced")
            with _writing(part.path):
                file.write(chunk)
                file.flush()
            progress(done, total)
    finally:
        with _writing(part.path):  # closing flushes what a full disk refused, and may fail again
            file.close()
    if total is not None and done < total:
        raise RetryableError(f"the connection ended after {done:,} of {total:,} bytes")


def _http_error(part: _PartialFile, error: urllib.error.HTTPError) -> None:
    if error.code == 416:  # nothing after the partial file: it is complete, or of another file
        whole = re.fullmatch(r"bytes \*/(\d{1,18})", error.headers.get("Content-Range", "").strip())
        if whole and int(whole[1]) == part.done:
            return
        part.forget()
        raise RetryableError("the server has nothing after the bytes received so far", wait=0)
    said = f"the server answered {error.code} {_line(error.reason)}"
    if error.code in _RETRY_CODES:
        asked = error.headers.get("Retry-After", "")
        raise RetryableError(said, wait=float(asked) if asked.isdecimal() else None)
    raise UserError(f"{part.url}: {said}") from None


def _reason(error: object) -> str:
    return _line((error.strerror if isinstance(error, OSError) else None) or error or repr(error))


def _line(said: object) -> str:
    """One line of an untrusted text, without control characters for the terminal."""
    first = (str(said).splitlines() or [""])[0][:200]
    return "".join(letter if letter.isprintable() else "?" for letter in first)


# ---- publishing ----


def _check(part: _PartialFile, sha256: str | None) -> None:
    wrong, size = "", part.known_size
    if size not in (None, part.done):
        wrong = f"{part.done:,} bytes received, {size:,} expected"
    elif sha256 is not None:
        digest = sha256_of_file(part.path)
        if digest != sha256.lower():
            wrong = f"sha256 is {digest}, {sha256.lower()} expected"
    if wrong:
        part.forget()
        raise UserError(f"{part.url}: {wrong}; the file is deleted")


def one_at_a_time(file: Path, name: str) -> AbstractContextManager[None]:
    """Admit one process at a time, by `file`.lock. `name`: shown to those that wait."""
    lock = file.with_name(file.name + ".lock")
    with _writing(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()
    say = partial(log.warning, "%s: another process is working on it; waiting", name)
    return locked(lock, on_wait=say)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn a full disk or a folder without write access into a UserError: a retry does not help."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
