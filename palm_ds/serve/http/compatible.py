"""Answers in the forms of other servers, so that their clients work here.

/v1/embeddings, /v1/models               OpenAI
/v1/rerank, /v2/rerank                   Jina, Cohere
/embed, /rerank, /predict, / (POST)      Hugging Face's text-embeddings-inference, by their keys:
                                         `inputs` and `texts` where our own have others
/embed_sparse                            text-embeddings-inference alone
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from fastapi import Request, Response

from palm_ds.common.messages import counted
from palm_ds.serve.http import schemas
from palm_ds.serve.http.answers import Json, deadline_of, in_base64, service_of, settings_of
from palm_ds.serve.limits import RequestError
from palm_ds.serve.requests import Input
from palm_ds.serve.token_ids import TokenIds

# ---- OpenAI ----


async def openai_embeddings(body: schemas.OpenAIBody, request: Request) -> Response:
    """Vectors in the form of OpenAI's embeddings."""
    model, vectors, tokens, _ = await service_of(request).embed(
        _openai_inputs(body.input),
        lambda model: settings_of(model, body.dimensions),
        body.model,
        deadline_of(request),
        "input",
    )
    if body.encoding_format == "base64":
        listed: Sequence[Any] = [in_base64(vector) for vector in vectors]
    else:
        listed = list(vectors)
    data = [{"object": "embedding", "index": n, "embedding": each} for n, each in enumerate(listed)]
    usage = {"prompt_tokens": sum(tokens), "total_tokens": sum(tokens)}
    return Json({"object": "list", "data": data, "model": model.name, "usage": usage})


def _openai_inputs(given: str | Sequence[Any]) -> Sequence[Any] | TokenIds:
    """Texts or ids; one text alone becomes a list."""
    alone = isinstance(given, str) or (len(given) > 0 and isinstance(given[0], int))
    every: Sequence[Any] = [given] if alone else given
    are_ids = len(every) > 0 and not isinstance(every[0], str)
    return TokenIds(ids=every, name="input") if are_ids else every


async def openai_models(request: Request) -> Response:
    """The models' names in OpenAI's form."""
    names = service_of(request).models.models
    data = [{"id": name, "object": "model", "created": 0, "owned_by": "palm_ds"} for name in names]
    return Json({"object": "list", "data": data})


# ---- Jina and Cohere ----


async def rerank_documents(body: schemas.JinaRerankBody, request: Request) -> Response:
    """Documents by how well they match a query, as Jina and Cohere answer."""
    documents = [text if isinstance(text, str) else text.text for text in body.documents]
    model, scores = await _scores(body.query, documents, body.model, request)
    results = [
        {
            "index": n,
            "relevance_score": scores[n],
            **({"document": {"text": documents[n]}} if body.return_documents else {}),
        }
        for n in _best_first(scores)[: body.top_n]
    ]
    return Json({"id": str(uuid.uuid4()), "model": model, "results": results})


async def _scores(
    query: str, documents: Sequence[str], name: str, request: Request, field: str = "documents"
) -> tuple[str, list[float]]:
    """(model, the score of each document): by the first head that scores pairs, or without one by
    vectors, as these forms cannot ask for either."""
    service, deadline = service_of(request), deadline_of(request)
    if service.models.ranks(name):
        model, _, scores = await service.rerank(query, documents, "", name, deadline, field)
    else:
        model, scores = await service.rerank_by_vectors(query, documents, name, deadline, field)
    return model.name, scores


def _log_odds(scores: Sequence[float]) -> list[float]:
    """Logits of these probabilities, which are rounded, so that none is 0 or 1 for sure; small ones
    to digits of their own, those near 1 to 15 decimals."""
    sure = np.clip(scores, 1e-300, 1 - 1e-15)
    return (np.log(sure) - np.log1p(-sure)).tolist()


def _best_first(scores: Sequence[float]) -> list[int]:
    return np.argsort(-np.array(scores), kind="stable").tolist()


# ---- text-embeddings-inference ----


async def tei_embed(body: schemas.TeiEmbedBody, request: Request) -> Response:
    """A vector for each text, as text-embeddings-inference answers."""
    _, vectors, _, cut = await service_of(request).embed(
        [body.inputs] if isinstance(body.inputs, str) else body.inputs,
        lambda model: settings_of(model, body.dimensions, normalize=body.normalize),
        "",
        deadline_of(request),
        "inputs",
    )
    _check_whole(cut, body.truncate)
    return Json(list(vectors))


async def tei_embed_sparse(body: schemas.TeiSparseBody, request: Request) -> Response:
    """The sparse vector of each text, as text-embeddings-inference answers."""
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    service, deadline = service_of(request), deadline_of(request)
    _, vectors, cut = await service.embed_sparse(texts, "", deadline, "inputs")
    _check_whole(cut, body.truncate)
    pairs = (zip(*map(np.ndarray.tolist, vector), strict=True) for vector in vectors)
    return Json([[{"index": n, "value": x} for n, x in each] for each in pairs])


async def tei_rerank(body: schemas.TeiRerankBody, request: Request) -> Response:
    """Texts by how well they match a query, as text-embeddings-inference answers."""
    _, scores = await _scores(body.query, body.texts, "", request, "texts")
    if body.raw_scores and service_of(request).models.ranks(""):
        scores = _log_odds(scores)
    return Json(
        [
            {
                "index": n,
                "score": scores[n],
                **({"text": body.texts[n]} if body.return_text else {}),
            }
            for n in _best_first(scores)
        ]
    )


async def tei_predict(body: schemas.TeiPredictBody, request: Request) -> Response:
    """Labels with scores, as text-embeddings-inference answers: of the first task with labels."""
    service = service_of(request)
    model, task = service.models.labeling()
    inputs = _texts_and_pairs(body.inputs)
    alone = isinstance(body.inputs, str) or isinstance(body.inputs[0], str)
    _, predictions, cut = await service.predict(task, inputs, model.name, deadline_of(request))
    _check_whole(cut, body.truncate)
    key = "logits" if body.raw_scores else "probs"
    labels = model.tasks[task].labels
    answers = [_labeled(labels, prediction[key]) for prediction in predictions]
    return Json(answers[0] if alone else answers)


def _texts_and_pairs(inputs: str | list[str] | list[list[str]]) -> list[Input]:
    """One input, a text or a list of one or two, or several such lists; a list of one is a text."""
    if isinstance(inputs, str):
        return [inputs]
    lists = [each for each in inputs if isinstance(each, list)] or [[str(x) for x in inputs]]
    return [texts if len(texts) > 1 else texts[0] for texts in lists]


def _labeled(labels: Sequence[str], scores: Sequence[float]) -> list[Mapping[str, Any]]:
    return [{"label": labels[n], "score": scores[n]} for n in _best_first(scores)]


def _check_whole(cut: int, truncate: bool) -> None:
    """Raises RequestError for inputs that were truncated without being asked to."""
    if cut and not truncate:
        raise RequestError(
            413,
            f"inputs: {counted(cut, 'text')} with more tokens than the model reads; shorten, or "
            'send "truncate": true',
        )
