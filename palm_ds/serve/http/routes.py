"""The routes: HTTP to the service and back."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
from fastapi import Request, Response
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse

from palm_ds.common.version import __version__
from palm_ds.data.tasks.interfaces import as_json
from palm_ds.inference.embedder import EmbeddingSettings
from palm_ds.serve import metrics
from palm_ds.serve.http import schemas
from palm_ds.serve.limits import RequestError
from palm_ds.serve.served_model import ServedModel
from palm_ds.serve.service import Service

STATIC = Path(__file__).resolve().parent.parent / "static"
_FILES = {"app.js": "text/javascript", "docs.js": "text/javascript", "style.css": "text/css"}
_PAGE = {"cache-control": "no-cache"}


class Json(JSONResponse):
    """JSON that takes NumPy arrays; NaN becomes null."""

    def render(self, content: object) -> bytes:
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


def _service(request: Request) -> Service:
    return request.app.state.service


def _deadline(request: Request) -> float:
    """When the client gives up, on the monotonic clock. Raises RequestError."""
    most = _service(request).limits.timeout
    given = request.headers.get("x-request-timeout", "")
    try:
        seconds = float(given) if given else most
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise RequestError(422, f"X-Request-Timeout: {given!r}: expected seconds, such as 2.5")
    return time.monotonic() + min(seconds, most)


# ---- the tasks ----


async def predict(task: str, body: schemas.PredictBody, request: Request) -> Response:
    """Predictions of a task for texts, pairs or rows."""
    model, predictions, cut = await _service(request).predict(
        task, body.inputs, body.model, _deadline(request)
    )
    return Json({"model": model.name, "task": task, "predictions": predictions, "truncated": cut})


async def embed(body: schemas.EmbedBody, request: Request) -> Response:
    """A vector for each text."""

    def settings(model: ServedModel) -> EmbeddingSettings:
        asked = body.model_dump(include={"pooling", "normalize", "prompt"}, exclude_none=True)
        return _settings(model, body.dimensions, **asked)

    model, vectors, tokens, cut = await _service(request).embed(
        body.texts, settings, body.model, _deadline(request)
    )
    return Json({"model": model.name, "embeddings": vectors, "tokens": tokens, "truncated": cut})


def _settings(model: ServedModel, dimensions: int | None, **changes: Any) -> EmbeddingSettings:
    """A model's settings with those of a request. Raises RequestError."""
    size, pooling = model.embedder.encoder.hidden_size, changes.get("pooling")
    if dimensions and dimensions > size:
        raise RequestError(422, f"dimensions: {dimensions}: vectors of {model.name} have {size}")
    if pooling and pooling not in model.poolings:
        raise RequestError(422, f"pooling: {model.name} has no trained pooler")
    changed = {"dimensions": dimensions} if dimensions else {}
    return replace(model.embedder.settings, **changes, **changed)


async def fill_mask(body: schemas.FillMaskBody, request: Request) -> Response:
    """The most probable tokens for every [MASK]."""
    model, guesses = await _service(request).fill(
        body.texts, body.top, body.model, _deadline(request)
    )
    return Json({"model": model.name, "results": guesses})


async def rerank(body: schemas.RerankBody, request: Request) -> Response:
    """Documents by how well they match a query."""
    service, deadline = _service(request), _deadline(request)
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
    model, tokens = await _service(request).tokenize(body.texts, body.model, _deadline(request))
    return Json({"model": model.name, "results": tokens})


async def search(body: schemas.SearchBody, request: Request) -> Response:
    """The texts of the index that are nearest to a query."""
    model, hits = await _service(request).search(body.query, body.top, _deadline(request))
    return Json({"model": model.name, "results": hits})


# ---- OpenAI's form ----


async def openai_embeddings(body: schemas.OpenAIBody, request: Request) -> Response:
    """Vectors in the form of OpenAI's embeddings."""
    model, vectors, tokens, _ = await _service(request).embed(
        _openai_inputs(body.input),
        lambda model: _settings(model, body.dimensions),
        body.model,
        _deadline(request),
        "input",
    )
    if body.encoding_format == "base64":
        listed: Sequence[Any] = [
            base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors
        ]
    else:
        listed = list(vectors)
    data = [{"object": "embedding", "index": n, "embedding": each} for n, each in enumerate(listed)]
    usage = {"prompt_tokens": sum(tokens), "total_tokens": sum(tokens)}
    return Json({"object": "list", "data": data, "model": model.name, "usage": usage})


def _openai_inputs(given: str | Sequence[Any]) -> Sequence[Any]:
    """Texts, or lists of ids; one alone becomes a list."""
    alone = isinstance(given, str) or (len(given) > 0 and isinstance(given[0], int))
    return [given] if alone else given


async def openai_models(request: Request) -> Response:
    """The models' names in OpenAI's form."""
    names = _service(request).models.models
    data = [{"id": name, "object": "model", "created": 0, "owned_by": "palm_ds"} for name in names]
    return Json({"object": "list", "data": data})


# ---- the server ----


async def health() -> Response:
    """The process answers."""
    return Json({"status": "ok"})


async def ready(request: Request) -> Response:
    """Whether requests are accepted; 503 while the server stops."""
    if _service(request).draining:
        raise RequestError(503, "this server is stopping", retry_after=1)
    return Json({"status": "ready"})


async def metrics_text(request: Request) -> Response:
    """Prometheus metrics."""
    return PlainTextResponse(_service(request).metrics.text(), media_type=metrics.CONTENT_TYPE)


async def info(request: Request) -> Response:
    """The models and what they can do."""
    opened = _service(request).models
    listed = [_about(model) for model in opened.models.values()]
    rows = len(opened.index.texts) if opened.index else 0
    return Json({"version": __version__, "models": listed, "search": {"texts": rows}})


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
    return Json({"models": await _service(request).reload()})


# ---- pages ----


async def page() -> Response:
    return FileResponse(STATIC / "index.html", headers=_PAGE)


async def docs() -> Response:
    return FileResponse(STATIC / "docs.html", headers=_PAGE)


async def static(name: str) -> Response:
    if name not in _FILES:
        raise RequestError(404, f"/static/{name}: no such file")
    return FileResponse(STATIC / name, media_type=_FILES[name], headers=_PAGE)


# ---- all of them ----


_READ = (400, 401, 421, 500)  # what any answer may be instead
_COMPUTED = (*_READ, 404, 408, 409, 413, 422, 429, 503, 504)


class Route(NamedTuple):
    """A path and the function that answers; without a tag it is a page, not part of the API."""

    method: str
    path: str
    answer: Callable[..., Any]
    tag: str = ""
    model: type | None = None
    errors: Sequence[int] = _READ
    media: type[Response] = Json


ROUTES = (
    Route("POST", "/predict/{task:path}", predict, "tasks", schemas.Predictions, _COMPUTED),
    Route("POST", "/embed", embed, "vectors", schemas.Embeddings, _COMPUTED),
    Route("POST", "/fill-mask", fill_mask, "tasks", schemas.FilledTexts, _COMPUTED),
    Route("POST", "/rerank", rerank, "tasks", schemas.Rankings, _COMPUTED),
    Route("POST", "/tokenize", tokenize, "tasks", schemas.Tokens, _COMPUTED),
    Route("POST", "/search", search, "vectors", schemas.Hits, _COMPUTED),
    Route(
        "POST", "/v1/embeddings", openai_embeddings, "OpenAI", schemas.OpenAIEmbeddings, _COMPUTED
    ),
    Route("GET", "/v1/models", openai_models, "OpenAI", schemas.OpenAIModels),
    Route("GET", "/health", health, "server", schemas.Status),
    Route("GET", "/ready", ready, "server", schemas.Status, errors=(*_READ, 503)),
    Route("GET", "/metrics", metrics_text, "server", media=PlainTextResponse),
    Route("GET", "/info", info, "server", schemas.Info),
    Route("POST", "/reload", reload, "server", schemas.Reloaded, errors=(*_READ, 403, 409)),
    Route("GET", "/", page),
    Route("GET", "/docs", docs),
    Route("GET", "/static/{name}", static),
)
