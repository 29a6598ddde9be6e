"""Who may come in, and how much they may bring: API keys, header and body sizes.

Keys are compared in constant time. Sizes are checked before anything is kept, so a client cannot make the
process hold more than the settings allow.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Iterable
from typing import Any

from starlette.types import Receive
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from candor import errors

_HEADERS_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%s"
)


class BodyTooLarge(errors.InvalidArgument):
    """The request body is above the limit."""

    http_status, default_reason = 413, "BODY_TOO_LARGE"


class BodyStopped(errors.InvalidArgument):
    """The client did not send the rest of its body: its own slowness, not ours."""

    http_status, default_reason = 408, "BODY_STOPPED"


class ApiKeys:
    """The keys that open /v1. Without any, everything is open."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._credentials = [b"Bearer " + key.encode() for key in keys]

    def admits(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether the Authorization header is, to the character, `Bearer ` and one of the keys."""
        if not self._credentials:
            return True
        given = next((value for name, value in headers if name == b"authorization"), b"")
        # Every key is compared, so that the time tells nothing about which one came close.
        return sum([hmac.compare_digest(given, known) for known in self._credentials]) > 0


async def read_body(
    receive: Receive, headers: Iterable[tuple[bytes, bytes]], *, limit: int, timeout_s: float
) -> bytes:
    """The whole body. Raises BodyTooLarge, BodyStopped, Cancelled when the client leaves."""
    declared = next((value for name, value in headers if name == b"content-length"), b"")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                message = await receive()
        except TimeoutError:
            raise BodyStopped(
                f"the request body stopped for {timeout_s:g} s, which is the limit"
            ) from None
        if message["type"] == "http.disconnect":
            raise errors.Cancelled("the client left while sending its request")
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request body is larger than the limit of {limit} bytes")


def bounded_protocol(
    max_header_bytes: int, head_timeout_s: float, refusal: bytes
) -> type[HttpToolsProtocol]:
    """uvicorn's HTTP protocol with bounds on what comes before the body, in bytes and in time.

    The parser itself would collect an endless header line, for ever. `refusal` is the JSON body of the 431.
    The application also gets `scope["candor.abort"]`, which drops the connection of a client that does not
    read.
    """

    class Bounded(HttpToolsProtocol):
        _head_bytes = 0
        _num_begun = 0
        _part = "idle"  # what the next byte belongs to: idle, head, body
        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._head_has_come()
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._part, self._head_bytes = "head", 0
            self._expect_head()
            self._num_begun += 1
            abort: Callable[[], Any] = self.transport.abort
            self.scope["candor.abort"] = abort  # type: ignore[typeddict-unknown-key]

        def on_headers_complete(self) -> None:
            self._part = "body"
            self._head_has_come()
            size = len(self.url) + sum(len(n) + len(v) for n, v in self.headers)
            if size > max_header_bytes:
                self._refuse()
                return
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._part = "idle"
            if not self.transport.is_closing():
                super().on_message_complete()

        def on_body(self, body: bytes) -> None:
            if not self.transport.is_closing():
                super().on_body(body)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            part, num_begun = self._part, self._num_begun
            super().data_received(data)
            if self._part != "head" or self.transport.is_closing():
                return
            # What ended an earlier message in the same read is not counted, only what is surely head.
            if part == "head" or (part == "idle" and self._num_begun == num_begun + 1):
                self._head_bytes += len(data)
            if self._head_bytes > max_header_bytes:
                self._refuse()

        def _expect_head(self) -> None:
            self._head_has_come()
            self._head_timer = self.loop.call_later(head_timeout_s, self.transport.abort)

        def _head_has_come(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _refuse(self) -> None:
            self.transport.write(_HEADERS_TOO_LARGE % (len(refusal), refusal))
            self.transport.close()

    return Bounded
