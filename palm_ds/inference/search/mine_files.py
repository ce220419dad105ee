"""Files of rows (query, positive) to rows with hard negatives, which the task `retrieval` reads.

table ──queries and their positives──> Miner (mine_negatives.py) ──> FILE.jsonl
passages: the texts of an index, of other files, or the positives of all rows
{"query": ..., "positive": ..., "negatives": [...], "teacher_scores": [positive's, negatives']}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from palm_ds.common.atomic import write_file_atomically
from palm_ds.common.errors import UserError, suggest
from palm_ds.data.reader import Table, TableSettings, open_table
from palm_ds.data.tasks.task import TableTask
from palm_ds.inference.embedder import CHUNK, Embedder
from palm_ds.inference.predict_files import without_labels
from palm_ds.inference.search.index import SearchIndex
from palm_ds.inference.search.mine_negatives import MinedQuery, Miner, Passages, Scorer
from palm_ds.inference.search.texts import TextColumns, read_texts
from palm_ds.inference.search.vectors import unit
from palm_ds.inference.trained_model import TrainedModel

Progress = Callable[[int, int | None], None]


@dataclass(frozen=True, kw_only=True)
class MiningSummary:
    """Result of mining a table."""

    rows: int
    negatives: int
    without: int
    """Rows with a query but without negatives."""
    positive_score: float
    """The mean score of the positives."""
    negative_score: float


# ---- what is read ----


def open_pairs(files: Sequence[str], columns: Mapping[str, str | int | list[str | int]]) -> Table:
    """Rows with the roles `query`, in some rows null, and `positive`. Raises UserError."""
    table = open_table(list(files), TableSettings(columns=columns))
    for number, text in enumerate(table.column("positive")):
        if not (text or "").strip():
            raise UserError(f"{table.where(number)}: positive: the text is empty")
    for number, query in enumerate(table.column("query")):
        if query is not None and not query.strip():
            raise UserError(f"{table.where(number)}: query: the text is empty")
    if not answers_of(table):
        raise UserError(f"{', '.join(files)}: no row has a query")
    return table


_NO_SPARSE = (
    "negatives are mined by cosines of dense vectors; these are sparse (splade): mine with another "
    "model"
)


def answers_of(table: Table) -> dict[str, list[str]]:
    """{query: its positives}"""
    answers: dict[str, list[str]] = {}
    for query, positive in zip(table.column("query"), table.column("positive"), strict=True):
        if query is not None:
            answers.setdefault(query, []).append(positive)
    return answers


def passages_of_index(index: SearchIndex) -> Passages:
    """All texts of an index. Raises UserError for sparse vectors."""
    if index.store.sparse:
        raise UserError(_NO_SPARSE)
    with index.store.reading() as now:
        rows = np.flatnonzero(now.rows.alive)
        texts = [each.passage for each in now.records(rows.tolist())]
        thinned = len(rows) < now.rows.count
        return Passages(texts=texts, vectors=now.vectors[rows] if thinned else now.vectors)


def texts_of_files(files: Sequence[str], columns: TextColumns) -> list[str]:
    """The texts of files, each once. Raises UserError."""
    return [*dict.fromkeys(text.passage for _, text in read_texts(files, columns))]


def embedded(texts: Sequence[str], embedder: Embedder, done: Progress) -> Passages:
    """Texts with their vectors. Raises UserError for sparse ones."""
    if embedder.sparse:
        raise UserError(_NO_SPARSE)
    vectors = np.empty((len(texts), embedder.size), np.float32)
    for first in range(0, len(texts), CHUNK):
        part = texts[first : first + CHUNK]
        vectors[first : first + len(part)] = unit(embedder.embed(part))
        done(first + len(part), len(texts))
    return Passages(texts=texts, vectors=vectors)


def pair_scorer(opened: TrainedModel, task: str = "") -> Scorer:
    """Scores of pairs by a head, as `/rerank` of a server gives them. Raises UserError."""
    scoring = _scoring_task(opened, task)
    predictor = opened.predictor([scoring.name])
    (each,) = predictor.passes
    read = TableSettings(simplify=each.read.simplify, strip_spaces=each.read.strip_spaces)

    def score(pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        rows = [scoring.row_of(pair) for pair in pairs]
        source = predictor.source(Table.from_rows(rows, without_labels(read), name="pairs"))
        scores = np.empty(len(pairs))
        for chunk in predictor.predict(each, source):
            scores[chunk.rows] = [*map(scoring.relevance, chunk.predictions[scoring.name])]
        return scores

    return score


def _scoring_task(opened: TrainedModel, name: str) -> TableTask:
    tasks = {
        key: task
        for key, task in opened.recipe.built_tasks.items()
        if isinstance(task, TableTask) and task.rerank_priority
    }
    if not tasks:
        raise UserError(f"{opened.path}: no task scores pairs, such as ranking or matching")
    if name and name not in tasks:
        raise UserError(f"{opened.path}: no task {name!r} that scores pairs{suggest(name, tasks)}")
    return tasks[name] if name else max(tasks.values(), key=lambda task: task.rerank_priority)


# ---- what is written ----


def check_output(output: Path, table: Table) -> None:
    """Raises UserError."""
    if output.suffix != ".jsonl" or output.is_dir():
        raise UserError(f"--output: {output}: rows are JSON lines; name a .jsonl file")
    if output.resolve() in [Path(name).resolve() for name in table.names]:
        raise UserError(f"--output: {output}: has the rows themselves; name another file")


def mine_file(
    table: Table, output: Path, miner: Miner, *, scores: bool = False, done: Progress
) -> MiningSummary:
    """Write the rows of a table with their negatives, complete or not at all. `scores`: also as
    `teacher_scores`."""
    answers, mined = answers_of(table), dict[str, MinedQuery]()
    for found in miner.mine(answers):
        mined[found.query] = found
        done(len(mined), len(answers))
    pairs = zip(table.column("query"), table.column("positive"), strict=True)
    rows = [_row(mined.get(query), query, positive, scores) for query, positive in pairs]
    output.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    write_file_atomically(output, "".join(lines))
    return _summary(table, mined)


def _row(
    found: MinedQuery | None, query: str | None, positive: str, scores: bool
) -> dict[str, Any]:
    negatives = found.negatives if found else ()
    row = {"query": query, "positive": positive, "negatives": [text for text, _ in negatives]}
    if scores:
        own = [found.positives[positive]] if found else []
        row["teacher_scores"] = [*own, *(score for _, score in negatives)]
    return row


def _summary(table: Table, mined: Mapping[str, MinedQuery]) -> MiningSummary:
    asked = [mined[query] for query in table.column("query") if query is not None]
    own = [score for found in mined.values() for score in found.positives.values()]
    others = [score for found in mined.values() for _, score in found.negatives]
    return MiningSummary(
        rows=len(table),
        negatives=sum(len(found.negatives) for found in asked),
        without=sum(not found.negatives for found in asked),
        positive_score=float(np.mean(own)),
        negative_score=float(np.mean(others)) if others else 0.0,
    )
