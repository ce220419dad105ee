"""Files of a corpus: in a folder, or behind a URL, fetched when they are needed and uploaded when
the corpus is prepared.

    folder = open_folder("s3://bucket/wiki")
    folder.hold("data-00003-of-00128.arrow").path    # a file on this machine

What is fetched lies in $PALM_DS_CACHE (or $XDG_CACHE_HOME/palm_ds, ~/.cache/palm_ds):

    corpora/KEY/               manifest.json and tokenizer/; KEY is the hash of the manifest
    files/KEY/                 shards and index, up to $PALM_DS_CACHE_GB (100) for all corpora
    prepare/NAME-KEY           a corpus on this machine, until all of it is behind its URL
            NAME-KEY.uploaded  names of the files that are there
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from palm_ds.common.atomic import write_file_atomically, write_folder_atomically
from palm_ds.common.errors import TemporaryError, UserError
from palm_ds.common.file_cache import FileCache, HeldFile
from palm_ds.common.files import cache_folder, check_locks, hash_of_text
from palm_ds.common.messages import byte_size
from palm_ds.common.remote_files import RETRIES, RemoteFolder, Retries, is_url
from palm_ds.corpus.manifest import NAME, Manifest, check_files, read_manifest

log = logging.getLogger(__name__)

_PARALLEL_FETCHES = 4  # files that are fetched at the same time
_DEFAULT_GB = 100.0
_UNFINISHED = "UNFINISHED"  # a file behind the URL of a corpus that is not all there


class CorpusFolder(ABC):
    """The files of a corpus by their names in the manifest."""

    path: Path | str
    manifest: Manifest
    local: Path
    """A folder on this machine with manifest.json, for what is derived from the corpus."""

    @abstractmethod
    def hold(self, name: str, release: Callable[[], bool] = lambda: False) -> HeldFile:
        """A file, which stays there while the result exists."""

    @abstractmethod
    def tokenizer(self) -> Path:
        """The folder tokenizer/."""

    @abstractmethod
    def prefetch(self, names: Sequence[str]) -> None:
        """Fetches files that will be read soon, in this order, as far as there is room."""

    def verify(self) -> None:
        """Compares every file with its hash in the manifest."""
        for name in self.manifest.files:
            self.hold(name)


class LocalFolder(CorpusFolder):
    """A folder on this machine."""

    def __init__(self, path: Path) -> None:
        self.path = self.local = path
        self.manifest = read_manifest(path)

    def hold(self, name: str, release: Callable[[], bool] = lambda: False) -> HeldFile:
        return HeldFile(Path(self.path) / name)

    def tokenizer(self) -> Path:
        return self.local / "tokenizer"

    def prefetch(self, names: Sequence[str]) -> None:
        pass

    def verify(self) -> None:
        check_files(self.local, self.manifest, hashes=True)


class CachedFolder(CorpusFolder):
    """Files behind a URL. Every file that is fetched is compared with its hash."""

    def __init__(self, url: str, cache: Path, limit: int, retries: Retries) -> None:
        self.path = url
        self._remote = RemoteFolder(url, retries)
        data = self._manifest()
        key = hashlib.sha256(data).hexdigest()[:24]
        self.local, self._key = cache / "corpora" / key, key
        self.local.mkdir(parents=True, exist_ok=True)
        self.manifest = self._read(data)
        check_locks(self.local / NAME, "PALM_DS_CACHE")
        self._cache = FileCache(cache / "files", limit)

    def _manifest(self) -> bytes:
        try:
            return self._remote.read(NAME)
        except UserError as error:
            raise UserError(f"{error}; a corpus is a folder made by palm-ds prepare") from None

    def _read(self, data: bytes) -> Manifest:
        if not (self.local / NAME).is_file():
            write_file_atomically(self.local / NAME, data)
        try:
            return read_manifest(self.local)
        except UserError as error:
            (self.local / NAME).unlink(missing_ok=True)
            raise UserError(str(error).replace(str(self.local), str(self.path))) from None

    def hold(self, name: str, release: Callable[[], bool] = lambda: False) -> HeldFile:
        return self._cache.hold(
            f"{self._key}/{name}", self._entry(name), self._fetch(name), release
        )

    def tokenizer(self) -> Path:
        folder = self.local / "tokenizer"
        if not folder.is_dir():
            write_folder_atomically(folder, self._copy_tokenizer)
        return folder

    def prefetch(self, names: Sequence[str]) -> None:
        keep = [f"{self._key}/{name}" for name in names]

        def fetch(name: str) -> None:
            try:
                self._cache.prefetch(
                    f"{self._key}/{name}", self._entry(name), self._fetch(name), keep
                )
            except TemporaryError as error:  # the reader of the file tries again
                log.info("%s", error)

        with ThreadPoolExecutor(_PARALLEL_FETCHES) as threads:
            list(threads.map(fetch, names))

    def _copy_tokenizer(self, folder: Path) -> None:
        for name in self.manifest.files:
            if name.startswith("tokenizer/"):
                data = self.hold(name).path.read_bytes()
                (folder / name.removeprefix("tokenizer/")).write_bytes(data)

    def _entry(self, name: str) -> dict:
        return dict(self.manifest.files[name])

    def _fetch(self, name: str) -> Callable:
        size = self._entry(name)["bytes"]
        return lambda file: self._remote.download(name, size, file)


def open_folder(path: str | Path, *, check: bool = True) -> CorpusFolder:
    """The files of the corpus at a path or URL. `check` compares the sizes of local ones with the
    manifest; those behind a URL are compared when they are fetched."""
    if is_url(path):
        return CachedFolder(str(path), *cache_settings(), RETRIES)
    folder = LocalFolder(Path(path))
    if check:
        check_files(folder.local, folder.manifest, hashes=False)
    return folder


def cache_settings() -> tuple[Path, int]:
    """The folder and size in bytes of the cache."""
    stated = os.environ.get("PALM_DS_CACHE_GB", str(_DEFAULT_GB))
    try:
        size = float(stated)
    except ValueError:
        size = 0.0
    if not 0 < size < math.inf:
        raise UserError(f"PALM_DS_CACHE_GB={stated}: must be a number above 0")
    return cache_folder(), int(size * 1e9)


def work_folder(url: str) -> Path:
    """Folder in which a corpus is prepared that will be put behind a URL."""
    key = hash_of_text(url)[:16]
    name = url.rstrip("/").rpartition("/")[2]
    folder = cache_settings()[0] / "prepare" / f"{name}-{key}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder


def check_writable(remote: RemoteFolder) -> None:
    """Raises UserError if nothing can be written behind the URL, before any work is done."""
    remote.write(_UNFINISHED, b"This corpus is being prepared.\n")


def upload(folder: Path, remote: RemoteFolder, manifest: Manifest) -> None:
    """Uploads a finished corpus and removes it from this machine. The manifest is last: before
    that, the URL is not a corpus. An interrupted upload continues with the files that are
    missing."""
    done = folder.with_name(folder.name + ".uploaded")
    finished = set(done.read_text("utf-8").splitlines()) if done.is_file() else set()
    names = [name for name in (*manifest.files, "state.json") if name not in finished]
    size = sum((folder / name).stat().st_size for name in names)
    log.info("uploading %d files (%s) to %s", len(names), byte_size(size), remote.url)
    with done.open("a", encoding="utf-8") as record:
        for name in names:
            remote.upload(folder / name, name)
            record.write(name + "\n")
            record.flush()
    remote.upload(folder / NAME, NAME)
    remote.remove(_UNFINISHED)
    shutil.rmtree(folder)
    done.unlink()
