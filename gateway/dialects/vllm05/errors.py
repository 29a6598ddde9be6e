"""How this dialect says that something went wrong.

One flat object for every error body; inside a stream the same object under `error`. Knows the mapping from
`candor.errors` to its type names, and nothing of HTTP servers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import orjson

from candor.errors import CandorError

BAD_REQUEST = "BadRequestError"
NOT_FOUND = "NotFoundError"

# The original knows the first two names only; the rest are ours, named after what official clients raise.
TYPES: Mapping[int, str] = {
    400: BAD_REQUEST,
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: NOT_FOUND,
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "PayloadTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    431: "HeadersTooLargeError",
    499: "ClientClosedRequestError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}
"""HTTP status → `type`."""

UNAUTHORIZED = b'{"error":"Unauthorized"}'
"""The body of a 401, which is no error object in this dialect."""

_INTERNAL_MESSAGE = "Internal server error"
_UNAVAILABLE_MESSAGE = "Service temporarily unavailable"
_ADDRESS = re.compile(r"\b(ipv4|ipv6|unix|dns):|\berrno\b|:\d{2,5}\b", re.IGNORECASE)
"""Shows that a text was written by a transport for its operator, not by us for a client."""

ERROR_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "object": {"const": "error"},
        "message": {"type": "string"},
        "type": {"enum": [*TYPES.values()]},
        "param": {"type": "null"},
        "code": {"type": "integer"},
    },
    "required": ["object", "message", "type", "param", "code"],
    "additionalProperties": False,
}
"""The error object as JSON schema."""


class DialectError(Exception):
    """An error in this dialect's own words."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str | None = None,
        field: str | None = None,
        in_band: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type or TYPES.get(status) or TYPES[500 if status >= 500 else 400]
        self.field = field
        """The request field at fault. `param` stays null on the wire; this is for logs and tests."""
        self.in_band = in_band
        """Found by what the original calls its engine: told inside the stream when one was asked for."""
        self.retry_after_s = retry_after_s

    def as_json(self) -> dict[str, Any]:
        """The error object."""
        return {
            "object": "error",
            "message": self.message,
            "type": self.type,
            "param": None,
            "code": self.status,
        }

    def body(self) -> bytes:
        """The response body."""
        return UNAUTHORIZED if self.status == 401 else orjson.dumps(self.as_json())

    def stream_event(self) -> bytes:
        """The event that tells it inside a stream, in the spelling of Python's json module."""
        return b"data: " + json.dumps({"error": self.as_json()}).encode("ascii") + b"\n\n"


def from_candor(error: CandorError) -> DialectError:
    """The same outcome in this dialect. A fault of ours keeps its details to itself."""
    status = error.http_status
    message = error.message
    if status == 500:
        message = _INTERNAL_MESSAGE
    elif status > 500 and _ADDRESS.search(message):
        message = _UNAVAILABLE_MESSAGE
    return DialectError(
        message, status=status, field=error.field, retry_after_s=error.retry_after_s
    )


def model_not_found(name: str) -> DialectError:
    """Nobody serves a model of this name."""
    return DialectError(f"The model `{name}` does not exist.", status=404, field="model")


def embedding_disabled() -> DialectError:
    """No embedding model is served; said before the model's name is looked at."""
    return DialectError("Embedding API disabled")
