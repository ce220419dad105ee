"""Vectors before and after fine-tuning: Cranfield (search) and STS-B (similarity of sentences).

    python benchmarks/retrieval.py rows --data DATA --output rows
    palm-ds finetune launch/recipes/finetune/cranfield.yaml ... --run_dir runs/cranfield
    python benchmarks/retrieval.py cranfield --rows rows --models bm25 MINILM runs/cranfield
    python benchmarks/retrieval.py stsb --rows rows --models MINILM runs/stsb

`rows` reads the Cranfield collection (cran.all.1400, cran.qry, cranqrel*) and STS-B's csv files
anywhere under DATA. Every third Cranfield query is held out with all its judgments. The scores
are computed from the vectors of `palm-ds embed`, with nothing of the training code: nDCG@10 by
trec_eval over all documents; Spearman correlation of cosines by SciPy. `bm25` is that of the words
of `palm-ds index`. Of sparse vectors the mean number of non-zero entries is shown, too.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

HELD_OUT = 3
"""One of this number of queries is held out."""


def find(data: Path, pattern: str) -> Path:
    found = sorted(data.rglob(pattern))
    if not found:
        raise SystemExit(f"{data}: has no {pattern}")
    return found[0]


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    print(f"{path}: {len(lines):,} rows")


def smart(path: Path) -> Iterator[dict[str, str]]:
    """The records of a SMART file: {field: text on one line}."""
    for record in re.split(r"^\.I ", path.read_text("latin-1"), flags=re.M)[1:]:
        parts = re.split(r"^\.([A-Z])[ ]*\n", record, flags=re.M)[1:]
        yield {k: " ".join(v.split()) for k, v in zip(parts[::2], parts[1::2], strict=True)}


def write_cranfield(data: Path, output: Path) -> None:
    """Query numbers of the judgments are places in the file of queries."""
    documents = [record["W"] for record in smart(find(data, "cran.all.1400"))]
    queries = [record["W"] for record in smart(find(data, "cran.qry"))]
    pairs = [line.split() for line in find(data, "cranqrel.q*").read_text().split("\n") if line]
    rows = [(int(q), documents[int(d) - 1]) for q, d, *_ in pairs]
    rows = [(q, {"query": queries[q - 1], "positive": text}) for q, text in rows if text]
    write(output / "cranfield_train.jsonl", [row for q, row in rows if q % HELD_OUT])
    texts = [{"query": None, "positive": text} for text in dict.fromkeys(documents) if text]
    held = [row for q, row in rows if q % HELD_OUT == 0]
    write(output / "cranfield_dev.jsonl", [*held, *texts])


def write_stsb(data: Path, output: Path) -> None:
    for part in ("train", "dev", "test"):
        with find(data, f"stsb-en-{part}.csv").open(encoding="utf-8", newline="") as file:
            rows = [{"text_a": a, "text_b": b, "label": float(x)} for a, b, x in csv.reader(file)]
        write(output / f"stsb_{part}.jsonl", rows)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]


def embedded(model: str, texts: list[str], length: int) -> Any:
    """Vectors of texts, pooled as the model's folder says: of length 1, or sparse."""
    from palm_ds.inference.embedder import EmbeddingSettings
    from palm_ds.inference.search.vectors import unit
    from palm_ds.inference.trained_model import TrainedModel

    vectors = TrainedModel.open(model).embedder(EmbeddingSettings(max_length=length)).vectors(texts)
    return unit(vectors) if isinstance(vectors, np.ndarray) else vectors


def by_words(queries: list[str], texts: list[str]) -> np.ndarray:
    """(queries, texts) BM25 of whole texts."""
    from palm_ds.inference.search.ranking import bm25
    from palm_ds.inference.search.words import query_words, words_of

    words = [words_of(text) for text in texts]
    postings: dict[str, list[tuple[int, int]]] = {}
    for row, own in enumerate(words):
        for word, times in Counter(own).items():
            postings.setdefault(word, []).append((row, times))
    known = {word: np.array(pairs) for word, pairs in postings.items()}
    lengths = np.array([len(own) for own in words])
    asked = [[known[word] for word in query_words(query) if word in known] for query in queries]
    return np.array([bm25(each, lengths, lengths >= 0, len(texts)) for each in asked])


def compared(
    model: str, queries: list[str], texts: list[str], length: int
) -> tuple[np.ndarray, dict[str, float]]:
    """(queries, texts) scores, and facts about sparse vectors."""
    from palm_ds.common.sparse_vectors import products

    if model == "bm25":
        return by_words(queries, texts), {}
    asked, found = embedded(model, queries, length), embedded(model, texts, length)
    facts = {}
    if not isinstance(found, np.ndarray):
        facts = {"query_active": asked.active.mean(), "document_active": found.active.mean()}
    return products(asked, found), facts


def score_cranfield(model: str, rows: Path, length: int) -> dict[str, float]:
    import pytrec_eval

    held = read(rows / "cranfield_dev.jsonl")
    queries = list(dict.fromkeys(row["query"] for row in held if row["query"]))
    texts = list(dict.fromkeys(row["positive"] for row in held))
    relevant: dict[str, dict[str, int]] = {}
    for row in held:
        if row["query"]:
            judged = relevant.setdefault(str(queries.index(row["query"])), {})
            judged[str(texts.index(row["positive"]))] = 1
    scores, facts = compared(model, queries, texts, length)
    run = {str(q): {str(t): float(x) for t, x in enumerate(row)} for q, row in enumerate(scores)}
    names = {"ndcg_cut_10", "recall_10", "recip_rank", "map"}
    found = pytrec_eval.RelevanceEvaluator(relevant, names).evaluate(run)
    means = {name: np.mean([each[name] for each in found.values()]) for name in sorted(names)}
    return {name: float(value) for name, value in (means | facts).items()}


def score_stsb(model: str, rows: Path, length: int) -> dict[str, float]:
    from scipy.stats import spearmanr

    test = read(rows / "stsb_test.jsonl")
    one, other = (embedded(model, [row[x] for row in test], length) for x in ("text_a", "text_b"))
    labels = [row["label"] for row in test]
    return {"spearman": float(np.asarray(spearmanr((one * other).sum(1), labels))[0])}


def main() -> None:
    parser = argparse.ArgumentParser(description="Vectors before and after fine-tuning.")
    add = parser.add_argument
    add("what", choices=["rows", "cranfield", "stsb"])
    add("--data", type=Path, help="the folder of the collections")
    add("--output", type=Path, default=Path("rows"))
    add("--rows", type=Path, default=Path("rows"))
    add("--models", nargs="+", default=[])
    add("--length", type=int, default=128, help="tokens of a text")
    args = parser.parse_args()
    if args.what == "rows":
        args.output.mkdir(parents=True, exist_ok=True)
        write_cranfield(args.data, args.output)
        write_stsb(args.data, args.output)
    for model in args.models:
        score = score_cranfield if args.what == "cranfield" else score_stsb
        found = score(model, args.rows, args.length)
        print(f"{model}: " + ", ".join(f"{name} {value:.4f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
