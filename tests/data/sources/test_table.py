"""Rows as sources: texts are tokenized once, messages have places, rows are held out."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from palm_ds.common.errors import UserError
from palm_ds.data.reader import Table, TableSettings, open_table
from palm_ds.data.sources.table import encode, split_rows
from palm_ds.text.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.word_tables import WORDS, open_source, write_table, write_texts, write_vocabulary

ONE_TOKEN = (np.array([7]), np.array([[0, 1]]))


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory) -> Path:
    return write_vocabulary(tmp_path_factory.mktemp("vocabulary"))


def test_texts_are_the_tokenizers_tokens_with_their_characters(vocabulary, tmp_path) -> None:
    texts = ["w3 w1", "", "w2", "w39  unknown w0"]
    path = write_table(tmp_path / "t.tsv", [[t, 0] for t in texts], "text_a", "label")
    source = open_source(path, vocabulary)
    encoded = source.encoded("text_a")
    tokenizer = load_tokenizer(vocabulary)
    assert encoded.lengths.tolist() == [2, 0, 1, 3]
    for item, text in enumerate(texts):
        piece = encoded.read(item)
        ((ids, _),) = tokenizer.encode_spans([text])
        assert piece.ids.tolist() == ids.tolist()
        spans = encoded.spans_of(item)
        words = [text[a:b] for a, b in spans]
        assert words == text.split()
        assert encoded.place(item, np.arange(piece.start, piece.start + len(piece))).tolist() == (
            list(range(len(piece)))
        )


def test_a_token_takes_12_bytes_and_is_read_as_int64(vocabulary, tmp_path) -> None:
    """It took 24."""
    path = write_table(tmp_path / "t.tsv", [["w3 w1", 0], ["w2 w5", 1]], "text_a", "label")
    source = open_source(path, vocabulary)
    for column in (source.encoded("text_a"), source.words("text_a").tokens):
        assert column.ids.nbytes + column.spans.nbytes == 12 * 4
        assert column.read(1).ids.dtype == column.spans_of(1).dtype == np.int64
        assert column.lengths is column.lengths  # layouts read it for every batch


def test_a_span_never_leaves_its_text(vocabulary) -> None:
    encoded = encode(["w1 w2 w3", "w4 w5"], load_tokenizer(vocabulary))
    first = 5 + WORDS.index("w1")
    assert encoded.read(0, 1).ids.tolist() == [first + 1, first + 2]
    assert encoded.read(0, 1, 99).ids.tolist() == [first + 1, first + 2]  # not into the next text
    assert encoded.read(0, 0, 2).ids.tolist() == [first, first + 1]
    assert encoded.read(1, 1, 1).start == 4 and len(encoded.read(1, 1, 1)) == 0


def test_texts_are_tokenized_independently(vocabulary, monkeypatch) -> None:
    """The tokenizer gets several texts per call."""
    texts = [" ".join(WORDS[: n % 7]) for n in range(40)]
    tokenizer = load_tokenizer(vocabulary)
    whole = encode(texts, tokenizer)
    monkeypatch.setattr("palm_ds.data.sources.table._BATCH", 3)
    parts = encode(texts, tokenizer)
    for name in ("ids", "spans", "starts"):
        assert np.array_equal(getattr(whole, name), getattr(parts, name))
    empty = encode([], tokenizer)
    assert len(empty.ids) == 0 and empty.lengths.tolist() == [] and empty.spans.shape == (0, 2)


def test_the_time_to_encode_grows_with_the_texts(vocabulary, monkeypatch) -> None:
    """Ten million texts are 1,200 batches; a list of all of them for each would take minutes."""
    tokenizer = SimpleNamespace(encode_spans=lambda texts: [ONE_TOKEN] * len(texts))
    monkeypatch.setattr("palm_ds.data.sources.table._BATCH", 8)
    began = time.process_time()
    encoded = encode([str(n) for n in range(80_000)] * 2, cast(Tokenizer, tokenizer))
    assert time.process_time() - began < 3  # three times as much with such lists
    assert encoded.ids.tolist() == [7] * 160_000


def test_a_column_is_tokenized_once(vocabulary, tmp_path) -> None:
    source = open_source(write_texts(tmp_path / "t.tsv", 5), vocabulary)
    assert source.encoded("text_a") is source.encoded("text_a")
    calls = []
    assert [source.cached("x", lambda: calls.append(1) or len(calls)) for _ in range(3)] == [
        1,
        1,
        1,
    ]


def test_a_row_is_named_by_its_file_and_line(vocabulary, tmp_path) -> None:
    write_texts(tmp_path / "t1.tsv", 3)
    write_texts(tmp_path / "t2.tsv", 4)
    table = open_table([str(tmp_path / f"t{i}.tsv") for i in (1, 2)], TableSettings())
    source, _ = split_rows(table, 0.0, load_tokenizer(vocabulary), "t")
    assert len(source) == 7
    assert source.where(0) == f"{tmp_path}/t1.tsv:2" and source.where(6) == f"{tmp_path}/t2.tsv:5"
    assert (
        source.row(6)["text_a"] == (tmp_path / "t2.tsv").read_text().splitlines()[4].split("\t")[0]
    )


def test_the_held_out_rows_depend_on_row_numbers_only(vocabulary, tmp_path) -> None:
    tokenizer = load_tokenizer(vocabulary)
    split = {}
    for rows in (400, 600):
        write_texts(tmp_path / "t.tsv", rows)
        table = open_table(str(tmp_path / "t.tsv"), TableSettings())
        training, held = split_rows(table, 0.2, tokenizer, "t")
        assert sorted([*training.numbers, *held.numbers]) == list(range(rows))
        assert 0.14 < len(held) / rows < 0.26
        assert held.where(0).endswith(f":{held.numbers[0] + 2}")
        split[rows] = held.numbers
    assert split[600][split[600] < 400].tolist() == split[400].tolist()
    training, held = split_rows(table, 0.0, tokenizer, "t")
    assert len(training) == 600 and len(held) == 0


def test_rows_of_a_group_are_held_out_together(vocabulary, tmp_path) -> None:
    rows = [{"text_a": f"q{n % 100}", "text_b": "w"} for n in range(400)]
    table, tokenizer = Table.from_rows(rows), load_tokenizer(vocabulary)
    training, held = split_rows(table, 0.2, tokenizer, "t", "text_a")
    assert sorted([*training.numbers, *held.numbers]) == list(range(400))
    assert not {*training.column("text_a")} & {*held.column("text_a")}
    assert 0.1 < len(held) / 400 < 0.3
    by_row = split_rows(table, 0.2, tokenizer, "t")[1].numbers
    assert held.numbers[held.numbers < 100].tolist() == by_row[by_row < 100].tolist()


def test_an_empty_training_set_is_an_error(vocabulary, tmp_path) -> None:
    write_texts(tmp_path / "t.tsv", 1)
    table = open_table(str(tmp_path / "t.tsv"), TableSettings())
    with pytest.raises(UserError, match="leaves none of 1 rows to train on"):
        split_rows(table, 0.999, load_tokenizer(vocabulary), "t")


def test_a_missing_column_is_reported_with_the_existing_ones(vocabulary, tmp_path) -> None:
    (tmp_path / "t.tsv").write_text("text_a\tnote\tlabel\nx\ty\t1\n")
    source = open_source(tmp_path / "t.tsv", vocabulary)
    with pytest.raises(UserError) as error:
        source.need("text_b", "tasks.x")
    assert str(error.value) == (
        "tasks.x: t has no column 'text_b'; it has text_a, label, and without a role note; "
        "map one with `columns: {text_b: NAME}`, or --columns text_b=NAME"
    )
    both = open_table(
        str(tmp_path / "t.tsv"), TableSettings(columns={"text_a": ["text_a", "note"]})
    )
    assert both.unused == ()


def test_a_column_that_plain_text_cannot_have(vocabulary, tmp_path) -> None:
    path = tmp_path / "names.conll.txt"
    path.write_text("w1 O\nw2 B-PER\n\n")
    with pytest.raises(UserError) as error:
        open_source(path, vocabulary).need("tags", "tasks.x")
    assert str(error.value) == (
        f"tasks.x: names.conll has no column 'tags'; {path} was read as a text on each line "
        "(`format: text`): give another `format`, such as conll, or rename it, as to names.conll"
    )
    open_source(path, vocabulary, format="conll").need("tags", "tasks.x")


def test_a_row_without_text_is_reported_with_its_place(vocabulary, tmp_path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"text_a": "w1", "label": 1}\n{"text_a": null, "label": 0}\n')
    with pytest.raises(UserError, match=r"t\.jsonl:2: text_a"):
        open_source(path, vocabulary).encoded("text_a")
