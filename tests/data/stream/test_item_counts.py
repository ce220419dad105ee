"""Items are counted once per corpus and task; the file is trusted only if it fits."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from palm_ds.corpus.mine_ngrams import mine_ngrams
from palm_ds.corpus.store import Corpus, open_corpus
from palm_ds.data.sources.corpus import CorpusSplit, split_corpus
from palm_ds.data.sources.corpus_blocks import BlockSizes
from palm_ds.data.stream import item_counts as module
from palm_ds.data.stream.item_counts import item_counts
from palm_ds.data.tasks.task import CorpusTask, build
from tests.helpers.small_corpus import write_small_corpus

SIZES = BlockSizes(block_tokens=200, window_blocks=4, segment_blocks=5)


@pytest.fixture
def corpus(tmp_path) -> Corpus:
    return write_small_corpus(tmp_path / "corpus", documents=80)


def split_of(corpus: Corpus, held_out: float = 0.1, held: bool = False) -> CorpusSplit:
    found = split_corpus(corpus, held_out, (), SIZES)[held].split
    assert found
    return found


def task_of(kind: str = "sentence_distance", **values) -> CorpusTask:
    task = build(kind, {"source": "text", **values})
    assert isinstance(task, CorpusTask)
    return task


def files(corpus: Corpus) -> list[Path]:
    return sorted((corpus.folder.local / "index" / "items").glob("*.npy"))


def test_counts_are_those_of_each_block(corpus):
    split, task = split_of(corpus), task_of()
    counts = item_counts(task, split, 64)
    every = [len(task.items(split.window(np.array([b])), 64)) for b in range(len(split.blocks))]
    assert counts.of_blocks.tolist() == every and sum(every) > 100
    bounds = split.blocks.segments
    assert counts.of_segments.tolist() == np.add.reduceat(every, bounds[:-1]).tolist()


def test_they_are_counted_once_and_the_corpus_still_opens(corpus, caplog):
    caplog.set_level(logging.INFO)
    first = item_counts(task_of(), split_of(corpus), 64)
    assert caplog.text.count("counting the items") == 1
    other = replace(task_of(), name="other")
    again = item_counts(other, split_of(open_corpus(corpus.path)), 64)
    assert caplog.text.count("counting the items") == 1 and len(files(corpus)) == 1
    assert (again.of_blocks == first.of_blocks).all()
    assert open_corpus(corpus.path, verify=True).manifest == corpus.manifest


def test_other_settings_are_counted_separately(corpus):
    item_counts(task_of(), split_of(corpus), 64)
    for task, split, length in [
        (task_of(), split_of(corpus), 32),
        (task_of(shortest=0.3), split_of(corpus), 64),
        (task_of(), split_of(corpus, 0.2), 64),
        (task_of(), split_of(corpus, 0.2, held=True), 64),
        (task_of("sentence_order"), split_of(corpus), 64),
    ]:
        before = len(files(corpus))
        item_counts(task, split, length)
        assert len(files(corpus)) == before + 1


def test_files_of_a_task_that_have_changed_are_counted_again(corpus, tmp_path, monkeypatch):
    """Its items depend on the n-grams and markers in them, not on their names."""
    monkeypatch.setattr("palm_ds.pretrain.discourse_relation._MIN_SAMPLE_ITEMS", 1)
    markers, lexicon, found = tmp_path / "markers.txt", tmp_path / "ngrams.tsv", []
    for sizes, listed in (((60, 40), "w1\nw2\n"), ((5,), "w1\nw2\nw3\nw4\n")):
        markers.write_text(listed)
        mine_ngrams(corpus.path, lexicon, sizes=sizes, least=3)
        for task in (
            task_of("explicit_ngram_masking", lexicon=str(lexicon), rate=0.5),
            task_of("discourse_relation", markers=str(markers), least=1, shortest=1),
        ):
            split = split_of(corpus)
            counts = item_counts(task, split, 40).of_blocks.tolist()
            windows = (split.window(np.array([b])) for b in range(len(split.blocks)))
            assert counts == [len(x) and len(task.items(x, 40)) for x in windows]
            found.append(counts)
    assert found[0] != found[2] and found[1] != found[3]


def test_a_task_of_a_notebook_is_counted(corpus, monkeypatch):
    right = item_counts(task_of(), split_of(corpus), 64).of_blocks
    notebook = type("Mine", (type(task_of()),), {"__module__": "notebook"})
    monkeypatch.setitem(sys.modules, "notebook", ModuleType("notebook"))
    found = item_counts(notebook(name="mine", source="text"), split_of(corpus), 64)
    assert (found.of_blocks == right).all() and len(files(corpus)) == 2


@pytest.mark.parametrize("damage", [b"", b"not an array", None])
def test_a_damaged_file_is_replaced(corpus, damage):
    right = np.array(item_counts(task_of(), split_of(corpus), 64).of_blocks)
    (file,) = files(corpus)
    if damage is None:
        np.save(file, np.load(file)[:-1])
    else:
        file.write_bytes(damage)
    assert (item_counts(task_of(), split_of(corpus), 64).of_blocks == right).all()
    assert len(np.load(file)) > len(right)


def test_a_corpus_that_cannot_be_written_to_is_counted_in_the_cache(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "cache" in str(path) and real(path, mode))
    item_counts(task_of(), split_of(corpus), 64)
    assert not files(corpus) and len(list((tmp_path / "cache").rglob("*.npy"))) == 1


@pytest.mark.slow
@pytest.mark.exhaustive  # one process counts by default
def test_several_processes_count_the_same(corpus, monkeypatch):
    right = np.array(item_counts(task_of(), split_of(corpus), 64).of_blocks)
    (file,) = files(corpus)
    file.unlink()
    monkeypatch.setattr(module, "_MIN_SEGMENTS", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert (item_counts(task_of(), split_of(corpus), 64).of_blocks == right).all()
