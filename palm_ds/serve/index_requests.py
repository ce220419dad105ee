"""Requests to the index of a server: searches, texts to add, and texts to delete.

query ──embedded──> index ──> the best texts, or at least 100 ──head──> in the head's order
texts ──those that are not there──> embedded ──> index
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from palm_ds.common.sparse_vectors import DenseOrSparse, SparseVectors
from palm_ds.inference.search.filters import Filter
from palm_ds.inference.search.index import SearchHit, SearchIndex
from palm_ds.inference.search.store import Added
from palm_ds.inference.search.texts import IndexedText
from palm_ds.serve.limits import RequestError, ServingLimits
from palm_ds.serve.requests import check_rows, check_text, embed_work
from palm_ds.serve.served_model import ServedModel
from palm_ds.serve.service import Service

T = TypeVar("T")
RERANKED = 100
"""Texts of a search that a head orders again, at least."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """A search of an index."""

    top: int
    filter: Filter | None = None
    hybrid: bool = False
    """By words as well as by vectors."""
    rerank: bool = False
    """A head that scores pairs orders the best ones again."""


async def search(
    service: Service, query: str, asked: SearchOptions, deadline: float
) -> tuple[ServedModel, list[SearchHit]]:
    """(model, the best texts of the index). Raises RequestError."""
    index, model = _index(service)
    check_text(query, "query", service.limits)
    ranks = service.models.ranking("", "") if asked.rerank else None
    vectors = await _embedded(service, index, model, [query], deadline)
    options = {"filter": asked.filter, "hybrid": asked.hybrid}
    top = max(asked.top, RERANKED) if ranks else asked.top
    run = partial(index.search, vectors[0], query, top=top, **options)
    found = await _threaded(service, service.searching, run, deadline)
    if not ranks or not found:
        return model, found
    passages = [each.record.passage for each in found]
    scores = await service.pair_scores(*ranks, query, passages, deadline)
    return model, _reordered(found, scores)[: asked.top]


def _reordered(found: Sequence[SearchHit], scores: Sequence[float]) -> list[SearchHit]:
    """The texts with these scores, the best first; equal ones in the order they had."""
    order = np.argsort(-np.array(scores), kind="stable")
    return [replace(found[n], score=float(scores[n])) for n in order]


async def add(service: Service, texts: Sequence[IndexedText], deadline: float) -> dict[str, Any]:
    """Add texts to the index; returns what was done, and their ids. Raises RequestError."""
    index, model = _index(service)
    _check_texts(texts, service.limits)

    def complete() -> tuple[list[IndexedText], list[IndexedText]]:
        every = [text.complete(f"texts[{number}]") for number, text in enumerate(texts)]
        same = index.store.unchanged(every)
        return every, [text for text, known in zip(every, same, strict=True) if not known]

    every, new = await _threaded(service, service.searching, complete, deadline)
    done = Added(0, 0)
    if new:
        passages = [text.passage for text in new]
        vectors = await _embedded(service, index, model, passages, deadline)
        change = partial(index.add, new, vectors, deadline=deadline)
        done = await _threaded(service, service.changing, change, deadline)
        await service.in_thread(index.grow_in_background, threads=service.searching)
    ids = [text.id for text in every]
    return {**done._asdict(), "ids": ids, "texts": await _total(service, index)}


async def delete(
    service: Service, ids: Sequence[str] | None, filter: Filter | None, deadline: float
) -> dict[str, int]:
    """Delete texts of the index by id, or those that a filter allows. Raises RequestError."""
    index, _ = _index(service)
    if (ids is None) == (filter is None):
        raise RequestError(422, "the body: name the texts: `ids`, or a `filter`")
    change = partial(index.delete, ids or (), filter, deadline=deadline)
    deleted = await _threaded(service, service.changing, change, deadline)
    return {"deleted": deleted, "texts": await _total(service, index)}


def _index(service: Service) -> tuple[SearchIndex, ServedModel]:
    """The index and the model that embeds for it. Raises RequestError."""
    models = service.models
    if models.index is None:
        raise RequestError(404, "no search index; start the server with --index")
    return models.index, models.named(models.index_model)


async def _embedded(
    service: Service, index: SearchIndex, model: ServedModel, texts: Sequence[str], deadline: float
) -> DenseOrSparse:
    prepare = partial(embed_work, model, texts, index.embedding.settings)
    vectors, _, _ = await service.answer_of(prepare, len(texts), deadline)
    return SparseVectors.of(vectors) if index.store.sparse else vectors


async def _threaded(
    service: Service, threads: Executor, function: Callable[[], T], deadline: float
) -> T:
    return await service.bounded(partial(service.in_thread, function, threads=threads), 1, deadline)


async def _total(service: Service, index: SearchIndex) -> int:
    return await service.in_thread(lambda: index.total, threads=service.searching)


def as_hits(found: Sequence[SearchHit]) -> list[dict[str, Any]]:
    """The results of an answer."""
    return [_hit(each) for each in found]


def _hit(found: SearchHit) -> dict[str, Any]:
    row, identity, title, text, metadata = found.record
    about = {"index": row, "id": identity, "title": title, "text": text, "metadata": metadata}
    return {**about, "score": round(found.score, 6)}


def _check_texts(texts: Sequence[IndexedText], limits: ServingLimits) -> None:
    """Raises RequestError for too many texts to add, and for empty or long ones."""
    check_rows([{"": text.text} for text in texts], limits, "texts")
    for number, text in enumerate(texts):
        for name, value in (("title", text.title), ("id", text.id), ("metadata", text.metadata)):
            if value:
                check_text(value, f"texts[{number}].{name}", limits)
