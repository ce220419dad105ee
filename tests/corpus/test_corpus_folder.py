"""Corpora behind a URL: read through a bounded cache that processes share."""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import fsspec
import numpy as np
import pytest

from palm_ds.common import remote_files
from palm_ds.common.errors import TemporaryError, UserError
from palm_ds.common.file_cache import FileCache
from palm_ds.common.files import hash_of_text
from palm_ds.common.remote_files import Retries
from palm_ds.corpus import corpus_folder, writer
from palm_ds.corpus.manifest import write_manifest
from palm_ds.corpus.options import TextOptions
from palm_ds.corpus.prepare import PrepareOptions, prepare
from palm_ds.corpus.store import Corpus, open_corpus
from tests.helpers import loopback


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """A corpus of six shards and more."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    words = np.array(["the", "cat", "New", "York", "sat", "on", "mats", "today"])
    texts = [". ".join(" ".join(rng.choice(words, 9)) for _ in range(5)) for _ in range(200)]
    (folder / "a.txt").write_text("\n\n".join(texts))
    text = TextOptions(language="en", collocations=False)
    options = PrepareOptions(train="wordpiece", vocab_size=300, shard_mb=0.006, text=text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "BATCH_TOKENS", 300)
        prepare(folder / "corpus", [str(folder / "a.txt")], options)
    return open_corpus(folder / "corpus")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PALM_DS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(corpus_folder, "RETRIES", Retries(tries=3, wait=0.01))
    monkeypatch.setattr(remote_files, "_CHUNK", 4096)
    return tmp_path / "cache"


@pytest.fixture
def server(local: Corpus) -> Iterator[loopback.Server]:
    with loopback.serve() as server:
        for file in Path(local.path).rglob("*"):
            if file.is_file():
                server.files[f"/c/{file.relative_to(local.path)}"] = file.read_bytes()
        yield server
        fsspec.filesystem("http").clear_instance_cache()


def everything(corpus: Corpus) -> list[tuple]:
    documents = (corpus.document(number) for number in range(len(corpus)))
    return [
        (name, span.ids.tolist(), {k: v.tolist() for k, v in span.annotations.items()})
        for name, span in documents
    ]


def shards_in(cache: Path) -> list[str]:
    return sorted(file.name for file in cache.rglob("data-*.arrow"))


def total(cache: Path) -> int:
    return sum(file.stat().st_size for file in (cache / "files").rglob("*") if file.is_file())


def limit_to(monkeypatch: pytest.MonkeyPatch, local: Corpus, shards: float) -> int:
    """A cache with room for the index and a number of shards."""
    files = local.manifest.files
    index = sum(entry["bytes"] for name, entry in files.items() if "/" in name)
    largest = max(files[shard.name]["bytes"] for shard in local.manifest.shards)
    limit = index + int(shards * largest)
    monkeypatch.setenv("PALM_DS_CACHE_GB", str(limit / 1e9))
    return limit


def flock_of_nfs(
    file: int | BinaryIO, operation: int, flock: Callable[[int, int], None] = fcntl.flock
) -> None:
    """Locks for one process what it may write, others what it may read (flock(2))."""
    descriptor = file if isinstance(file, int) else file.fileno()
    mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
    if mode == (os.O_RDONLY if operation & fcntl.LOCK_EX else os.O_WRONLY):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    flock(descriptor, operation)


def test_a_corpus_in_memory_reads_the_same(local: Corpus, cache: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(f"{local.path}/", "/bucket/wiki/", recursive=True)
    remote = open_corpus("memory://bucket/wiki")
    assert shards_in(cache) == []  # nothing is fetched before it is read
    assert everything(remote) == everything(local)
    assert remote.tokenizer().fingerprint == local.tokenizer().fingerprint
    assert str(remote.path) == "memory://bucket/wiki"
    again = pickle.loads(pickle.dumps(remote))
    assert again.document(3)[0] == local.document(3)[0]
    memory.rm("/bucket", recursive=True)


def test_a_corpus_over_http_with_failing_requests(
    local: Corpus, server: loopback.Server, cache: Path
) -> None:
    failures = loopback.status(503), loopback.gone, loopback.broken_off(100), loopback.status(429)
    remote = open_corpus(f"{server.url}/c")
    for number in range(len(remote)):
        if not server.planned:
            server.does(failures[number % 4])
        assert remote.document(number)[0] == local.document(number)[0]
    assert len(shards_in(cache)) == len(local.manifest.shards) >= 6


def test_a_server_without_ranges(local: Corpus, server: loopback.Server) -> None:
    remote = open_corpus(f"{server.url}/c")
    server.does(*[loopback.ignoring_range] * 4)
    assert everything(remote) == everything(local)


@pytest.mark.parametrize("nfs", [False, True])
def test_the_cache_stays_below_its_limit(
    local: Corpus, server: loopback.Server, cache: Path, monkeypatch: pytest.MonkeyPatch, nfs: bool
) -> None:
    if nfs:
        monkeypatch.setattr(fcntl, "flock", flock_of_nfs)
    limit = limit_to(monkeypatch, local, 2.5)
    remote = open_corpus(f"{server.url}/c")
    for number in range(len(remote)):
        assert remote.document(number)[0] == local.document(number)[0]
        assert total(cache) <= limit
    last = [shard.name for shard in local.manifest.shards[-2:]]
    assert shards_in(cache) == last


def test_a_shard_in_use_elsewhere_is_not_evicted(
    local: Corpus,
    server: loopback.Server,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    limit_to(monkeypatch, local, 2.5)
    one, other = open_corpus(f"{server.url}/c"), open_corpus(f"{server.url}/c")
    one.document(0)
    for number in range(len(other)):
        other.document(number)
    first, *_, last = [shard.name for shard in local.manifest.shards]
    assert shards_in(cache) == [first, last]
    assert not caplog.records
    del one
    other.document(0)
    monkeypatch.setenv("PALM_DS_CACHE_GB", "1e-9")
    small = open_corpus(f"{server.url}/c")
    assert everything(small) == everything(local)
    assert caplog.text.count("the files in use exceed the cache's 1 B") == 1


def test_shards_are_read_ahead(
    local: Corpus, server: loopback.Server, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = limit_to(monkeypatch, local, 3.5)
    names = [shard.name for shard in local.manifest.shards]
    remote = open_corpus(f"{server.url}/c")
    remote.prefetch([4, 1])
    assert shards_in(cache) == [names[1], names[4]]
    asked = len(server.asked)
    remote.read(
        sum(shard.tokens for shard in local.manifest.shards[:4]), 1 + remote._shard_starts[4]
    )
    assert len(server.asked) == asked
    make_room = FileCache._make_room

    def slowly(*args) -> bool:
        time.sleep(0.05)  # so that threads ask for room at the same time
        return make_room(*args)

    monkeypatch.setattr(FileCache, "_make_room", slowly)
    remote.prefetch(range(6))  # there is room for three; shard 4 is in use
    assert names[4] in shards_in(cache) and len(shards_in(cache)) == 3
    assert total(cache) <= limit
    server.does(*[loopback.status(503)] * 20)
    remote.prefetch([5])  # a failure is left to the one who reads
    local.prefetch([0, 1])


def test_a_download_that_was_cut_off_is_continued(
    local: Corpus, server: loopback.Server, cache: Path
) -> None:
    remote = open_corpus(f"{server.url}/c")
    name = local.manifest.shards[0].name
    size = local.manifest.files[name]["bytes"]
    data = server.files[f"/c/{name}"]
    key = next((cache / "files").glob("*/"))
    (key / f".{name}.{size}.part").write_bytes(data[:5000])
    server.asked.clear()
    assert remote.document(0)[0] == local.document(0)[0]
    assert server.asked[0][1].startswith("bytes=5000-")
    # one with wrong bytes is fetched again
    (key / name).unlink()
    (key / f".{name}.{size}.part").write_bytes(b"x" * 5000)
    assert everything(open_corpus(f"{server.url}/c")) == everything(local)


def test_a_cache_without_locks_is_refused(
    cache: Path, server: loopback.Server, no_locks: None
) -> None:
    with pytest.raises(UserError, match="^PALM_DS_CACHE: .*: this file system has no locks"):
        open_corpus(f"{server.url}/c")


def test_a_changed_file_is_refused(local: Corpus, server: loopback.Server) -> None:
    remote = open_corpus(f"{server.url}/c")
    name = f"/c/{local.manifest.shards[0].name}"
    data = server.files[name]
    server.files[name] = data[:-20] + b"x" + data[-19:]
    with pytest.raises(UserError, match=r"arrow: what was fetched is not what the manifest says"):
        remote.document(0)


@pytest.mark.parametrize(
    "name", ["tokenizer/../../../../../taken", "../../../taken", "{outside}", "a\nb", ""]
)
def test_a_corpus_writes_nowhere_else(
    local: Corpus, server: loopback.Server, cache: Path, name: str
) -> None:
    taken = cache.parent / "taken"
    taken.write_text("mine")
    name = name.format(outside=taken)
    files = {**local.manifest.files, name: {"bytes": 1, "sha256": hash_of_text("x")}}
    changed = cache.parent / "changed"
    changed.mkdir()
    write_manifest(changed, replace(local.manifest, files=files))
    server.files["/c/manifest.json"] = (changed / "manifest.json").read_bytes()
    server.files[f"/c/{name}"] = server.files["/taken"] = b"x"
    with pytest.raises(UserError, match=r"/c/manifest.json: damaged: .* is not a file within it"):
        open_corpus(f"{server.url}/c").folder.verify()
    assert taken.read_text() == "mine"


def test_a_missing_file_is_an_error_without_retries(server: loopback.Server) -> None:
    with pytest.raises(UserError, match=r"/d/manifest.json: no such file; a corpus is a folder"):
        open_corpus(f"{server.url}/d")
    with pytest.raises(UserError, match=r"nowhere://a/b: cannot be opened: Protocol not known"):
        open_corpus("nowhere://a/b")
    with pytest.raises(UserError, match=r"ftp://127.0.0.1:1/x: cannot be opened: .*refused"):
        open_corpus("ftp://127.0.0.1:1/x")  # fsspec connects at once
    assert len(server.asked) == 1


def test_a_network_that_is_down_is_named_after_some_tries(server: loopback.Server) -> None:
    server.does(*[loopback.status(503)] * 3)
    with pytest.raises(TemporaryError, match="/c/manifest.json: 503 Service Unavailable, 3 times"):
        open_corpus(f"{server.url}/c")


@pytest.mark.parametrize("stated", ["0", "-1", "much", "nan", "inf"])
def test_the_size_of_the_cache_is_a_number(
    stated: str, server: loopback.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PALM_DS_CACHE_GB", stated)
    with pytest.raises(UserError, match=f"PALM_DS_CACHE_GB={stated}: must be a number above 0"):
        open_corpus(f"{server.url}/c")


def test_a_file_that_another_process_fetches_is_waited_for(
    local: Corpus, server: loopback.Server, cache: Path
) -> None:
    """Four threads, each with its own Corpus object, fetch every shard once."""
    from concurrent.futures import ThreadPoolExecutor

    corpora = [open_corpus(f"{server.url}/c") for _ in range(4)]
    server.asked.clear()
    with ThreadPoolExecutor(4) as threads:
        read = list(threads.map(everything, corpora))
    assert read == [everything(local)] * 4
    shards = [asked for asked in server.asked if "data-" in asked[0]]
    assert len(shards) == len(set(shards))
    shutil.rmtree(cache)
    os.makedirs(cache)
