"""Titles of laws from passages of them: what pretraining a text generator is worth.

    python benchmarks/titles.py rows --data laws.jsonl --output rows
    palm-ds prepare corpus rows/corpus.jsonl --language zh --train wordpiece --vocab_size 4000
    palm-ds pretrain pretrain.yaml ...; palm-ds finetune titles.yaml ...; palm-ds predict ...
    python benchmarks/titles.py score --rows rows/test.jsonl --predictions one two

`rows` reads documents {"title", "text"} with a blank line between paragraphs. One title in eight is
held out with all its passages, and its text is not in `corpus.jsonl` either, which is what to
pretrain on. `score` prints ROUGE-L of the output folders of `palm-ds predict` by `rouge-score`, on
characters, and that of two simple rules: the first characters of the passage, as many as titles
have on average, and the most frequent title. The recipes are in docs/generation.md.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

HELD_OUT = 8
"""One of this number of titles is held out."""
CHARACTERS = 100
"""Of a passage: whole paragraphs, at least one."""
PASSAGES = {"train": 12, "test": 6}
"""The most of each title."""


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    print(f"{path}: {len(lines):,} rows")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]


def passages(text: str) -> Iterator[str]:
    taken = ""
    for paragraph in text.split("\n\n"):
        if taken and len(taken) + len(paragraph) > CHARACTERS:
            yield taken
            taken = ""
        taken += paragraph
    yield taken


def spread(values: Sequence[str], most: int) -> list[str]:
    """At most `most` of them, evenly spread."""
    step = max(len(values) / most, 1.0)
    return [values[int(i * step)] for i in range(min(most, len(values)))]


def write_rows(data: Path, output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    documents = {"train": [], "test": []}
    for document in read(data):
        part = "train" if crc32(document["title"].encode()) % HELD_OUT else "test"
        documents[part].append(document)
    write(output / "corpus.jsonl", documents["train"])
    for part, found in documents.items():
        rows = [
            {"source": passage, "target": document["title"]}
            for document in found
            for passage in spread(list(passages(document["text"])), PASSAGES[part])
        ]
        write(output / f"{part}.jsonl", rows)


def rouge_l(predictions: Sequence[str], targets: Sequence[str]) -> float:
    """Mean F-measure over characters, in percent."""
    from rouge_score.rouge_scorer import RougeScorer

    class Characters:
        def tokenize(self, text: str) -> list[str]:
            return list("".join(text.split()))

    scorer = RougeScorer(["rougeL"], tokenizer=Characters())
    pairs = zip(targets, predictions, strict=True)
    scores = [scorer.score(target, found)["rougeL"].fmeasure for target, found in pairs]
    return 100 * sum(scores) / len(scores)


def texts_in(folder: Path) -> list[str]:
    """The predictions of its only task, without spaces."""
    (file,) = folder.glob("*.predictions.json")
    return ["".join(row["text"].split()) for row in read(file)]


def score(rows: Path, predictions: Sequence[Path]) -> None:
    given = read(rows)
    targets = [row["target"] for row in given]
    usual = round(sum(map(len, targets)) / len(targets))
    often = Counter(row["target"] for row in read(rows.with_name("train.jsonl"))).most_common(1)
    systems = {
        f"the first {usual} characters": [row["source"][:usual] for row in given],
        "the most frequent title": [often[0][0]] * len(given),
    }
    systems |= {str(folder): texts_in(folder) for folder in predictions}
    for name, found in systems.items():
        exact = sum(a == b for a, b in zip(found, targets, strict=True)) / len(targets)
        print(f"{name}: ROUGE-L {rouge_l(found, targets):.1f}, exact {100 * exact:.1f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("rows")
    make.add_argument("--data", type=Path, required=True)
    make.add_argument("--output", type=Path, required=True)
    compare = commands.add_parser("score")
    compare.add_argument("--rows", type=Path, required=True)
    compare.add_argument("--predictions", type=Path, nargs="*", default=[])
    arguments = parser.parse_args()
    if arguments.command == "rows":
        write_rows(arguments.data, arguments.output)
    else:
        score(arguments.rows, arguments.predictions)


if __name__ == "__main__":
    main()
