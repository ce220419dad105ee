"""Compares an index's approximate search with comparing every vector: recall and time, in turns.

    palm-ds embed models/minilm --input texts.txt --output vectors.npy
    python benchmarks/search_index.py vectors.npy texts.txt --index index --queries 1000

It needs `pip install 'palm_ds[search]'`. The last texts are the queries, all others are indexed.
Reported are the time to make the graph, recall@10 (the share of the ten nearest texts that are
found), and milliseconds for a query: medians, each query asked in all ways, one after the other.
An index that is there from an earlier run is completed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

from palm_ds.inference.embedder import EmbeddingSettings
from palm_ds.inference.search.index import (
    IndexEmbedding,
    SearchIndex,
    create_index,
    is_index,
    open_index,
)
from palm_ds.inference.search.texts import IndexedText

_ROWS = 20_000  # added at a time


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("vectors", type=Path)
    parser.add_argument("texts", type=Path, help="a text on each line")
    parser.add_argument("--index", type=Path, required=True, help="a folder")
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--top", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1, help="for the graph")
    parser.add_argument("--hybrid", action="store_true", help="time hybrid searches, too")
    args = parser.parse_args()
    vectors = np.load(args.vectors, mmap_mode="r")
    texts = args.texts.read_text("utf-8").splitlines()
    fill(args.index, args.vectors, vectors[: -args.queries], texts)
    with open_index(args.index, approximate_from=1) as index:
        started = time.perf_counter()
        if index.grow_graph(threads=args.threads):
            print(f"graph: {time.perf_counter() - started:.0f} s with {args.threads} threads")
        compare(index, np.array(vectors[-args.queries :], np.float32), texts, args)


def fill(folder: Path, file: Path, vectors: np.ndarray, texts: list[str]) -> None:
    about = json.loads(file.with_name(f"{file.name}.json").read_text("utf-8"))
    embedding = IndexEmbedding(model=about["model"], fingerprint="", settings=EmbeddingSettings())
    if not is_index(folder):
        create_index(folder, embedding, vectors.shape[1])
    started = time.perf_counter()
    with open_index(folder) as index:
        for first in range(index.total, len(vectors), _ROWS):
            part = np.array(vectors[first : first + _ROWS], np.float32)
            rows = enumerate(texts[first : first + len(part)], first)
            index.add([IndexedText(id=str(row), text=text) for row, text in rows], part)
    print(f"added: {time.perf_counter() - started:.0f} s without embedding")


def compare(
    index: SearchIndex, queries: np.ndarray, texts: list[str], args: argparse.Namespace
) -> None:
    top, ways = args.top, ["exact", "approximate", *["hybrid"] * args.hybrid]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    recalls = []
    for query, text in zip(queries, texts[-len(queries) :], strict=True):
        ids = {}
        for way in seconds:
            started = time.perf_counter()
            found = index.search(query, text, top=top, exact=way == "exact", hybrid=way == "hybrid")
            seconds[way].append(time.perf_counter() - started)
            ids[way] = {each.record.id for each in found}
        recalls.append(len(ids["exact"] & ids["approximate"]) / len(ids["exact"]))
    print(f"{index.total:,} texts, {len(queries):,} queries, vectors of {index.size} numbers")
    print(f"recall@{top} {statistics.mean(recalls):.4f}")
    median = {way: statistics.median(each) for way, each in seconds.items()}
    for way, value in median.items():
        print(f"{way:12} {value * 1000:8.2f} ms, {value / median['exact']:.3f} of exact")


if __name__ == "__main__":
    main()
