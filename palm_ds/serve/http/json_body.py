"""Reads the body of a request as JSON, and refuses what Python's parser would let pass or fail on.

{"texts": ["a"], "texts": ["b"]}     one of the two would be lost
[NaN, Infinity]                      no JSON
[[[[[...                             deeper than the parser's stack
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute

_MAX_KEY_LENGTH = 40  # characters of a key in a message


class JsonRoute(APIRoute):
    """A route whose body is read by `parsed`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await answer(_JsonRequest(request.scope, request.receive))

        return handler


class _JsonRequest(Request):
    async def json(self) -> Any:
        return parsed(await self.body())


def parsed(body: bytes) -> Any:
    """The value of a body. Raises HTTPException, 422."""
    try:
        return json.loads(body, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        _refuse(f"{error.msg} at character {error.pos + 1}")
    except UnicodeDecodeError as error:
        _refuse(f"byte {error.start + 1} is not UTF-8")
    except RecursionError:
        _refuse("nested too deeply")
    except ValueError:
        _refuse("a number has too many digits")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        _refuse(f"key {twice[:_MAX_KEY_LENGTH]!r} is given twice")
    return body


def _no_constant(name: str) -> NoReturn:
    _refuse(f"{name} is not a number")


def _refuse(why: str) -> NoReturn:
    raise HTTPException(422, f"the body: not JSON: {why}") from None
