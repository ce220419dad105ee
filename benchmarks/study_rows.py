"""Rows of the study's English sets that are published in another form, or without a split.

    python benchmarks/study_rows.py --data DATA --output runs/study/english

DATA has, anywhere under it, the Cranfield collection (cran.all.1400, cran.qry, cranqrel*),
Restaurant8k (restaurant8k/train_0.json, test.json) and xquad.en*.json. Written are a folder for
each:

    cranfield       every third query is held out, and searches all abstracts
    restaurant8k    which slots a turn fills: its 16 most frequent sets, no turn in both files
    xquad           in SQuAD's form; every third article is held out
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.distillation import restaurant8k  # noqa: E402
from benchmarks.retrieval import HELD_OUT, find, write, write_cranfield  # noqa: E402


def write_restaurant8k(data: Path, output: Path) -> None:
    folder = find(data, "restaurant8k/train_0.json").parent
    train, test = restaurant8k(argparse.Namespace(data=folder))
    write(output / "train.jsonl", train)
    write(output / "dev.jsonl", test)


def write_xquad(data: Path, output: Path) -> None:
    articles = json.loads(find(data, "xquad.en*.json").read_text(encoding="utf-8"))["data"]
    held = articles[::HELD_OUT]
    parts = {"dev": held, "train": [article for article in articles if article not in held]}
    for name, part in parts.items():
        text = json.dumps({"version": "1.1", "data": part})
        (output / f"{name}.json").write_text(text, encoding="utf-8")


SETS = {"cranfield": write_cranfield, "restaurant8k": write_restaurant8k, "xquad": write_xquad}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--output", required=True, type=Path)
    args = parser.parse_args()
    for name, write_rows in SETS.items():
        (folder := args.output / name).mkdir(parents=True, exist_ok=True)
        write_rows(args.data, folder)


if __name__ == "__main__":
    main()
