"""Files of rows (query, positive) to rows with hard negatives, which the task `retrieval` reads.

table ──queries and their positives──> Miner (mine_negatives.py) ──> FILE.jsonl
passages: the texts of an index, of other files, or the positives of all rows
{"query": ..., "positive": ..., "negatives": [...], "teacher_scores": [positive's, negatives']}

An interrupted run keeps the vectors of passages and the queries that it has finished.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from palm_ds.common.atomic import write_file_atomically
from palm_ds.common.errors import UserError, suggest
from palm_ds.common.files import hash_of_text
from palm_ds.data.reader import ColumnKey, Table, TableSettings, open_table
from palm_ds.data.reader.options import without_labels
from palm_ds.data.tasks.task import TableTask
from palm_ds.inference.embedder import CHUNK, Embedder
from palm_ds.inference.embedding_files import vectors_key
from palm_ds.inference.parts import OutputParts
from palm_ds.inference.predict_files import predictions_key
from palm_ds.inference.predictor import Predictor
from palm_ds.inference.search.index import SearchIndex
from palm_ds.inference.search.mine_negatives import (
    QUERIES,
    MinedQuery,
    Miner,
    MiningSettings,
    Passages,
)
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
    """NaN without negatives."""
    continued: int
    """Queries that an interrupted run had mined."""


@dataclass(frozen=True, kw_only=True)
class PairScorer:
    """Scores of pairs by a head, as `/rerank` of a server gives them."""

    predictor: Predictor
    task: TableTask

    def __call__(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        """Scores (pairs,) of (query, text)."""
        (each,) = self.predictor.passes
        read = TableSettings(simplify=each.read.simplify, strip_spaces=each.read.strip_spaces)
        rows = [self.task.row_of(pair) for pair in pairs]
        table = Table.from_rows(rows, without_labels(read), name="pairs")
        scores = np.empty(len(pairs))
        for chunk in self.predictor.predict(each, self.predictor.source(table)):
            scores[chunk.rows] = [*map(self.task.relevance, chunk.predictions[self.task.name])]
        return scores


# ---- what is read ----


def open_pairs(files: Sequence[str], columns: Mapping[str, ColumnKey]) -> Table:
    """Rows with the roles `query`, in some rows null, and `positive`. Raises UserError."""
    table = open_table(list(files), without_labels(TableSettings(columns=columns)))
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


def pair_scorer(opened: TrainedModel, task: str = "") -> PairScorer:
    """Of the named task, or of the best one to order texts by. Raises UserError."""
    scoring = _scoring_task(opened, task)
    return PairScorer(predictor=opened.predictor([scoring.name]), task=scoring)


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


def mine_file(
    table: Table,
    output: Path,
    *,
    passages: Passages | Sequence[str],
    embedder: Embedder,
    prompt: str | None = None,
    scorer: PairScorer | None = None,
    settings: MiningSettings,
    scores: bool = False,
    done: Progress,
) -> MiningSummary:
    """Write the rows of a table with their negatives, complete or not at all. `passages`: with
    vectors of `embedder`, or the texts alone; `prompt`: before queries, if it differs from the
    embedder's; `scores`: also write `teacher_scores`. Raises UserError."""
    if embedder.sparse:
        raise UserError(_NO_SPARSE)
    own = embedder.settings
    asking = embedder if prompt is None else embedder.with_settings(replace(own, prompt=prompt))
    texts = passages.texts if isinstance(passages, Passages) else passages
    how = [vectors_key(embedder), asking.settings.prompt, asdict(settings)]
    how += [predictions_key(scorer.predictor)] if scorer else []
    key = [how, table.fingerprint, hash_of_text(json.dumps([*texts]))]
    with OutputParts.opened(output, ".jsonl", key) as parts:
        if not isinstance(passages, Passages):
            passages = _embedded(texts, embedder, replace(parts, suffix=".npy"), done)
        miner = Miner(
            passages=passages,
            embed_queries=asking.embed,
            embed_texts=embedder.embed,
            settings=settings,
            scorer=scorer,
        )
        answers = answers_of(table)
        continued = _mine_parts(miner, answers, parts, done)
        files = [parts.path(first) for first in range(0, len(answers), QUERIES)]
        mined = {found.query: found for file in files for found in _read_part(file)}
        pairs = zip(table.column("query"), table.column("positive"), strict=True)
        rows = [_row(mined.get(query), query, positive, scores) for query, positive in pairs]
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        write_file_atomically(output, "".join(lines))
    return _summary(table, mined, continued)


def _embedded(
    texts: Sequence[str], embedder: Embedder, parts: OutputParts, done: Progress
) -> Passages:
    """Texts with their vectors."""
    vectors = np.empty((len(texts), embedder.size), np.float32)
    for first in range(0, len(texts), CHUNK):
        chunk = texts[first : first + CHUNK]
        if not parts.path(first).exists():
            parts.write(first, partial(np.save, arr=unit(embedder.embed(chunk))))
        vectors[first : first + len(chunk)] = np.load(parts.path(first), allow_pickle=False)
        done(first + len(chunk), len(texts))
    return Passages(texts=texts, vectors=vectors)


def _mine_parts(
    miner: Miner, answers: Mapping[str, Sequence[str]], parts: OutputParts, done: Progress
) -> int:
    """Mine the queries that an interrupted run has not; returns the number of those that it has."""
    queries, continued = [*answers], 0
    for first in range(0, len(queries), QUERIES):
        some = queries[first : first + QUERIES]
        if parts.path(first).exists():
            continued += len(some)
        else:
            mined = [asdict(found) for found in miner.mine({x: answers[x] for x in some})]
            parts.write(first, partial(_write_part, mined))
        done(first + len(some), len(queries))
    return continued


def _write_part(mined: Sequence[Mapping[str, Any]], file: Path) -> None:
    file.write_text("".join(json.dumps(found) + "\n" for found in mined), "utf-8")


def _read_part(file: Path) -> list[MinedQuery]:
    return [MinedQuery(**json.loads(line)) for line in file.read_text("utf-8").splitlines()]


def _row(
    found: MinedQuery | None, query: str | None, positive: str, scores: bool
) -> dict[str, Any]:
    negatives = found.negatives if found else ()
    row = {"query": query, "positive": positive, "negatives": [text for text, _ in negatives]}
    if scores:
        own = [found.positives[positive]] if found else []
        row["teacher_scores"] = [*own, *(score for _, score in negatives)]
    return row


def _summary(table: Table, mined: Mapping[str, MinedQuery], continued: int) -> MiningSummary:
    asked = [mined[query] for query in table.column("query") if query is not None]
    own = [score for found in mined.values() for score in found.positives.values()]
    others = [score for found in mined.values() for _, score in found.negatives]
    return MiningSummary(
        rows=len(table),
        negatives=sum(len(found.negatives) for found in asked),
        without=sum(not found.negatives for found in asked),
        positive_score=float(np.mean(own)),
        negative_score=float(np.mean(others)) if others else math.nan,
        continued=continued,
    )
