"""Every format gives the same rows, for any line ends, compression or folder."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from pyarrow import feather

from palm_ds.common.errors import UserError
from palm_ds.data.reader import Table, TableSettings, open_table

ROWS = [
    {"text_a": 'a "b", c', "label": "1"},
    {"text_a": "two\u2028lines\x85 or\xa0one\u3000", "label": "0"},
    {"text_a": "光荣", "label": "1"},
]
TSV = "label\ttext_a\n" + "".join(f"{row['label']}\t{row['text_a']}\n" for row in ROWS)
CSV = "label,text_a\n" + "".join(
    '{},"{}"\n'.format(row["label"], row["text_a"].replace('"', '""')) for row in ROWS
)
JSONL = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
JSON = json.dumps(ROWS, ensure_ascii=False, indent=1)


def rows(table: Table) -> list[dict[str, Any]]:
    return [table[i] for i in range(len(table))]


def opened(folder: Path, name: str, contents: str | bytes, **settings: Any) -> Table:
    path = folder / name
    path.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    return open_table(str(path), TableSettings(**settings))


@pytest.mark.parametrize("name, text", [("tsv", TSV), ("csv", CSV), ("jsonl", JSONL)])
@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
def test_line_ends_and_compression(
    name: str, text: str, ends: str, mark: str, compression: str, tmp_path: Path
) -> None:
    data = (mark + text.replace("\n", ends)).encode()
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}
    table = opened(tmp_path, f"t.{name}{compression}", pack[compression](data))
    assert rows(table) == ROWS and table.columns == ("text_a", "label")
    first = 1 if name == "jsonl" else 2
    path = str(tmp_path / f"t.{name}{compression}")
    assert [table.where(i) for i in range(3)] == [f"{path}:{first + i}" for i in range(3)]
    assert table.names == (path,) and table.notes == ()


def test_the_last_line_needs_no_line_end(tmp_path: Path) -> None:
    for name, text in (("t.tsv", TSV), ("t.csv", CSV), ("t.jsonl", JSONL)):
        assert rows(opened(tmp_path, name, text[:-1])) == ROWS


def test_json_is_an_array_or_lines(tmp_path: Path) -> None:
    table = opened(tmp_path, "t.json", JSON)
    assert rows(table) == ROWS
    assert table.where(2) == f"{tmp_path / 't.json'}, element 3"
    assert rows(opened(tmp_path, "d.json", json.dumps({"data": ROWS}))) == ROWS
    table = opened(tmp_path, "l.json", "\ufeff" + JSONL)
    assert rows(table) == ROWS and table.where(2) == f"{tmp_path / 'l.json'}:3"
    assert rows(opened(tmp_path, "one.json", JSONL.split("\n")[0])) == ROWS[:1]


def test_cells_of_several_lines(tmp_path: Path) -> None:
    table = opened(tmp_path, "t.csv", 'text_a,label\r\n"a\r\nb",1\r\nc,2\r\n')
    assert rows(table) == [{"text_a": "a\nb", "label": "1"}, {"text_a": "c", "label": "2"}]
    assert table.where(1).endswith(":4")


def test_quotes_are_plain_text_in_tsv_but_not_in_csv(tmp_path: Path) -> None:
    text = 'text_a\tlabel\n"a\t1\n5" of b\t2\n'
    assert opened(tmp_path, "t.tsv", text).column("text_a") == ['"a', '5" of b']
    table = opened(tmp_path, "q.tsv", 'text_a\tlabel\n"a\tb"\t1\n', format="csv", delimiter="\t")
    assert table.column("text_a") == ["a\tb"]


def test_a_headless_layout(tmp_path: Path) -> None:
    settings = {"header": False, "columns": {"text_a": 0, "text_b": 1, "label": -1}}
    table = opened(tmp_path, "t.tsv", "a\tb\t1\nc\td\t0\n", **settings)
    assert table[1] == {"text_a": "c", "text_b": "d", "label": "0"}
    assert table.where(1).endswith(":2")


def test_palms_and_ernies_layouts(tmp_path: Path) -> None:
    for head in ("label\ttext_a", "text_b\tlabel\ttext_a", "text_a\ttext_b\tlabel\tqid"):
        names = head.split("\t")
        table = opened(tmp_path, "t.tsv", f"{head}\n" + "\t".join(f"<{x}>" for x in names) + "\n")
        assert table[0] == {name: f"<{name}>" for name in names}
    table = opened(tmp_path, "n.tsv", "text_a\ttext_b\ttext_b_neg\na\tb\tc\n")
    assert table[0] == {"text_a": "a", "text_b": "b", "text_b_neg": "c"}


def test_palms_tag_format_is_detected(tmp_path: Path) -> None:
    text = "text_a\tlabel\na\x02b\tO\x02B-X\nc\tO\n"
    expected = [{"tokens": ["a", "b"], "tags": ["O", "B-X"]}, {"tokens": ["c"], "tags": ["O"]}]
    assert rows(opened(tmp_path, "t.tsv", text)) == expected
    assert rows(opened(tmp_path, "p.tsv", "text_a\na\x02b\n")) == [{"tokens": ["a", "b"]}]
    names = {"tokens": "text_a", "tags": "label"}
    spaced = opened(tmp_path, "s.tsv", text.replace("\x02", " "), columns=names, tag_delimiter=" ")
    assert rows(spaced) == expected


@pytest.mark.parametrize(
    ("roles", "cells", "values"),
    [
        ("tokens tags", (["EU", 'a "b"'], ["B-ORG", "O"]), (["EU", 'a "b"'], ["B-ORG", "O"])),
        ("tokens tags", (["["], [0]), (["["], ["0"])),
        ("tokens", ([],), ([],)),
        ("tokens", ("[1]",), (["[1]"],)),
        ("tokens", ("[\x02,\x02]",), (["[", ",", "]"],)),
        ("text_a choices", ("a", ["b", "c"]), ("a", ["b", "c"])),
        ("target turns", ("a", ["b", "c"]), ("a", ["b", "c"])),
        (
            "query positive negatives teacher_scores",
            ("a", "b", ["c"], [2, 0.5]),
            ("a", "b", ["c"], [2.0, 0.5]),
        ),
    ],
)
def test_lists_in_cells_are_json(
    roles: str, cells: tuple[Any, ...], values: tuple[Any, ...], tmp_path: Path
) -> None:
    written = [cell if isinstance(cell, str) else json.dumps(cell) for cell in cells]
    quoted = ['"' + cell.replace('"', '""') + '"' for cell in written]
    expected = dict(zip(roles.split(), values, strict=True))
    for name, separator, row in (("t.tsv", "\t", written), ("t.csv", ",", quoted)):
        text = separator.join(roles.split()) + "\n" + separator.join(row) + "\n"
        assert rows(opened(tmp_path, name, text)) == [expected]


CONLL = (
    "-DOCSTART- -X- O\n\n# id 7 of news\na NN O\n# SYM I-X\n\n\nb NN O\n\t\n-DOCSTART- -X- O\nc X O"
)


CONLLU = "# sent_id = 1\n# text = They don't\n" + "".join(
    "\t".join([number, word, "_", tag, *"______"]) + "\n"
    for number, word, tag in [
        ("1", "They", "PRON"),
        ("2-3", "don't", "_"),
        ("2", "do", "AUX"),
        ("3", "n't", "PART"),
        ("3.1", "go", "VERB"),
    ]
)


def test_conllu(tmp_path: Path) -> None:
    """Ranges and empty nodes are no tokens; numbers are never taken for them."""
    table = opened(tmp_path, "t.conllu", CONLLU, columns={"tokens": 1, "tags": 3})
    assert rows(table) == [{"tokens": ["They", "do", "n't"], "tags": ["PRON", "AUX", "PART"]}]
    message = "t.conllu: the first of 10 columns numbers the tokens; say which to read, .*tags: 3}$"
    with pytest.raises(UserError, match=message):
        opened(tmp_path, "t.conllu", CONLLU)


def test_conll(tmp_path: Path) -> None:
    table = opened(tmp_path, "t.conll", CONLL)
    assert rows(table) == [
        {"tokens": ["a", "#"], "tags": ["O", "I-X"]},
        {"tokens": ["b"], "tags": ["O"]},
        {"tokens": ["c"], "tags": ["O"]},
    ]
    assert [table.where(i)[-2:] for i in range(3)] == [":4", ":8", "11"]
    parts = opened(tmp_path, "t.conll", CONLL, columns={"tokens": 0, "tags": 1})
    assert parts.column("tags") == [["NN", "SYM"], ["NN"], ["X"]]
    bare = opened(tmp_path, "b.conll", "a\nb\n\nc\n")
    assert rows(bare) == [{"tokens": ["a", "b"]}, {"tokens": ["c"]}]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("# s1\nthe DT\ncat NN\n\n# s2\na DT\n", [["the", "cat"], ["a"]]),
        ("# id 7\ten\na _ _ O\n\n# id 8\ten\n# _ _ O\nb _ _ O\n", [["a"], ["#", "b"]]),
        ("# id 7\ten\n# _ _ O\n\n# id 8\ten\nb _ _ O\n", [["#"], ["b"]]),
        ("# s1\n# x\nthe DT\n\n# s2\n# y\na DT\n", [["the"], ["a"]]),
        ("# a POS corpus\n\n# s1\nthe DT\n\n# s2\na DT\n", [["the"], ["a"]]),
        ("# SYM\none CD\n\na DT\n", [["#", "one"], ["a"]]),
        ("a DT\n\n# SYM\none CD\n", [["a"], ["#", "one"]]),
        ("# SYM\n", [["#"]]),
    ],
)
def test_conll_comments_are_lines_that_every_sentence_has(
    tmp_path: Path, text: str, tokens: list[list[str]]
) -> None:
    assert opened(tmp_path, "t.conll", text).column("tokens") == tokens


def test_conll_with_tabs_keeps_spaces(tmp_path: Path) -> None:
    table = opened(tmp_path, "t.conll", "New York\tB-X\n\u3000\tO\r\n\r\n# text\nb\tO\n")
    assert table[0]["tokens"] == ["New York", "\u3000"] and table[1]["tokens"] == ["b"]
    crlf = opened(tmp_path, "r.conll", "a  O\r\n\r\nb O\r\n")
    assert crlf.column("tags") == [["O"], ["O"]]


def test_squad_v2(tmp_path: Path) -> None:
    asked = [
        {"id": 1, "question": "Who?", "answers": [{"text": "cat", "answer_start": 0}]},
        {"id": "b", "question": "Why?", "answers": [], "is_impossible": True},
    ]
    for item in asked:
        item.setdefault("is_impossible", False)
    paragraphs = [{"context": "A cat, a cat.", "qas": asked}]
    table = opened(tmp_path, "t.json", json.dumps({"data": [{"paragraphs": paragraphs}]}))
    assert [row["answers"] for row in rows(table)] == [[{"text": "cat", "start": 2}], []]
    assert table.column("impossible") == [False, True]
    assert table.column("id") == [1, "b"]
    assert table.where(1) == f"{tmp_path / 't.json'}, question b"
    assert table.notes[0].startswith("1 x answer not at its answer_start, moved")
    for item in asked:
        del item["answers"]
    table = opened(tmp_path, "p.json", json.dumps({"data": [{"paragraphs": paragraphs}]}))
    assert table.columns == ("id", "question", "context")


def test_cmrcs_own_format(tmp_path: Path) -> None:
    """CMRC2018 as it was first published: passages, questions whose answers have no places."""
    asked = [
        {"query_id": "T_0", "query_text": "省会是哪里？", "answers": ["广州", "广州"]},
        {"query_id": "T_1", "query_text": "哪个省？", "answers": ["广东省"]},
    ]
    passage = {"context_id": "T", "context_text": "省会是广州，属广东省。", "qas": asked}
    table = opened(tmp_path, "t.json", json.dumps([{**passage, "title": "广州"}]))
    assert rows(table)[1] == {
        **{"id": "T_1", "question": "哪个省？", "context": "省会是广州，属广东省。"},
        **{"answers": [{"text": "广东省", "start": 7}], "impossible": False},
    }
    assert [answer["start"] for answer in table[0]["answers"]] == [3, 3]
    assert table.where(1) == f"{tmp_path / 't.json'}, question T_1" and table.notes == ()
    for broken, message in (
        ({**passage, "context_text": 3}, "passage 1: no text `context`"),
        ({**passage, "qas": None}, "passage 1: no list `qas`"),
        ({**passage, "qas": [3]}, "passage 1, question 1: expected an object"),
        ({**passage, "qas": [{"query_text": "?"}]}, "passage 1, question 1: no `id`"),
        ({**passage, "qas": [{**asked[0], "answers": ["巴黎"]}]}, "'巴黎' is not in the context"),
        ({**passage, "qas": [{**asked[0], "answers": [3]}]}, "an answer is not an object"),
    ):
        with pytest.raises(UserError, match=message):
            opened(tmp_path, "b.json", json.dumps([broken]))


@pytest.mark.parametrize(("start", "found"), [(-1, 2), (3, 2), (8, 9), (99, 9), (5, 2), (6, 9)])
def test_a_misplaced_answer_moves_to_the_nearest_occurrence(
    start: int, found: int, tmp_path: Path
) -> None:
    row = {"context": "A cat, a cat.", "answers": [{"text": "cat", "answer_start": start}]}
    assert opened(tmp_path, "t.jsonl", json.dumps(row))[0]["answers"][0]["start"] == found


def test_lost_answers_are_kept_or_dropped(tmp_path: Path) -> None:
    both = {"text": ["dog", "cat"], "answer_start": [0, 2]}
    text = json.dumps({"context": "A cat.", "answers": both})
    kept = opened(tmp_path, "t.jsonl", text, lost_answers="keep")
    assert [x["start"] for x in kept[0]["answers"]] == [-1, 2]
    dropped = opened(tmp_path, "t.jsonl", text, lost_answers="drop")
    assert dropped[0]["answers"] == [{"text": "cat", "start": 2}]
    assert [table.notes[0].partition(",")[0] for table in (kept, dropped)] == [
        "1 x answer not in its context"
    ] * 2


def test_spans(tmp_path: Path) -> None:
    text = '{"text": "in Bonn, Bonn", "label": {"city": {"Bonn": [[9, 12], [3, 6]]}}}\n'
    table = opened(tmp_path, "t.jsonl", text + '{"text": "no", "label": {}}\n')
    first = [{"start": at, "end": at + 4, "type": "city"} for at in (3, 9)]
    assert rows(table) == [
        {"text_a": "in Bonn, Bonn", "spans": first},
        {"text_a": "no", "spans": []},
    ]
    plain = {"text_a": "in Bonn, Bonn", "spans": first[::-1]}
    assert rows(opened(tmp_path, "p.jsonl", json.dumps(plain))) == [rows(table)[0]]
    named = {"text_a": "in Bonn", "spans": [{"start": 3, "end": 6, "type": "x", "text": "Bonn"}]}
    (note,) = opened(tmp_path, "n.jsonl", json.dumps(named)).notes
    assert note.startswith("1 x span whose text is not that at its place, which does not include")
    named["spans"][0]["end"] = 7
    assert not opened(tmp_path, "n.jsonl", json.dumps(named)).notes
    slots = [
        {
            "userInput": {"text": "9 at 8"},
            "context": {"requestedSlots": ["time"]},
            "labels": [
                {"slot": "time", "valueSpan": {"startIndex": 5, "endIndex": 6}},
                {"slot": "people", "valueSpan": {"endIndex": 1}},
            ],
        },
        {"userInput": {"text": "no"}},
    ]
    table = opened(tmp_path, "s.json", json.dumps(slots))
    assert table.columns == ("text_a", "spans")
    assert table.column("spans") == [
        [{"start": 0, "end": 1, "type": "people"}, {"start": 5, "end": 6, "type": "time"}],
        [],
    ]


@pytest.mark.parametrize("name", ["t.csv", "t.tsv"])
def test_cells_of_json(tmp_path: Path, name: str) -> None:
    """Spans and answers within a cell of text."""
    spans = [{"start": 3, "end": 7, "type": "city"}]
    answers = {"text": ["Bonn"], "answer_start": [3]}

    def written(*cells: str) -> str:
        if name == "t.tsv":  # quotes are ordinary characters
            return "\t".join(cells) + "\n"
        return ",".join('"' + cell.replace('"', '""') + '"' for cell in cells) + "\n"

    text = written("text_a", "spans") + written("in Bonn", json.dumps(spans)) + written("no", "[]")
    table = opened(tmp_path, name, text)
    assert rows(table) == [{"text_a": "in Bonn", "spans": spans}, {"text_a": "no", "spans": []}]
    text = written("question", "context", "answers")
    table = opened(tmp_path, name, text + written("where?", "in Bonn", json.dumps(answers)))
    assert table[0]["answers"] == [{"text": "Bonn", "start": 3}]


def test_smart(tmp_path: Path) -> None:
    text = ".I 7\n.T\na\nb\n.W\n .c\n.I 8\n.W\n.I\n"
    columns = {"id": "I", "text_a": "W"}
    table = opened(tmp_path, "t.smart", text, format="smart", columns=columns)
    assert rows(table) == [{"text_a": ".c", "id": "7"}, {"text_a": "", "id": "8"}]
    assert [table.where(i)[-2:] for i in (0, 1)] == [":1", ":7"]


FEATURES = datasets.Features(
    {
        "text_a": datasets.Value("string"),
        "label": datasets.ClassLabel(names=["bad", "good"]),
        "tokens": [datasets.Value("string")],
        "ner_tags": datasets.Sequence(datasets.ClassLabel(names=["O", "B-X"])),
        "inner": {"kind": datasets.ClassLabel(names=["x", "y"])},
        "image": datasets.Value("binary"),
    }
)
MANY = 2500  # more rows than one chunk


@pytest.fixture
def dataset() -> datasets.Dataset:
    columns = {
        "text_a": [f"text {i}" for i in range(MANY)],
        "label": [i % 2 for i in range(MANY)],
        "tokens": [["a", "b"]] * MANY,
        "ner_tags": [[0, i % 2] for i in range(MANY)],
        "inner": [{"kind": i % 2} for i in range(MANY)],
        "image": [b"x"] * MANY,
    }
    return datasets.Dataset.from_dict(columns, features=FEATURES)


def check_columns(table: Table, noun: str) -> None:
    assert table.columns == ("text_a", "label", "qid", "tokens", "tags")
    assert len(table) == MANY
    for i in (0, 1, MANY - 1):
        assert table[i] == {
            "text_a": f"text {i}",
            "label": ["bad", "good"][i % 2],
            "qid": ["x", "y"][i % 2],
            "tokens": ["a", "b"],
            "tags": ["O", ["O", "B-X"][i % 2]],
        }
    assert table.where(MANY - 1).endswith(f"{noun}, row {MANY}")


def test_dataset_folders(dataset: datasets.Dataset, tmp_path: Path) -> None:
    settings = TableSettings(columns={"qid": "inner.kind"})
    dataset.save_to_disk(tmp_path / "one")
    check_columns(open_table(str(tmp_path / "one"), settings), "one")
    datasets.DatasetDict(train=dataset, test=dataset.select([0])).save_to_disk(tmp_path / "two")
    train = TableSettings(columns={"qid": "inner.kind"}, split="train")
    check_columns(open_table(str(tmp_path / "two"), train), "train")
    with pytest.raises(
        UserError, match=r"two: has several splits; set `split` to one of test, train$"
    ):
        open_table(str(tmp_path / "two"), settings)
    with pytest.raises(
        UserError, match=r"two: has no split 'dev'; set `split` to one of test, train$"
    ):
        open_table(str(tmp_path / "two"), TableSettings(split="dev"))
    with pytest.raises(UserError, match=r"one: is a dataset without splits; remove `split: train`"):
        open_table(str(tmp_path / "one"), TableSettings(split="train"))


def test_parquet_and_arrow_files(dataset: datasets.Dataset, tmp_path: Path) -> None:
    settings = TableSettings(columns={"qid": "inner.kind"})
    dataset.to_parquet(tmp_path / "t.parquet")
    check_columns(open_table(str(tmp_path / "t.parquet"), settings), "t.parquet")
    dataset.save_to_disk(tmp_path / "one")
    file = next((tmp_path / "one").glob("*.arrow"))
    check_columns(open_table(str(file), settings), file.name)
    feather.write_feather(dataset.data.table, tmp_path / "t.arrow", compression="lz4")
    check_columns(open_table(str(tmp_path / "t.arrow"), settings), "t.arrow")
    (tmp_path / "t.arrow").write_bytes(b"ARROW1\0\0 cut off")
    with pytest.raises(UserError, match=r"t.arrow: not an Arrow dataset: "):
        open_table(str(tmp_path / "t.arrow"), settings)


def test_plain_parquet_and_unknown_classes(tmp_path: Path) -> None:
    answers = {"text": ["b"], "answer_start": [2]}
    table = pa.table({"context": ["a b"], "question": ["?"], "answers": [answers]})
    pq.write_table(table, tmp_path / "t.parquet")
    assert open_table(str(tmp_path / "t.parquet"))[0] == {
        "question": "?",
        "context": "a b",
        "answers": [{"text": "b", "start": 2}],
        "impossible": False,
    }
    prices = pa.table({"text": ["a"], "label": [Decimal("1.50")]})
    pq.write_table(prices, tmp_path / "prices.parquet")
    assert open_table(str(tmp_path / "prices.parquet"))[0]["label"] == "1.50"
    known = datasets.Features({"text": datasets.Value("string"), "label": FEATURES["label"]})
    unlabeled = datasets.Dataset.from_dict({"text": ["a"], "label": [-1]}, features=known)
    unlabeled.save_to_disk(tmp_path / "test")
    with pytest.raises(UserError, match=r"test, row 1: label is null; `read: .*\[null\]"):
        open_table(str(tmp_path / "test"))
    table = open_table(str(tmp_path / "test"), TableSettings(columns={"label": ""}))
    assert rows(table) == [{"text_a": "a"}]


def test_many_files_in_order(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.tsv").write_text(f"text_a\tlabel\n{name}1\t1\n{name}2\t2\n")
    (tmp_path / "c.jsonl").write_text('{"label": 3, "text_a": "c1"}\n')
    table = open_table([str(tmp_path / "*.tsv"), str(tmp_path / "c.jsonl")])
    assert table.column("text_a") == ["a1", "a2", "b1", "b2", "c1"]
    assert [table.where(i) for i in (0, 3, 4)] == [
        f"{tmp_path / 'a.tsv'}:2",
        f"{tmp_path / 'b.tsv'}:3",
        f"{tmp_path / 'c.jsonl'}:1",
    ]


def test_the_fingerprint_covers_contents_and_settings(tmp_path: Path) -> None:
    first = opened(tmp_path, "a.tsv", TSV)
    assert opened(tmp_path, "b.tsv", TSV).fingerprint == first.fingerprint
    assert opened(tmp_path, "b.tsv", TSV + "1\tb\n").fingerprint != first.fingerprint
    other = opened(tmp_path, "a.tsv", TSV, drop={"label": [0]})
    assert other.fingerprint != first.fingerprint and len(other) == 2
    ordered = [str(tmp_path / "a.tsv"), str(tmp_path / "b.tsv")]
    assert open_table(ordered).fingerprint != open_table(ordered[::-1]).fingerprint
