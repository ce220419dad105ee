"""The routes: HTTP to the service and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from fastapi import Request, Response
from fastapi.responses import PlainTextResponse

from palm_ds.common.version import __version__
from palm_ds.data.tasks.interfaces import as_json
from palm_ds.inference.embedder import EmbeddingSettings
from palm_ds.inference.search.texts import IndexedText
from palm_ds.serve import index_requests, metrics
from palm_ds.serve.http import compatible, schemas
from palm_ds.serve.http.answers import Json, deadline_of, in_base64, service_of, settings_of
from palm_ds.serve.limits import RequestError
from palm_ds.serve.served_model import ServedModel
from palm_ds.serve.token_ids import given_texts

STATIC = Path(__file__).resolve().parent.parent / "static"
_FILES = {"app.js": "text/javascript", "docs.js": "text/javascript", "style.css": "text/css"}
_PAGE = {"cache-control": "no-cache"}


# ---- the tasks ----


async def predict(task: str, body: schemas.PredictBody, request: Request) -> Response:
    """Predictions of a task for texts, pairs, rows or ids."""
    given = given_texts(body.inputs, body.input_ids, body.token_type_ids, "inputs")
    model, predictions, cut = await service_of(request).predict(
        task, given, body.model, deadline_of(request)
    )
    return Json({"model": model.name, "task": task, "predictions": predictions, "truncated": cut})


async def embed(body: schemas.AnyEmbedBody, request: Request) -> Response:
    """A vector for each text, or for each of its tokens."""
    if isinstance(body, schemas.TeiEmbedBody):
        return await compatible.tei_embed(body, request)
    own = body

    keys = {"pooling", "normalize", "prompt", "layers", "tokens", "concat"}

    def settings(model: ServedModel) -> EmbeddingSettings:
        asked = own.model_dump(include=keys, exclude_none=True, exclude_defaults=True)
        asked |= {"layers": tuple(own.layers)} if own.layers else {}
        return settings_of(model, own.dimensions, **asked)

    given = given_texts(own.texts, own.input_ids, own.token_type_ids, "texts")
    model, vectors, tokens, cut = await service_of(request).embed(
        given, settings, own.model, deadline_of(request)
    )
    listed = [in_base64(x) for x in vectors] if own.encoding_format == "base64" else vectors
    found = {"embeddings": listed, "size": vectors[0].shape[-1], "tokens": tokens}
    return Json({"model": model.name, **found, "truncated": cut})


async def fill_mask(body: schemas.FillMaskBody, request: Request) -> Response:
    """The most probable tokens for every [MASK]."""
    model, guesses = await service_of(request).fill(
        body.texts, body.top, body.model, deadline_of(request)
    )
    return Json({"model": model.name, "results": guesses})


async def rerank(body: schemas.AnyRerankBody, request: Request) -> Response:
    """Documents by how well they match a query."""
    if isinstance(body, schemas.TeiRerankBody):
        return await compatible.tei_rerank(body, request)
    service, deadline = service_of(request), deadline_of(request)
    if body.use == "vectors":
        task = ""
        model, scores = await service.rerank_by_vectors(
            body.query, body.documents, body.model, deadline
        )
    else:
        model, task, scores = await service.rerank(
            body.query, body.documents, body.task, body.model, deadline
        )
    order = np.argsort(-np.array(scores), kind="stable").tolist()[: body.top_n]
    results = [{"index": n, "relevance_score": scores[n]} for n in order]
    return Json({"model": model.name, "task": task, "results": results})


async def tokenize(body: schemas.TokenizeBody, request: Request) -> Response:
    """The tokens of texts, with the characters they come from."""
    model, tokens = await service_of(request).tokenize(body.texts, body.model, deadline_of(request))
    return Json({"model": model.name, "results": tokens})


async def search(body: schemas.SearchBody, request: Request) -> Response:
    """The texts of the index that match a query best."""
    asked = index_requests.SearchOptions(
        top=body.top, filter=body.filter, hybrid=body.hybrid, rerank=body.rerank
    )
    model, found = await index_requests.search(
        service_of(request), body.query, asked, deadline_of(request)
    )
    return Json({"model": model.name, "results": index_requests.as_hits(found)})


async def add(body: schemas.AddBody, request: Request) -> Response:
    """Add texts to the index, or replace those of the same ids. Needs the server's token."""
    _check_token(request, "adds to an index")
    texts = [IndexedText(**each.model_dump()) for each in body.texts]
    return Json(await index_requests.add(service_of(request), texts, deadline_of(request)))


async def delete(body: schemas.DeleteBody, request: Request) -> Response:
    """Delete texts of the index by their ids, or by a filter. Needs the server's token."""
    _check_token(request, "deletes texts")
    return Json(
        await index_requests.delete(
            service_of(request), body.ids, body.filter, deadline_of(request)
        )
    )


def _check_token(request: Request, what: str) -> None:
    """Raises RequestError on a server without a token: anyone could change it."""
    if not request.app.state.token:
        raise RequestError(403, f"only a server with a token {what}; set --token_file")


# ---- the server ----


async def health() -> Response:
    """The process answers."""
    return Json({"status": "ok"})


async def ready(request: Request) -> Response:
    """Whether requests are accepted; 503 while the server stops."""
    if service_of(request).draining:
        raise RequestError(503, "this server is stopping", retry_after=1)
    return Json({"status": "ready"})


async def metrics_text(request: Request) -> Response:
    """Prometheus metrics."""
    return PlainTextResponse(service_of(request).metrics.text(), media_type=metrics.CONTENT_TYPE)


async def info(request: Request) -> Response:
    """The models and what they can do."""
    opened = service_of(request).models
    listed = [_about(model) for model in opened.models.values()]
    index = opened.index
    searched = {
        "texts": index.total if index else 0,
        "hybrid": index is not None and index.store.has_words,
        "rerank": index is not None and opened.ranks(""),
    }
    return Json({"version": __version__, "models": listed, "search": searched})


def _about(model: ServedModel) -> dict[str, Any]:
    settings = model.embedder.settings
    tasks = [
        {
            "name": name,
            "kind": model.kind_of(name),
            "texts": list(task.texts),
            "labels": list(task.labels),
            "form": as_json(task.form()),
        }
        for name, task in model.tasks.items()
    ]
    return {
        "name": model.name,
        "tasks": tasks,
        "fill_mask": model.filler is not None,
        "embedding": {
            "size": model.embedder.size,
            "pooling": settings.pooling,
            "normalize": bool(settings.normalize),
            "max_length": settings.max_length,
        },
    }


async def reload(request: Request) -> Response:
    """Open the models again, without losing a request. Needs the server's token."""
    if not request.app.state.token:
        raise RequestError(403, "only a server with a token reloads over HTTP; send it SIGHUP")
    return Json({"models": await service_of(request).reload()})


# ---- pages ----


async def page() -> Response:
    return _file("index.html", "text/html")


async def docs() -> Response:
    return _file("docs.html", "text/html")


async def static(name: str) -> Response:
    if name not in _FILES:
        raise RequestError(404, f"/static/{name}: no such file")
    return _file(name, _FILES[name])


def _file(name: str, kind: str) -> Response:
    """A whole file: FileResponse answers a wrong Range in a form of its own."""
    return Response((STATIC / name).read_bytes(), media_type=kind, headers=_PAGE)


# ---- all of them ----


_READ = (400, 401, 421, 500)  # what any answer may be instead
_COMPUTED = (*_READ, 404, 408, 409, 413, 422, 429, 503, 504)


class Route(NamedTuple):
    """A path and the function that answers; without a tag it is not in /openapi.json."""

    method: str
    path: str
    answer: Callable[..., Any]
    tag: str = ""
    model: object = None
    errors: Sequence[int] = _READ
    media: type[Response] = Json


ROUTES = (
    Route("POST", "/predict/{task:path}", predict, "tasks", schemas.Predictions, _COMPUTED),
    Route("POST", "/embed", embed, "vectors", schemas.AnyEmbeddings, _COMPUTED),
    Route("POST", "/fill-mask", fill_mask, "tasks", schemas.FilledTexts, _COMPUTED),
    Route("POST", "/rerank", rerank, "tasks", schemas.AnyRankings, _COMPUTED),
    Route("POST", "/tokenize", tokenize, "tasks", schemas.Tokens, _COMPUTED),
    Route("POST", "/search", search, "vectors", schemas.Hits, _COMPUTED),
    Route("POST", "/index", add, "vectors", schemas.AddedTexts, (*_COMPUTED, 403)),
    Route("DELETE", "/index", delete, "vectors", schemas.DeletedTexts, (*_COMPUTED, 403)),
    Route(
        *("POST", "/v1/embeddings", compatible.openai_embeddings, "OpenAI"),
        *(schemas.OpenAIEmbeddings, _COMPUTED),
    ),
    Route("GET", "/v1/models", compatible.openai_models, "OpenAI", schemas.OpenAIModels),
    *(
        Route(
            *("POST", path, compatible.rerank_documents, "Jina, Cohere"),
            *(schemas.JinaRankings, _COMPUTED),
        )
        for path in ("/v1/rerank", "/v2/rerank")
    ),
    Route("POST", "/predict", compatible.tei_predict, schemas.TEI, schemas.TeiLabels, _COMPUTED),
    Route(
        *("POST", "/embed_sparse", compatible.tei_embed_sparse, schemas.TEI),
        *(schemas.TeiSparseVectors, _COMPUTED),
    ),
    Route("POST", "/", compatible.tei_embed, model=schemas.TeiVectors, errors=_COMPUTED),
    Route("GET", "/health", health, "server", schemas.Status),
    Route("GET", "/ready", ready, "server", schemas.Status, errors=(*_READ, 503)),
    Route("GET", "/metrics", metrics_text, "server", media=PlainTextResponse),
    Route("GET", "/info", info, "server", schemas.Info),
    Route("POST", "/reload", reload, "server", schemas.Reloaded, errors=(*_READ, 403, 409)),
    Route("GET", "/", page),
    Route("GET", "/docs", docs),
    Route("GET", "/static/{name}", static),
)
