"""Traditional to simplified characters while reading a table: spans and answers stay correct."""

from __future__ import annotations

import json
from pathlib import Path

from palm_ds.data.reader import Table, TableSettings, open_table

SIMPLIFY = TableSettings(simplify=True)


def test_answers_are_those_of_the_simplified_context(tmp_path: Path) -> None:
    context = "乾隆皇帝喜歡乾淨的頭髮。"
    answers = [{"text": "乾淨的頭髮", "answer_start": 6}, {"text": "乾隆", "answer_start": 3}]
    question = {"id": "q", "question": "皇帝喜歡什麼?", "answers": answers}
    file = tmp_path / "drcd.json"
    paragraphs = [{"paragraphs": [{"context": context, "qas": [question]}]}]
    file.write_text(json.dumps({"data": paragraphs}))
    row = open_table(str(file), SIMPLIFY)[0]
    assert row["context"] == "乾隆皇帝喜欢干净的头发。"
    assert row["question"] == "皇帝喜欢什么?"
    assert row["answers"] == [{"text": "干净的头发", "start": 6}, {"text": "乾隆", "start": 0}]
    for answer in row["answers"]:
        assert row["context"].startswith(answer["text"], answer["start"])


def test_spans_tokens_and_choices() -> None:
    spans = [{"start": 2, "end": 4, "type": "x"}]
    rows = [{"text_a": "我的頭髮", "spans": spans, "choices": ["東", "西"], "label": "東"}]
    row = Table.from_rows(rows, SIMPLIFY)[0]
    assert (row["text_a"], row["spans"]) == ("我的头发", spans)
    assert (row["choices"], row["label"]) == (["东", "西"], "东")
    assert Table.from_rows([{"text_a": "東", "label": "東"}], SIMPLIFY)[0]["label"] == "東"
    tagged = {"tokens": ["頭", "髮"], "tags": ["B-x", "I-x"]}
    assert Table.from_rows([tagged], SIMPLIFY)[0]["tokens"] == ["头", "发"]
    cluener = {"text": "頭髮", "label": {"x": {"頭髮": [[0, 1]]}}}
    assert Table.from_rows([cluener], SIMPLIFY)[0]["spans"] == [{"start": 0, "end": 2, "type": "x"}]
