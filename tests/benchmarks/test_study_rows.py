"""benchmarks/study_rows.py: rows with a split of their own."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import study_rows


def rows_of(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_rows(tmp_path: Path, monkeypatch) -> None:
    data, output = tmp_path / "data", tmp_path / "rows"
    (data / "restaurant8k").mkdir(parents=True)
    texts = ["lift", "drag", "heat"]
    documents = [f".I {n}\n.T\ntitle\n.W\n{text}\n" for n, text in enumerate(texts, 1)]
    queries = [f".I {n:03}\n.W\nwhat is {text}\n" for n, text in enumerate(texts, 1)]
    (data / "cran.all.1400").write_text("".join(documents))
    (data / "cran.qry").write_text("".join(queries))
    (data / "cranqrel.q001").write_text("1 1 2\n2 2 1\n3 3 3\n")
    turns = [
        {"userInput": {"text": "at  six"}, "labels": [{"slot": "time"}]},
        {"userInput": {"text": "hello"}},
    ]
    (data / "restaurant8k/train_0.json").write_text(json.dumps(turns))
    (data / "restaurant8k/test.json").write_text(json.dumps(turns[1:]))
    articles = [{"title": str(number), "paragraphs": []} for number in range(5)]
    (data / "xquad.en.json").write_text(json.dumps({"data": articles}))
    monkeypatch.setattr("sys.argv", ["rows", "--data", str(data), "--output", str(output)])
    study_rows.main()
    learned = [row["query"] for row in rows_of(output / "cranfield/cranfield_train.jsonl")]
    assert learned == ["what is lift", "what is drag"]
    held = rows_of(output / "cranfield/cranfield_dev.jsonl")
    assert [row["query"] for row in held] == ["what is heat", None, None, None]
    slots = {name: rows_of(output / f"restaurant8k/{name}.jsonl") for name in ("train", "dev")}
    assert slots == {
        "train": [{"text_a": "at six", "label": "time"}],  # the other is scored
        "dev": [{"text_a": "hello", "label": "nothing"}],
    }
    titles = {
        name: [x["title"] for x in json.loads((output / f"xquad/{name}.json").read_text())["data"]]
        for name in ("train", "dev")
    }
    assert titles == {"train": ["1", "2", "4"], "dev": ["0", "3"]}
