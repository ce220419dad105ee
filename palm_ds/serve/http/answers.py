"""Parts of every answer: its JSON, and the service, deadline and settings of its request."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
from fastapi import Request
from fastapi.responses import JSONResponse

from palm_ds.common.errors import UserError
from palm_ds.inference.embedder import EmbeddingSettings
from palm_ds.serve.limits import RequestError
from palm_ds.serve.served_model import ServedModel
from palm_ds.serve.service import Service


class Json(JSONResponse):
    """JSON that takes NumPy arrays; NaN becomes null."""

    def render(self, content: object) -> bytes:
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


def service_of(request: Request) -> Service:
    return request.app.state.service


def deadline_of(request: Request) -> float:
    """When the client gives up, on the monotonic clock. Raises RequestError."""
    most = service_of(request).limits.timeout
    given = request.headers.get("x-request-timeout", "")
    try:
        seconds = float(given) if given else most
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise RequestError(422, f"X-Request-Timeout: {given!r}: expected seconds, such as 2.5")
    return time.monotonic() + min(seconds, most)


def in_base64(vectors: np.ndarray) -> str:
    """The numbers of vectors as float32, little-endian, one vector after another."""
    return base64.b64encode(np.ascontiguousarray(vectors, "<f4").tobytes()).decode()


def settings_of(model: ServedModel, dimensions: int | None, **changes: Any) -> EmbeddingSettings:
    """A model's settings with those of a request. Raises RequestError."""
    size, pooling = model.embedder.encoder.hidden_size, changes.get("pooling")
    if dimensions and dimensions > size:
        raise RequestError(422, f"dimensions: {dimensions}: vectors of {model.name} have {size}")
    if pooling and pooling not in model.poolings:
        raise RequestError(422, f"pooling: {model.name} has no trained pooler")
    changed = {"dimensions": dimensions} if dimensions else {}
    changed |= {"pooling": pooling} if changes.get("tokens") else {}
    changed |= {"dimensions": 0} if changes.get("concat") and not dimensions else {}
    try:
        _check_layers(model, changes.get("layers", ()))
        return replace(model.embedder.settings, **{**changes, **changed})
    except UserError as error:
        raise RequestError(422, str(error)) from None


def _check_layers(model: ServedModel, layers: Sequence[int]) -> None:
    """Raises UserError for layers that a model does not have."""
    count = model.embedder.encoder.config.num_layers
    for number in layers:
        if not -count - 1 <= number <= count:
            raise UserError(f"layers: {number}: {model.name} has {count}; 0 are the embeddings")
