"""Preparation from and to URLs gives the same corpus as on this machine."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from fsspec.implementations.memory import MemoryFileSystem

from palm_ds.common import remote_files
from palm_ds.common.errors import TemporaryError, UserError
from palm_ds.common.remote_files import Retries
from palm_ds.corpus import corpus_folder
from palm_ds.corpus.options import InputOptions, TextOptions
from palm_ds.corpus.prepare import PrepareOptions, prepare
from palm_ds.corpus.store import open_corpus
from tests.helpers import loopback

ENGLISH = TextOptions(language="en", collocations=False)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PALM_DS_CACHE", str(tmp_path / "cache"))
    quick = Retries(tries=8, wait=0.001)
    monkeypatch.setattr(corpus_folder, "RETRIES", quick)
    monkeypatch.setattr(remote_files.RemoteFolder.__init__, "__defaults__", (quick,))
    monkeypatch.setattr(remote_files, "_BUFFER", 1000)
    return tmp_path / "cache"


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    system = fsspec.filesystem("memory")
    yield system
    for name in system.ls("/", detail=False):
        system.rm(name, recursive=True)


def write_inputs(folder: Path) -> None:
    """Every kind of file, with a bad line."""
    texts = [f"The story of house number {n}. It has {n % 7} doors." for n in range(200)]
    rows = [json.dumps({"text": text}) for text in texts]
    folder.mkdir()
    (folder / "a.jsonl").write_text("\n".join([*rows[:30], "bad", *rows[30:]]))
    (folder / "b.txt").write_text("\n\n".join(texts[:40]))
    (folder / "c.json").write_text("[" + ",".join(rows[:20]) + "]")
    (folder / "d.jsonl.gz").write_bytes(gzip.compress("\n".join(rows[:50]).encode(), mtime=0))
    (folder / "e.txt.zst").write_bytes(zstandard.compress("\n\n".join(texts[50:70]).encode()))
    pq.write_table(pa.table({"text": texts[:60]}), folder / "f.parquet", row_group_size=25)
    (folder / "notes.doc").write_bytes(b"?")


def options(**changes: object) -> PrepareOptions:
    values = {
        "train": "wordpiece",
        "vocab_size": 300,
        "shard_mb": 0.004,
        "text": ENGLISH,
        **changes,
    }
    return PrepareOptions(**values)  # type: ignore[arg-type]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def test_files_behind_urls_give_the_same_corpus(
    tmp_path: Path, memory: MemoryFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    write_inputs(tmp_path / "in")
    memory.put(str(tmp_path / "in"), "/bucket/in", recursive=True)
    here = prepare(tmp_path / "here", [str(tmp_path / "in")], options())
    prepare(tmp_path / "there", ["memory://bucket/in"], options())
    assert len(here.shards) == 5 and here.rejected == 1
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    assert "notes.doc" in caplog.text
    prepare(tmp_path / "pattern", ["memory://bucket/*/*.jsonl*"], options())
    names = [entry["name"] for entry in open_corpus(tmp_path / "pattern").manifest.inputs]
    assert names == ["a.jsonl", "d.jsonl.gz"]


def test_an_input_over_http_with_failing_requests(tmp_path: Path) -> None:
    write_inputs(tmp_path / "in")
    with loopback.serve() as server:
        for name in ("a.jsonl", "d.jsonl.gz", "f.parquet"):
            server.files[f"/{name}"] = (tmp_path / "in" / name).read_bytes()
        urls = [f"{server.url}/{name[1:]}" for name in server.files]
        server.does(*[loopback.status(503), loopback.broken_off(300), loopback.gone] * 2)
        there = prepare(tmp_path / "there", urls, options(train="wordpiece"))
        fsspec.filesystem("http").clear_instance_cache()
    paths = [str(tmp_path / "in" / url.rpartition("/")[2]) for url in urls]
    here = prepare(tmp_path / "here", paths, options())
    assert there.files == here.files


def test_a_corpus_is_uploaded_with_the_manifest_last(
    tmp_path: Path, memory: MemoryFileSystem, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_inputs(tmp_path / "in")
    inputs = [str(tmp_path / "in")]
    prepare(tmp_path / "here", inputs, options())
    put, sent = MemoryFileSystem.put_file, []

    def failing(self: MemoryFileSystem, file: str, path: str) -> None:
        if len(sent) == 4:
            raise OSError("the network is down")
        sent.append(path)
        put(self, file, path)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "put_file", failing)
        with pytest.raises(TemporaryError, match="the network is down, 8 times"):
            prepare("memory://bucket/out", inputs, options())
    with pytest.raises(UserError, match="manifest.json: no such file"):
        open_corpus("memory://bucket/out")
    prepare("memory://bucket/out", inputs, options())
    assert len(sent) == 4
    copy = tmp_path / "copy"
    memory.get("/bucket/out", str(copy), recursive=True)
    assert contents(copy) == contents(tmp_path / "here")
    assert not any((cache / "prepare").iterdir())
    assert open_corpus("memory://bucket/out").document(7)[0]
    prepare("memory://bucket/out", inputs, options())  # complete: nothing to do
    with pytest.raises(UserError, match="memory://bucket/out: is a corpus with different options"):
        prepare("memory://bucket/out", inputs, options(vocab_size=200))


def test_what_cannot_be_read_or_written(tmp_path: Path, memory: MemoryFileSystem) -> None:
    write_inputs(tmp_path / "in")
    for url, message in (
        ("memory://bucket/none.jsonl", "none.jsonl: no such file"),
        ("memory://bucket/*.jsonl", "no file matches this pattern"),
    ):
        with pytest.raises(UserError, match=message):
            prepare(tmp_path / "out", [url], options())
    with pytest.raises(UserError, match="--format ernie reads files on this machine"):
        ernie = InputOptions(format="ernie")
        vocab = tmp_path / "vocab.txt"
        vocab.write_text("\n".join(["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", "a"]))
        prepare(
            tmp_path / "out",
            ["memory://bucket/x.gz"],
            PrepareOptions(tokenizer=str(vocab), input=ernie),
        )
    memory.pipe("/bucket/x.arrow", b"?")
    with pytest.raises(UserError, match="x.arrow: Arrow files are read on this machine"):
        prepare(tmp_path / "out", ["memory://bucket/x.arrow"], options())
    with loopback.serve() as server:
        with pytest.raises(UserError, match="UNFINISHED: the server's answer is 501"):
            prepare(f"{server.url}/out", [str(tmp_path / "in")], options())
        fsspec.filesystem("http").clear_instance_cache()
