"""A malformed file is one clear line with the file and the row."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import tempfile
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from palm_ds.common.errors import UserError
from palm_ds.data.reader import TableSettings, open_table

HEAD = b"label\ttext_a\n"
HEADLESS: dict[str, Any] = {"header": False, "columns": {"text_a": 0, "label": 1}}
TAGS: dict[str, Any] = {"columns": {"tokens": "text_a", "tags": "label"}}


def squad(*questions: Any, context: Any = "A cat sat.") -> bytes:
    return json.dumps({"data": [{"paragraphs": [{"context": context, "qas": questions}]}]}).encode()


def question(identity: Any = "q7", **changes: Any) -> dict[str, Any]:
    answers = [{"text": "cat", "answer_start": 2}]
    return {"id": identity, "question": "Who?", "answers": answers} | changes


def spans(value: Any) -> bytes:
    return json.dumps({"text_a": "Bonn", "spans": value}).encode()


def cluener(value: Any) -> bytes:
    return json.dumps({"text": "Bonn", "label": value}).encode()


def slots(span: Any) -> bytes:
    return json.dumps([{"userInput": {"text": "at 9"}, "labels": [span]}]).encode()


def answers(value: Any) -> bytes:
    return json.dumps({"question": "Who?", "context": "A cat.", "answers": value}).encode()


def line(**row: Any) -> bytes:
    return json.dumps(row).encode()


GOOD = line(text_a="a", label=1) + b"\n"

Case = tuple[str, str, bytes, dict[str, Any], str]
CASES: list[Case] = [
    # name of the case, of the file, contents, settings, what follows the file's path
    ("too few cells", "t.tsv", HEAD + b"1\ta\n1\n", {}, ":3: 1 cell, but the header has 2"),
    ("too many cells", "t.tsv", HEAD + b"1\ta\tb\n", {}, ":2: 3 cells, but the header has 2"),
    ("headless width", "t.tsv", b"a\t1\nb\n", HEADLESS, ":2: 1 cell, but line 1 has 2"),
    (
        "a column twice",
        "t.tsv",
        b"label\tlabel\n1\t2\n",
        {},
        ":1: two columns have the name",
    ),
    (
        "columns without names",
        "t.csv",
        b"label,text_a,,\n1,a,,\n",
        {},
        ":1: 2 of 4 columns have no name in the header; name or remove them",
    ),
    (
        "a spreadsheet",
        "t.xlsx",
        b"PK\x03\x04\xff",
        {},
        ": is a spreadsheet, which is not read; expo",
    ),
    (
        "a spreadsheet called otherwise",
        "t.csv",
        b"PK\x03\x04\xff",
        {},
        ":1: the names of the columns: invalid UTF-8 at byte 5 .a zip file, as spreadsheets are: ",
    ),
    ("an archive", "t.tar.gz", b"", {"format": "tsv"}, ": .tar files are not read; unpack it, or"),
    ("gzip", "t.jsonl", gzip.compress(GOOD), {}, ":1: .* at byte 2 of the line .compressed by"),
    (
        "gzip, JSON",
        "t.json",
        gzip.compress(b"[]"),
        {},
        ":1: invalid UTF-8 at byte 2 .compressed by gzip: the name of the file must end in .gz",
    ),
    (
        "zstd",
        "t.tsv",
        zstandard.compress(HEAD),
        {},
        ":1: the names of the columns: invalid UTF-8 at byte 2 .compressed by zstd: the name of ",
    ),
    (
        "bzip2",
        "t.txt",
        bz2.compress(GOOD),
        {},
        ":1: .*compressed by bzip2: unpack the file, or compr",
    ),
    (
        "rows of a DataFrame by number",
        "t.json",
        b'{"0": {"text": "a", "label": "x"}, "1": {"text": "b", "label": "y"}}',
        {},
        ": has a key for each row, as pandas' to_json writes them; expected rows: to_json.orient=",
    ),
    (
        "an array in a line",
        "t.jsonl",
        b'[{"text": "a"}]',
        {},
        ":1: a JSON list, .*; format: json re",
    ),
    (
        "CR alone",
        "t.csv",
        b"text,label\ra,x\rb,y\r",
        {},
        ":1: .*: CR within a line; only a line fe",
    ),
    ("xz", "t.csv", lzma.compress(GOOD), {}, ":1: .* invalid UTF-8 at byte 1 .compressed by xz: "),
    (
        "other capitals",
        "t.csv",
        b"Text,Label,Id\na,1,2\n",
        {},
        ": no known column among `Text`, `Label`, `Id`; columns: {text_a: Text, label: Label} assi",
    ),
    (
        "quoted cells, semicolons",
        "t.csv",
        b'text;n\n"a";1\n',
        {},
        ':2: not CSV: .*; if ";" separates ',
    ),
    (
        "columns of a DataFrame",
        "t.json",
        b'{"text": {"0": "a", "1": "b"}, "label": {"0": 1, "1": 0}}',
        {},
        ": has a key for each row, as pandas' to_json writes them; expected rows: to_json.orient=",
    ),
    (
        "Windows-1252",
        "t.csv",
        b"text\ncaf\xe9\n",
        {},
        ":2: invalid UTF-8 at byte 4 .maybe WINDOWS-1",
    ),
    (
        "GBK",
        "t.csv",
        b"text,label\n\xba\xdc\xba\xc3,1\n",
        {},
        ":2: invalid UTF-8 at byte 1 .maybe GB18030: iconv -f GB18030 -t UTF-8 converts it",
    ),
    ("text is no UTF-8", "t.tsv", HEAD + b"1\t\xff\n", {}, ":2: invalid UTF-8 at byte 3"),
    ("header is no UTF-8", "t.tsv", b"label\t\xff\n", {}, ":1: the names of the columns: invalid"),
    ("UTF-16", "t.tsv", "label\ttext_a\n1\ta".encode("utf-16"), {}, ":1: the names of the columns"),
    ("NUL in a text", "t.tsv", HEAD + b"1\ta\0b\n", {}, ":2: text_a: NUL at character 2"),
    ("NUL in a label", "t.tsv", HEAD + b"1\0\ta\n", {}, ":2: label: NUL at character 2"),
    ("lines that end with CR", "t.tsv", b"label\ttext_a\r1\ta\r", {}, ":1: its lines end with CR"),
    (
        "a key twice",
        "t.jsonl",
        GOOD + b'{"text_a": "a", "label": 1, "label": 2}',
        {},
        ":2: the key `label` is given twice",
    ),
    (
        "tags in one text",
        "t.jsonl",
        b'{"tokens": ["a", "b"], "tags": "O B-X"}',
        {},
        ":1: tags is the text 'O B-X', which is one tag",
    ),
    (
        "a list as Python prints it",
        "t.csv",
        b"tokens,tags\n\"['EU', 'won']\",\"['B-ORG', 'O']\"\n",
        {},
        r""":2: tokens is "\['EU', 'won'\]", a list as Python prints it; write JSON """
        r"""\(json.dumps\): \["a", "b"\]$""",
    ),
    (
        "tokens of Prodigy",
        "t.jsonl",
        b'{"text": "a", "tokens": [{"text": "a", "start": 0}]}\n',
        {},
        ':1: tokens has objects, not texts; `columns: {tokens: ""}` leaves the column out$',
    ),
    ("empty label", "t.tsv", HEAD + b"\ta\n", {}, ":2: label is empty"),
    ("blank label", "t.tsv", HEAD + b"1\ta\n  \ta\n", {}, ":3: label is empty"),
    ("empty qid", "t.tsv", b"qid\ttext_a\n\ta\n", {}, ":2: qid is empty"),
    ("empty id", "t.tsv", b"id\ttext_a\n\ta\n", {}, ":2: id is empty"),
    ("tags missing", "t.tsv", HEAD + b"O\x02B\ta\x02b\nO\ta\x02b\n", {}, ":3: 2 tokens and 1 tag"),
    (
        "a stray \\x02",
        "t.tsv",
        HEAD + b"1\ta b\n1\tc\x02d\n",
        {},
        r":3: 2 tokens and 1 tag \(cells",
    ),
    ("tags by name", "t.tsv", HEAD + b"O\x02O\ta\n", TAGS, ":2: 1 token and 2 tags"),
    ("an empty tag", "t.tsv", HEAD + b"O\x02\ta\x02b\n", TAGS, ":2: tag 2 is empty"),
    (
        "one choice",
        "t.tsv",
        b"choices\tlabel\na\t0\n",
        {},
        ":2: 1 choice; at least two are needed",
    ),
    ("not a flag", "t.tsv", b"text_a\timpossible\na\tno\n", {}, ":2: impossible is 'no', not true"),
    (
        "answers in a cell",
        "t.tsv",
        b"context\tanswers\na\tb\n",
        {},
        ":2: answers is 'b', not JSON",
    ),
    (
        "a JSON text as answers",
        "t.tsv",
        b'context\tanswers\na\t"a"\n',
        {},
        ":2: answers is str, not",
    ),
    ("text as spans", "t.tsv", b"text_a\tspans\na\tb\n", {}, ":2: spans is 'b', not JSON"),
    ("no spans", "t.tsv", b"text_a\tspans\na\t\n", {}, ":2: spans is '', not JSON"),
    (
        "spans as Python prints them",
        "t.csv",
        b"text_a,spans\na,\"[{'start': 0, 'end': 1, 'type': 'x'}]\"\n",
        {},
        ":2: spans is .*'start': 0.*, not JSON",
    ),
    ("csv: cells", "t.csv", b"label,text_a\n1,a,b\n", {}, ":2: 3 cells, but the header has 2"),
    (
        "csv: open quote",
        "t.csv",
        b'label,text_a\n1,a\n1,"b\n2,c\n',
        {},
        ":3: not CSV: unexpected end",
    ),
    ("csv: after a quote", "t.csv", b'label,text_a\n1,"a"b\n', {}, ":2: not CSV: ',' expected"),
    ("csv: second line", "t.csv", b'label,text_a\n1,"a\nb"\n1\n', {}, ":4: 1 cell, but"),
    ("csv: UTF-8", "t.csv", b"label,text_a\n1,a\n1,\xe9\n", {}, ":3: invalid UTF-8 at byte 3"),
    ("csv: header", "t.csv", b'label,"a\n', {}, ":1: the names of the columns: not CSV"),
    ("not JSON", "t.jsonl", GOOD + b"{\n", {}, ":2: not JSON: Expecting property name"),
    ("cut off", "t.jsonl", GOOD + GOOD[:-3], {}, ":2: not JSON"),
    ("no object", "t.jsonl", GOOD + b"[1]\n", {}, ":2: a JSON list, expected an object"),
    ("null", "t.jsonl", GOOD + b"null\n", {}, ":2: a JSON null, expected an object"),
    ("two objects", "t.jsonl", GOOD + b"{} {}\n", {}, ":2: not JSON: Extra data"),
    ("too deep", "t.jsonl", GOOD + b"[" * 100_000, {}, ":2: not JSON: nested too deep"),
    ("a long number", "t.jsonl", GOOD + b"9" * 5000, {}, ":2: not JSON: Exceeds the limit"),
    ("jsonl: UTF-8", "t.jsonl", GOOD + b'{"text_a": "\xe9"}', {}, ":2: invalid UTF-8 at byte 13"),
    ("no label", "t.jsonl", GOOD + b'{"text_a": "a"}', {}, ":2: no field `label`; it has `text_a`"),
    (
        "null label",
        "t.jsonl",
        line(text_a="a", label=None),
        {},
        ":1: label is null; `read: {drop: {label: .null.}}`",
    ),
    (
        "label is NaN",
        "t.jsonl",
        b'{"text_a": "a", "label": NaN}',
        {},
        r":1: label is nan; `read: {drop: {label: \[.nan\]}}` leaves such rows out",
    ),
    (
        "text is NaN",
        "t.jsonl",
        GOOD + b'{"text_a": NaN, "label": 1}',
        {},
        ":2: text_a is nan, not text",
    ),
    (
        "endless text",
        "t.jsonl",
        b'{"text_a": "a", "text_b": -Infinity}',
        {},
        ":1: text_b is -inf, not",
    ),
    ("null text", "t.jsonl", line(text_a=None), {}, ":1: text_a is null, not text"),
    ("text is a list", "t.jsonl", line(text_a=["a"]), {}, ":1: text_a is list, not text"),
    ("text is true", "t.jsonl", line(text_a=True), {}, ":1: text_a is bool, not text"),
    ("half a pair", "t.jsonl", b'{"text_a": "\\ud83d"}', {}, ":1: text_a: lone surrogate"),
    ("null among labels", "t.jsonl", line(text_a="a", label=["x", None]), {}, ":1: label is null"),
    ("id is a list", "t.jsonl", line(text_a="a", id=[1]), {}, ":1: id is list, not text"),
    ("tokens are a number", "t.jsonl", line(tokens=3), {}, ":1: tokens is int, not a list"),
    ("a token is null", "t.jsonl", line(tokens=["a", None]), {}, ":1: tokens is null, not text"),
    (
        "tags are an object",
        "t.jsonl",
        line(tokens=["a"], tags={}),
        {},
        ":1: tags is dict, not a list",
    ),
    ("fewer tags", "t.jsonl", line(tokens=["a", "b"], tags=[1]), {}, ":1: 2 tokens and 1 tag$"),
    ("choices a number", "t.jsonl", line(choices=1), {}, ":1: choices is int, not a list"),
    ("inside", "t.jsonl", GOOD, {"columns": {"text_b": "label.x"}}, ":1: no field `label.x`"),
    (
        "span too long",
        "t.jsonl",
        spans([{"start": 0, "end": 9, "type": "x"}]),
        {},
        ":1: span 0 to 9",
    ),
    ("empty span", "t.jsonl", spans([{"start": 1, "end": 1, "type": "x"}]), {}, ":1: span 1 to 1"),
    (
        "span before",
        "t.jsonl",
        spans([{"start": -1, "end": 1, "type": "x"}]),
        {},
        ":1: span -1 to 1",
    ),
    (
        "span of text",
        "t.jsonl",
        spans([{"start": "0", "end": 1, "type": "x"}]),
        {},
        ":1: span '0' to 1 of x: expected whole numbers",
    ),
    (
        "span without type",
        "t.jsonl",
        spans([{"start": 0, "end": 1}]),
        {},
        ":1: a span without start",
    ),
    ("span a list", "t.jsonl", spans([[0, 1]]), {}, ":1: a span is list, not an object"),
    (
        "other surface",
        "t.jsonl",
        cluener({"x": {"Ulm": [[0, 2]]}}),
        {},
        ":1: label x: the text at 0 to 2 is not 'Ulm'",
    ),
    ("end exclusive", "t.jsonl", cluener({"x": {"Bonn": [[0, 4]]}}), {}, ":1: .*0 to 4|:1: span"),
    (
        "places",
        "t.jsonl",
        cluener({"x": {"Bonn": [0, 3]}}),
        {},
        r":1: the places of 'Bonn' are not \[\[",
    ),
    (
        "surfaces",
        "t.jsonl",
        cluener({"x": [[0, 3]]}),
        {},
        ":1: label x: expected an object with places, got list; `columns: {label: label.x}` reads",
    ),
    (
        "slot too long",
        "t.json",
        slots({"slot": "t", "valueSpan": {"endIndex": 9}}),
        {},
        ", element 1: span 0 to 9",
    ),
    (
        "slot without end",
        "t.json",
        slots({"slot": "t", "valueSpan": {}}),
        {},
        ", element 1: span 0 to None",
    ),
    (
        "slot without name",
        "t.json",
        slots({"valueSpan": {"endIndex": 1}}),
        {},
        ", element 1: label is null",
    ),
    (
        "broken array",
        "t.json",
        b'[{"text_a": "a"},\n {"text_a" 1}]',
        {},
        ":2: not JSON: Expecting ':'",
    ),
    ("array cut off", "t.json", b'[{"text_a": "a"},\n', {}, ":2: not JSON"),
    ("json: UTF-8", "t.json", b'[\n{"text_a": "\xff"}]', {}, ":2: invalid UTF-8"),
    (
        "json: a number",
        "t.json",
        b"3",
        {},
        ":1: a JSON int; expected an array of objects",
    ),
    (
        "json: element",
        "t.json",
        b'[{"text_a": "a"}, 3]',
        {},
        ", element 2: expected an object, got a JSON int",
    ),
    ("json: no data", "t.json", b'{\n"rows": []}', {}, ":1: no array under `data`"),
    (
        "no paragraphs",
        "t.json",
        b'{"data": [{"paragraphs": 1}]}',
        {},
        ", article 1: no list `paragraphs`",
    ),
    (
        "no context",
        "t.json",
        squad(question(), context=None),
        {},
        ", article 1, paragraph 1: no text",
    ),
    (
        "no qas",
        "t.json",
        b'{"data": [{"paragraphs": [{"context": "a"}]}]}',
        {},
        ", .* 1: no list `qas`",
    ),
    (
        "question a number",
        "t.json",
        squad(1),
        {},
        ", article 1, paragraph 1, question 1: expected an object, got a JSON int",
    ),
    ("no id", "t.json", squad(question(None)), {}, ", article 1, paragraph 1, question 1: no `id`"),
    (
        "id twice",
        "t.json",
        squad(question(), question()),
        {},
        ", question q7: another question has the id q7",
    ),
    (
        "no question",
        "t.json",
        squad(question(question=None)),
        {},
        ", question q7: question is null",
    ),
    (
        "no answer",
        "t.json",
        squad(question(answers=[])),
        {},
        ", question q7: no answer, but not impossible",
    ),
    (
        "one unanswered",
        "t.json",
        squad(question(1), question(answers=None)),
        {},
        ", question q7: answers is null",
    ),
    (
        "impossible",
        "t.json",
        squad(question(is_impossible=True)),
        {},
        ", question q7: impossible, but",
    ),
    (
        "lost",
        "t.json",
        squad(question(answers=[{"text": "dog", "answer_start": 2}])),
        {},
        ", question q7: answer 'dog' is not in the context",
    ),
    (
        "all dropped",
        "t.json",
        squad(question(answers=[{"text": "dog", "answer_start": 2}])),
        {"lost_answers": "drop"},
        ", question q7: none of its answers is in the context",
    ),
    (
        "empty answer",
        "t.json",
        squad(question(answers=[{"text": "", "answer_start": 2}])),
        {},
        ", question q7: an answer's text is empty",
    ),
    (
        "start is text",
        "t.json",
        squad(question(answers=[{"text": "cat", "answer_start": "2"}])),
        {},
        ", question q7: answer 'cat': answer_start is str, not an integer",
    ),
    (
        "answer is text",
        "t.json",
        squad(question(answers=["cat"])),
        {},
        ", question q7: an answer is not an object",
    ),
    (
        "more texts",
        "t.jsonl",
        answers({"text": ["a"], "answer_start": []}),
        {},
        ":1: answers need as many `text` as",
    ),
    (
        "nowhere to stand",
        "t.jsonl",
        line(question="a", answers=[]),
        {},
        ":1: answers, but no context",
    ),
    (
        "conll: columns",
        "t.conll",
        b"a O\nb O\n\nc O\nd\n",
        {},
        ":5: 1 column, but the file's first",
    ),
    ("conll: more", "t.conll", b"a O\nb O O\n", {}, ":2: 3 columns, but the file's first"),
    ("conll: no token", "t.conll", b"a\tO\n\n\tO\n", {}, ":3: column 0 is empty"),
    ("conll: no tag", "t.conll", b"a\tO\nb\t\n", {}, ":2: column 1 is empty"),
    ("conll: UTF-8", "t.conll", b"a O\n\n\xff O\n", {}, ":3: invalid UTF-8 at byte 1"),
    (
        "smart: beginning",
        "t.smart",
        b"text\n.I 1\n",
        {"format": "smart"},
        ":1: expected `.I",
    ),
    ("smart: UTF-8", "t.smart", b".I 1\n.W\n\xff\n", {"format": "smart"}, ":3: invalid UTF-8"),
]


@pytest.mark.parametrize(
    ("file", "contents", "how", "message"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_a_bad_row_is_named(
    file: str, contents: bytes, how: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / file
    path.write_bytes(contents)
    with pytest.raises(UserError, match=rf"^{path}{message}") as caught:
        open_table(str(path), TableSettings(**how))
    assert "\n" not in str(caught.value)


def test_there_are_many_cases() -> None:
    assert len({contents for _, _, contents, _, _ in CASES}) >= 60


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(CASES), st.binary(max_size=3), st.integers(0, 60), st.booleans())
def test_any_bytes_give_a_clear_error(case: Case, put: bytes, at: int, skip: bool) -> None:
    _, file, contents, given_settings, _ = case
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / file
        path.write_bytes(contents[:at] + put + contents[at + 1 :])
        how = TableSettings(**given_settings, bad_rows="skip" if skip else "stop")
        try:
            table = open_table(str(path), how)
        except UserError as error:
            assert str(path) in str(error) and "\n" not in str(error)
        else:
            assert json.dumps([table[i] for i in range(len(table))])


WHOLE: list[Case] = [
    ("no rows", "t.tsv", HEAD, {}, ": no rows"),
    ("empty", "t.jsonl", b"", {}, ": no rows"),
    ("all dropped", "t.jsonl", GOOD, {"drop": {"label": [1]}}, ": no rows; 1 x row with label '1'"),
    ("all bad", "t.tsv", HEAD + b"1\n", {"bad_rows": "skip"}, ": no rows; 1 x bad row, skipped"),
    ("no roles", "t.tsv", b"x\ty\n1\t2\n", {}, ": no known column among `x`, `y`; .*header: false"),
    (
        "no roles in jsonl",
        "t.jsonl",
        b'{"x": 1}',
        {},
        r": no known column among `x`; .*}, or --columns text_a=NAME \(embed: --column NAME\)$",
    ),
    (
        "another separator",
        "t.csv",
        b"text;label\na;x\n",
        {},
        ': no known column among `text;label`; if ";" separates the columns, a recipe says so: '
        'read: {delimiter: ";"}$',
    ),
    (
        "another separator, and the usual one in a text",
        "t.csv",
        b"text\tlabel\na, b\tx\n",
        {},
        r':2: 2 cells, but the header has 1; if "\\t" separates the columns, .*: "\\t"}$',
    ),
    ("no names", "t.tsv", b"1\t2\n", {"header": False}, ": 2 columns without names; assign them"),
    (
        "unknown column",
        "t.tsv",
        HEAD + b"1\ta\n",
        {"columns": {"label": "gold"}},
        ": columns.label: no column `gold`; it has `label`, `text_a`",
    ),
    (
        "unknown number",
        "t.tsv",
        b"a\t1\n",
        {"header": False, "columns": {"label": 2}},
        ": columns.label: no column 2; there are 2, counted from 0",
    ),
    (
        "name for number",
        "t.tsv",
        b"a\t1\n",
        {"header": False, "columns": {"label": "x"}},
        ": columns.label: `x`: no column has a name; give a number, 0 to 1",
    ),
    (
        "number for name",
        "t.jsonl",
        GOOD,
        {"columns": {"label": 1}},
        ": columns.label: 1: the columns of jsonl have names: `text_a`, `label`",
    ),
    (
        "two aliases",
        "t.tsv",
        b"text\tsentence\na\tb\n",
        {},
        ": text_a may be `sentence` or `text`; choose one with columns: {text_a: NAME}",
    ),
    (
        "two label aliases",
        "t.jsonl",
        line(text="a", label_desc="x", labels=["y"]),
        {},
        ": label may be `label_desc` or `labels`",
    ),
    ("unknown kind", "t.docx", b"a", {}, r": its suffix is none of .tsv"),
    ("no gzip", "t.tsv.gz", b"label", {}, ": damaged gzip file after line 0"),
    (
        "gzip cut off",
        "t.tsv.gz",
        gzip.compress(HEAD * 999)[:-12],
        {},
        ": damaged gzip file after line",
    ),
    ("no zstd", "t.tsv.zst", b"label", {}, ": damaged zstd file"),
    ("no parquet", "t.parquet", b"label", {}, ": damaged, or not a parquet file"),
    ("no arrow", "t.arrow", b"label", {}, ": not an Arrow dataset"),
    ("odd arrow", "t.arrow", b"lab\xff :", {}, ": not an Arrow dataset"),
    ("lines in names", "t.csv", b'"x\ny",z\n1,2\n', {}, ": no known column among `x y`, `z`"),
    ("zipped parquet", "t.parquet.gz", b"label", {}, ": a parquet file cannot be compressed"),
    ("spans move", "t.jsonl", spans([]), {"strip_spaces": True}, ": strip_spaces would shift"),
    (
        "two letters",
        "t.csv",
        b"a",
        {"delimiter": "||"},
        "delimiter '||': csv needs a single",
    ),
]


@pytest.mark.parametrize(
    ("file", "contents", "how", "message"),
    [case[1:] for case in WHOLE],
    ids=[case[0] for case in WHOLE],
)
def test_a_completely_wrong_file(
    file: str, contents: bytes, how: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / file
    path.write_bytes(contents)
    expected = message.replace("||", r"\|\|") if message[0] == "d" else f"{path}{message}"
    with pytest.raises(UserError, match=rf"^(input )?{expected}") as caught:
        open_table(str(path), TableSettings(**how))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"format": "tvs"}, 'format: no .tvs.; did you mean "tsv"'),
        ({"bad_rows": "drop"}, "bad_rows: no .drop.; known: skip, stop"),
        ({"lost_answers": "kept"}, 'lost_answers: no .kept.; did you mean "keep"'),
        ({"columns": {"texta": "x"}}, 'columns.texta: unknown role; did you mean "text_a"'),
        ({"columns": {"tags": ["a", "b"]}}, r"columns.tags: \['a', 'b'\]: give one column"),
        ({"columns": {"choices": ["a"]}}, r"columns.choices: \['a'\]: give one column; two or"),
        ({"drop": {"spans": []}}, "drop.spans: unknown role"),
        ({"tag_delimiter": ""}, "tag_delimiter: empty"),
    ],
)
def test_settings_are_checked(how: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TableSettings(**how)


def test_missing_files(tmp_path: Path) -> None:
    for name, message in {
        "x.tsv": ": no such file",
        "*.tsv": r".tsv: no file matches this pattern",
        "": ": not a dataset",
    }.items():
        with pytest.raises(UserError, match=message):
            open_table(str(tmp_path / name))
    with pytest.raises(UserError, match="no file given"):
        open_table([])
    path = tmp_path / "t.tsv"
    path.write_bytes(HEAD + b"1\ta\n")
    with pytest.raises(UserError, match=r"t.tsv: given twice"):
        open_table([str(path), str(path)])


def test_a_folder_of_files_without_suffixes(tmp_path: Path) -> None:
    """ERNIE's data/xnli/train: the error says how to name them, and that opens them."""
    (tmp_path / "train").mkdir()
    (tmp_path / "train/part.0").write_text("a\tb\t0\nc\td\t1\n")
    with pytest.raises(UserError) as caught:
        open_table(str(tmp_path / "train"))
    assert f"table: {tmp_path}/train/* with read: {{format: tsv}}" in str(caught.value)
    columns = {"text_a": 0, "text_b": 1, "label": 2}
    assert f"header: false, columns: {columns}".replace("'", "") in str(caught.value)
    how = TableSettings(format="tsv", header=False, columns=columns)
    table = open_table(str(tmp_path / "train/*"), how)
    assert table[1] == {"text_a": "c", "text_b": "d", "label": "1"}


def test_bad_rows_can_be_skipped_and_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "t.tsv"
    path.write_bytes(HEAD + b"1\ta\n1\n\n0\tb\n2\t\xff\n\tc\n\n")
    table = open_table(str(path), TableSettings(bad_rows="skip"))
    assert [table[i] for i in range(len(table))] == [
        {"text_a": "a", "label": "1"},
        {"text_a": "b", "label": "0"},
    ]
    assert [table.where(i) for i in (0, 1)] == [f"{path}:2", f"{path}:5"]
    assert table.notes == (
        f"3 x bad row, skipped; the first: {path}:3: 1 cell, but the header has 2",
        f"1 x empty line; the first: {path}:4",
    )


def test_files_of_one_table_have_the_same_columns(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_bytes(HEAD + b"1\ta\n")
    (tmp_path / "b.tsv").write_bytes(b"text_a\nb\n")
    with pytest.raises(UserError, match=r"b.tsv: has text_a, but .*a.tsv has text_a, label"):
        open_table(str(tmp_path / "*.tsv"))


def test_a_label_that_only_later_rows_have(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(line(text_a="a") + b"\n" + GOOD)
    with pytest.raises(UserError, match=r"t.jsonl:1: no field `label`; it has `text_a`$"):
        open_table(str(path))
    table = open_table(str(path), TableSettings(columns={"label": ""}))
    assert (len(table), table.columns) == (2, ("text_a",))


def test_a_question_asked_in_two_files(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(squad(question(1)))
    (tmp_path / "b.json").write_bytes(squad(question("2"), question("1")))
    with pytest.raises(UserError, match=r"b.json, question 1: another question has the id 1$"):
        open_table(str(tmp_path / "*.json"))
    table = open_table(str(tmp_path / "*.json"), TableSettings(bad_rows="skip"))
    assert table.column("id") == [1, "2"]
    assert "1 x bad row, skipped" in table.notes[0]
