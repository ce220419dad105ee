"""Limits on what a server accepts, and the errors that its clients get."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import PositiveFloat, PositiveInt

from palm_ds.common.errors import UserError
from palm_ds.common.settings import Settings


@dataclass(frozen=True, kw_only=True)
class ServingLimits(Settings, option="--"):
    """Bounds on requests. More of anything is refused with a status of its own."""

    max_texts: PositiveInt = 256
    """Texts (rows, candidates) in a request. More: 413."""
    max_characters: PositiveInt = 100_000
    """Characters in a text. More: 413. The model itself reads its first tokens only."""
    max_bytes: PositiveInt = 4 << 20
    """Bytes in the body of a request. More: 413."""
    max_numbers: PositiveInt = 4 << 20
    """Numbers in all vectors of a response. More: 413."""
    max_queue: PositiveInt = 1024
    """Texts of all clients, queued or in work. More: 429, unless a request is alone."""
    timeout: PositiveFloat = 60.0
    """Seconds to answer a request, unless its client asks for less. Then: 504."""
    read_timeout: PositiveFloat = 15.0
    """Seconds for a client to send its request. Then: 408."""
    drain_timeout: PositiveFloat = 30.0
    """Seconds to finish accepted requests after SIGTERM."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_texts > self.max_queue:
            raise UserError(
                f"--max_texts: {self.max_texts} do not fit into a queue of {self.max_queue} texts "
                "(--max_queue)"
            )


class RequestError(Exception):
    """A request that is refused: an HTTP status and one line that says why."""

    def __init__(self, status: int, message: str, *, retry_after: int = 0) -> None:
        """`retry_after`: seconds after which to try again; 0: trying again does not help."""
        super().__init__(message)
        self.status, self.message, self.retry_after = status, message, retry_after


TYPES = {
    400: "bad_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    409: "conflict",
    413: "too_large",
    421: "misdirected_request",
    422: "invalid_request",
    429: "overloaded",
    431: "headers_too_large",
    500: "internal_error",
    503: "unavailable",
    504: "deadline_exceeded",
}
"""{status: name} of every error that a client can get."""


_MAX_LENGTH = 500  # characters of a message, which may quote the request
FAILED = "an error in the server; its log has the request's id"
"""What a client learns of a bug."""


def error_body(status: int, message: str, request_id: str) -> dict[str, dict[str, object]]:
    """The body of every error, in the form of OpenAI's."""
    kind = TYPES.get(status, "error")
    message = message if len(message) <= _MAX_LENGTH else f"{message[:_MAX_LENGTH]}..."
    return {"error": {"type": kind, "code": status, "message": message, "request_id": request_id}}
