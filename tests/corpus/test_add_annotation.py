"""Annotations are added to an existing corpus completely or not at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.corpus.add_annotation import add_annotations
from palm_ds.corpus.options import ScreenOptions, TextOptions
from palm_ds.corpus.prepare import PrepareOptions, prepare
from palm_ds.corpus.store import open_corpus

ROWS = [{"id": f"d{i}", "text": f"The New York cat {i} sat. " * 5} for i in range(40)]
OWN = """
import numpy as np

def digit(document):
    return np.array([token.isdigit() for token in document.tokenizer.tokens(document.ids)])

def broken(document):
    return np.zeros(3)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("source") / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "corpus"
    prepare(out, [str(source)], PrepareOptions(train="wordpiece", vocab_size=100, shard_mb=0.001))
    return out


@pytest.fixture
def corpus(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "corpus"))


@pytest.fixture(autouse=True)
def own_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "custom_annotations.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


def test_added_annotations_equal_those_of_a_new_corpus(
    source: Path, corpus: Path, tmp_path: Path
) -> None:
    before = open_corpus(corpus)
    old = before.read(0, 5)
    add_annotations(corpus, [str(source)], ["capital"])
    add_annotations(corpus, [str(source)], ["custom_annotations:digit"])
    added = open_corpus(corpus, verify=True)
    fresh_options = PrepareOptions(
        train="wordpiece",
        vocab_size=100,
        shard_mb=0.001,
        annotations=("capital", "custom_annotations:digit"),
    )
    prepare(tmp_path / "fresh", [str(source)], fresh_options)
    fresh = open_corpus(tmp_path / "fresh")
    assert (
        added.annotations
        == fresh.annotations
        == ("sentence", "word", "phrase", "entity", "capital", "digit")
    )
    for number in range(len(fresh)):
        (name, a), (other, b) = added.document(number), fresh.document(number)
        assert name == other and a.ids.tolist() == b.ids.tolist()
        assert all(np.array_equal(a.annotations[x], b.annotations[x]) for x in fresh.annotations)
    table = datasets.load_from_disk(str(corpus))
    assert table.column_names == ["id", "ids", *fresh.annotations] and len(table) == 40
    names = sorted(p.name for p in corpus.glob("data-*"))
    assert names == sorted(shard.name for shard in added.manifest.shards)
    assert all(name.endswith("-v3.arrow") for name in names)
    assert old.ids.tolist() == added.read(0, 5).ids.tolist()  # an open corpus can still be read
    assert not list(corpus.parent.glob("*.adding"))


@pytest.mark.distributed
def test_added_bytes_do_not_depend_on_workers(source: Path, corpus: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(corpus, tmp_path / "other"))
    add_annotations(corpus, [str(source)], ["capital"])
    add_annotations(other, [str(source)], ["capital"], workers=2)
    assert (corpus / "manifest.json").read_text() == (other / "manifest.json").read_text()


CHANGES = {
    "another text": lambda rows: [*rows[:20], {"id": "d20", "text": rows[21]["text"]}, *rows[21:]],
    "another id": lambda rows: [*rows[:20], {**rows[20], "id": "x20"}, *rows[21:]],
    "another order": lambda rows: [rows[1], rows[0], *rows[2:]],
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_input_is_refused(change: str, source: Path, corpus: Path, tmp_path: Path) -> None:
    """Of the same size, so that only the contents differ."""
    other = tmp_path / "a.jsonl"
    other.write_text("".join(json.dumps(row) + "\n" for row in CHANGES[change](ROWS)))
    assert other.stat().st_size == source.stat().st_size
    before = (corpus / "manifest.json").read_text()
    with pytest.raises(
        UserError, match="prepared from a different input: document .*nothing was changed"
    ):
        add_annotations(corpus, [str(other)], ["capital"])
    assert (corpus / "manifest.json").read_text() == before
    assert "capital" not in open_corpus(corpus, verify=True).annotations


def test_invalid_annotations(source: Path, corpus: Path, tmp_path: Path) -> None:
    short = tmp_path / "a.jsonl"
    short.write_text(json.dumps(ROWS[0]) + "\n")
    for inputs, names, message in (
        ([source], ["word"], "already has the annotation 'word'"),
        ([source], ["capital", "capital"], "already has the annotation 'capital'"),
        ([source], ["capitals"], "did you mean"),
        ([short], ["capital"], r"prepared from a different input \(inputs\[0\].bytes: \d+ -> \d+"),
        ([source], ["custom_annotations:broken"], r"values of shape \(3,\)"),
    ):
        with pytest.raises(UserError, match=message):
            add_annotations(corpus, list(map(str, inputs)), names)
    assert open_corpus(corpus, verify=True).annotations == ("sentence", "word", "phrase", "entity")


def test_a_stop_between_the_two_files_leaves_a_readable_corpus(
    source: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from palm_ds.corpus import add_annotation as add

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(add, "write_manifest", stop)
    with pytest.raises(KeyboardInterrupt):
        add_annotations(corpus, [str(source)], ["capital"])
    assert "capital" not in open_corpus(corpus, verify=True).annotations
    assert "capital" in datasets.load_from_disk(str(corpus)).column_names
    monkeypatch.undo()
    add_annotations(corpus, [str(source)], ["capital"])
    assert "capital" in open_corpus(corpus, verify=True).annotations
    assert len(list(corpus.glob("data-*"))) == len(open_corpus(corpus).manifest.shards)


def test_with_phrases_and_lower_case(source: Path, tmp_path: Path) -> None:
    """The options come from the manifest: lexicons, lower case, mined phrases."""
    lexicon = tmp_path / "entities.txt"
    lexicon.write_text("cat\n")
    options = PrepareOptions(
        train="wordpiece",
        vocab_size=100,
        text=TextOptions(lower=True, lexicon_entity=(str(lexicon),), collocation_count=2),
    )
    prepare(tmp_path / "corpus", [str(source)], options)
    add_annotations(tmp_path / "corpus", [str(source)], ["custom_annotations:digit"])
    lexicon.write_text("dog\n")
    (tmp_path / "own_second_marks.py").write_text(OWN.replace("digit", "number"))
    with pytest.raises(UserError, match="lexicons"):
        add_annotations(tmp_path / "corpus", [str(source)], ["own_second_marks:number"])


def test_after_a_dropped_document_of_the_same_id(tmp_path: Path) -> None:
    """Ids of rows need not be unique; the dropped document was taken for the one after it."""
    texts = [ROWS[i]["text"] for i in (0, 0, 1, 2, 1, 3)]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"id": "en", "text": text}) + "\n" for text in texts))
    options = PrepareOptions(train="wordpiece", vocab_size=100, screen=ScreenOptions(dedup="exact"))
    assert prepare(tmp_path / "corpus", [str(file)], options).documents == 4
    add_annotations(tmp_path / "corpus", [str(file)], ["custom_annotations:digit"])
    corpus = open_corpus(tmp_path / "corpus")
    for number in range(4):
        tokens = corpus.document(number)[1]
        digits = [token.isdigit() for token in corpus.tokenizer().tokens(tokens.ids)]
        assert tokens.annotations["digit"].tolist() == digits
