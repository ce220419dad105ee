"""Metrics of retrieval: how high a query's relevant texts rank among all texts (pytrec_eval).

A query may have several relevant texts. Ranks count from 1; nothing beyond the first DEPTH texts is
scored, as in trec_eval.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from palm_ds.common.errors import need_extra
from palm_ds.common.sparse_vectors import DenseOrSparse, part_of, products

DEPTH = 1000
_BLOCK = 1 << 24  # scores that are computed at a time
_QUERIES = 128  # at most, of which they are


def retrieval_metrics(
    queries: DenseOrSparse,
    texts: DenseOrSparse,
    relevant: Sequence[Sequence[int]],
    *,
    k: int = 10,
    left_out: Mapping[int, int] | None = None,
) -> dict[str, float]:
    """Means over the queries of nDCG@k, recall@k, MRR and MAP, in 0..1.

    queries: (q, size) and texts (t, size), compared by their dot products; relevant: texts of each
    query, at least one; `left_out`: {query: a text that is not a candidate}. Empty without
    queries."""
    need_extra("scoring retrieval", "retrieval", "pytrec_eval")
    import pytrec_eval

    if not len(queries):
        return {}
    names = {
        f"ndcg_cut_{k}": f"ndcg@{k}",
        f"recall_{k}": f"recall@{k}",
        "recip_rank": "mrr",
        "map": "map",
    }
    judged = {str(q): {str(t): 1 for t in own} for q, own in enumerate(relevant)}
    evaluator = pytrec_eval.RelevanceEvaluator(
        judged, {f"ndcg_cut.{k}", f"recall.{k}", "recip_rank", "map"}
    )
    metrics: dict[str, dict[str, float]] = {}
    for ranked in _ranked(queries, texts, left_out or {}):
        metrics |= evaluator.evaluate(ranked)
    return {
        name: float(np.mean([metrics[str(q)][measure] for q in range(len(queries))]))
        for measure, name in names.items()
    }


def _ranked(
    queries: DenseOrSparse, texts: DenseOrSparse, left_out: Mapping[int, int]
) -> Iterator[dict[str, dict[str, float]]]:
    """{query: {text: score}} of each query's best texts, of some queries at a time: those of all
    would take 130 KB for each."""
    size = min(max(_BLOCK // len(texts), 1), _QUERIES)
    for first in range(0, len(queries), size):
        scores = products(part_of(queries, first, first + size), texts)
        ranked: dict[str, dict[str, float]] = {}
        for q, own in enumerate(scores, first):
            if q in left_out:
                own[left_out[q]] = -np.inf
            best = np.argsort(-own, kind="stable")[:DEPTH]
            best = best[own[best] > -np.inf]
            ranked[str(q)] = dict(zip(map(str, best.tolist()), own[best].tolist(), strict=True))
        yield ranked
