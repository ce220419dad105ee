"""mteb on an exported folder, with tasks from local files: Cranfield (Retrieval) and STS-B (STS).

    python benchmarks/retrieval.py rows --data DATA --output rows
    python benchmarks/mteb_local.py --rows rows --models runs/stsb/hf --tasks cranfield stsb

Needs palm_ds[mteb]. The rows, texts and lengths are those of benchmarks/retrieval.py, which scores
with `palm-ds embed`, pytrec_eval and SciPy; mteb encodes with sentence-transformers and has scores
of its own. Nothing is downloaded.
"""

# mteb is an extra
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import mteb
from datasets import Dataset
from mteb import TaskMetadata
from mteb.abstasks import AbsTaskRetrieval
from mteb.abstasks.sts import AbsTaskSTS
from sentence_transformers import SentenceTransformer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.retrieval import read  # noqa: E402

_SCORES = {"cranfield": ("map_at_1000", "ndcg_at_10", "recall_at_10"), "stsb": ("cosine_spearman",)}


def about(name: str, kind: Any, main_score: str) -> TaskMetadata:
    return TaskMetadata(
        name=name,
        description=f"{name}, from local files",
        type=kind,
        main_score=main_score,
        dataset={"path": "local", "revision": "local"},
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        modalities=["text"],
        category="t2t",
    )


class Cranfield(AbsTaskRetrieval):
    """The held-out queries search all abstracts."""

    metadata = about("Cranfield", "Retrieval", "ndcg_at_10")
    rows: Path

    def load_data(self, *_: Any, **__: Any) -> None:
        held = read(self.rows / "cranfield_dev.jsonl")
        texts = list(dict.fromkeys(row["positive"] for row in held))
        queries = list(dict.fromkeys(row["query"] for row in held if row["query"]))
        relevant: dict[str, dict[str, int]] = {}
        for row in held:
            if row["query"]:
                judged = relevant.setdefault(str(queries.index(row["query"])), {})
                judged[str(texts.index(row["positive"]))] = 1
        self.dataset: Any = {
            "default": {
                "test": {
                    "corpus": numbered(texts),
                    "queries": numbered(queries),
                    "relevant_docs": relevant,
                    "top_ranked": None,
                }
            }
        }
        self.data_loaded = True


class Stsb(AbsTaskSTS):
    """The test pairs."""

    metadata = about("STS-B", "STS", "cosine_spearman")
    rows: Path

    def load_data(self, *_: Any, **__: Any) -> None:
        test = read(self.rows / "stsb_test.jsonl")
        columns = {"text_a": "sentence1", "text_b": "sentence2", "label": "score"}
        values = {name: [row[ours] for row in test] for ours, name in columns.items()}
        self.dataset: Any = {"test": Dataset.from_dict(values)}
        self.data_loaded = True


def numbered(texts: list[str]) -> Dataset:
    return Dataset.from_dict({"id": [str(n) for n in range(len(texts))], "text": texts})


def scores(model: SentenceTransformer, name: str, rows: Path) -> dict[str, float]:
    """{measure: value} of one task."""
    task = {"cranfield": Cranfield, "stsb": Stsb}[name]()
    task.rows = rows
    found = mteb.evaluate(model, task, cache=None, co2_tracker=False, show_progress_bar=False)
    (measured,) = found.task_results[0].scores["test"]
    return {key: float(measured[key]) for key in _SCORES[name]}


def main() -> None:
    parser = argparse.ArgumentParser(description="mteb on exported folders, with local tasks.")
    add = parser.add_argument
    add("--rows", type=Path, default=Path("rows"), help="what benchmarks/retrieval.py rows wrote")
    add("--models", nargs="+", required=True, help="Hugging Face folders, such as a run's hf/")
    add("--tasks", nargs="+", choices=list(_SCORES), default=list(_SCORES))
    add("--length", type=int, default=64, help="tokens of a text")
    args = parser.parse_args()
    for folder in args.models:
        model = SentenceTransformer(folder, device="cpu")
        model.max_seq_length = args.length
        for task in args.tasks:
            found = scores(model, task, args.rows)
            shown = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
            print(f"{folder}: {task}: {shown}", flush=True)


if __name__ == "__main__":
    main()
