"""The application: the routes, the errors in one form, and the gate before them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError

from palm_ds.common.version import __version__
from palm_ds.serve.http import schemas
from palm_ds.serve.http.gate import App, Gate, headers_of
from palm_ds.serve.http.json_body import JsonRoute
from palm_ds.serve.http.routes import ROUTES, Json
from palm_ds.serve.limits import FAILED, RequestError, error_body
from palm_ds.serve.service import Service


def make_app(service: Service, *, token: str = "", allowed_hosts: Collection[str] = ()) -> App:
    """The whole application. `token`: what clients must send; empty: nothing. `allowed_hosts`:
    names of the server in requests, besides addresses and localhost."""
    app = FastAPI(
        title="palm_ds",
        version=__version__,
        description="Texts in, predictions and vectors out. Errors have one form; a request has "
        "`X-Request-ID`, and may say `X-Request-Timeout: SECONDS`.",
        docs_url=None,  # FastAPI's pages load scripts from elsewhere; /docs is our own
        redoc_url=None,
    )
    app.state.service = service
    app.state.token = token
    app.router.routes.extend(_routes().routes)
    app.add_exception_handler(RequestError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _not_read)
    app.add_exception_handler(Exception, _failed)
    for status in (404, 405):
        app.add_exception_handler(status, _not_routed)
    return Gate(app, service, token, allowed_hosts)


@cache
def _routes() -> APIRouter:
    """The same for every application: to read what they take and give takes a tenth of a second."""
    router = APIRouter(route_class=JsonRoute)
    for route in ROUTES:
        router.add_api_route(
            route.path,
            route.answer,
            methods=[route.method],
            response_model=route.model,
            tags=[route.tag] if route.tag else None,
            responses={status: {"model": schemas.ErrorBody} for status in route.errors},
            response_class=route.media,
            include_in_schema=bool(route.tag),
        )
    return router


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    body = error_body(error.status, error.message, request.state.request_id)
    return Json(body, error.status, headers_of(error))


async def _failed(request: Request, error: Exception) -> Response:
    """A bug, or a device that failed: the gate logs it with the request's id."""
    return await _refused(request, RequestError(500, FAILED))


async def _invalid(request: Request, error: Exception) -> Response:
    """A body that lacks something: what and where, in one line."""
    assert isinstance(error, RequestValidationError)
    errors = error.errors()
    places = [_place(each["loc"]) for each in errors]
    place, kind = places[0]
    message = f"{place}: {errors[0]['msg'].removeprefix('Value error, ')}"
    if kind:
        kinds = dict.fromkeys(kind for other, kind in places if other == place and kind)
        message = f"{place}: expected " + " or ".join(_KINDS[each] for each in kinds)
    if isinstance(error.body, bytes):
        message = "the body: send JSON with the header Content-Type: application/json"
    return await _refused(request, RequestError(422, message))


_KINDS = {
    "str": "a text",
    "tuple[str, str]": "a pair of texts",
    "list[str]": "a list of texts",
    "dict[str,any]": "an object",
    "list[list[str]]": "lists of texts",
    "list[int]": "a list of ids",
    "list[list[int]]": "lists of ids",
    "RerankedText": "an object with a `text`",
}
"""Pydantic's names of what a value may be."""


def _place(parts: Sequence[int | str]) -> tuple[str, str]:
    """(the field, which of several kinds of value it was read as, if there are several)."""
    place, kind = "", ""
    for part in parts[1:]:
        if isinstance(part, int) and not kind:
            place += f"[{part}]"
        elif part in schemas.FORMS:
            continue
        elif not place:
            place = str(part)
        elif part in _KINDS:
            kind = kind or str(part)
        elif not kind:
            place += f".{part}"
    return place or "the body", kind


async def _not_read(request: Request, error: Exception) -> Response:
    """A body that cannot be read."""
    assert isinstance(error, HTTPException)
    return await _refused(request, RequestError(error.status_code, str(error.detail)))


async def _not_routed(request: Request, error: Exception) -> Response:
    """A path or method that no route has."""
    status = getattr(error, "status_code", 404)
    allowed = (getattr(error, "headers", None) or {}).get("Allow")
    several = [route.method for route in ROUTES if route.path == request.url.path]
    if allowed and len(several) > 1 and "GET" not in several:
        allowed = ", ".join(several)  # the framework names those of the first route
    if allowed == "GET":
        allowed = "GET, HEAD"  # the gate answers HEAD
    what = f"the method must be {allowed.replace(', ', ' or ')}" if allowed else "no such path"
    message = f"{request.method} {request.url.path}: {what}; /docs lists all"
    body = error_body(status, message, request.state.request_id)
    return Json(body, status, {"allow": allowed} if allowed else {})
