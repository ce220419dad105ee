"""Every process compares its share of the files; the hashes of a run are compared once."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path

import pytest

from palm_ds.common.errors import TemporaryError, UserError
from palm_ds.corpus.store import Corpus, open_corpus
from palm_ds.runtime.processes.process_group import SINGLE_PROCESS
from palm_ds.train.setup import corpus_check
from palm_ds.train.setup.corpus_check import FILE, CorpusCheck
from palm_ds.train.setup.run_folder import corpus_fingerprint
from tests.helpers.small_corpus import write_small_corpus


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    write_small_corpus(tmp_path / "corpus", documents=4)
    return open_corpus(tmp_path / "corpus")


def finish(check: CorpusCheck, run: Path) -> None:
    deadline = time.monotonic() + 20
    while not (run / FILE).exists() and time.monotonic() < deadline:
        check.collect()
        time.sleep(0.01)
    assert (run / FILE).exists()


def test_a_good_corpus_is_compared_once(tmp_path: Path, corpus: Corpus) -> None:
    finish(CorpusCheck({"a": corpus}, tmp_path, SINGLE_PROCESS), tmp_path)
    assert json.loads((tmp_path / FILE).read_text()) == [corpus_fingerprint(corpus)]
    damage(corpus, "index/document_starts.npy")
    CorpusCheck({"a": corpus}, tmp_path, SINGLE_PROCESS).collect()  # nothing is read again


def damage(corpus: Corpus, name: str) -> None:
    file = Path(corpus.path) / name
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("name", ["index/document_starts.npy", "tokenizer/tokenizer.json"])
def test_a_damaged_file_is_named(tmp_path: Path, corpus: Corpus, name: str) -> None:
    damage(corpus, name)
    check = CorpusCheck({"a": corpus}, tmp_path, SINGLE_PROCESS)
    with pytest.raises(UserError, match=f"corpus .*: {name} was changed or damaged"):
        finish(check, tmp_path)
    check.close()


def test_a_file_that_cannot_be_read_is_no_damage(
    tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose file server was away for a moment ended with the exit code of a mistake."""

    def fail(file: Path, stated: object, *, hashes: bool) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))

    monkeypatch.setattr(corpus_check, "file_problem", fail)
    check = CorpusCheck({"a": corpus}, tmp_path, SINGLE_PROCESS)
    with pytest.raises(TemporaryError, match="cannot be read: Input/output error; the same"):
        finish(check, tmp_path)


def test_no_corpus_is_no_work(tmp_path: Path) -> None:
    CorpusCheck({}, tmp_path, SINGLE_PROCESS).collect()
    assert not (tmp_path / FILE).exists()
