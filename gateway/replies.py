"""Sending an answer: raw ASGI messages, and a watch on the client that cancels the work when it leaves.

Knows nothing of what is sent. No polling: the server reports the disconnect, and that cancels the task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Headers = Iterable[tuple[bytes, bytes]]
CLIENT_GONE = 499
"""The status in the log of a request whose client left before it was answered."""


class Outlet:
    """The way out to one client. One `start`, then writes, then one `end`; or one `whole`."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        # The middleware has its say on the start; body parts need none of it and are many.
        self._send_body: Send = scope.get("candor.send", send)
        self.has_started = False
        self.has_ended = False

    async def start(self, status: int, headers: Headers) -> None:
        """Send the status line and headers."""
        self.has_started = True
        await self._send(
            {"type": "http.response.start", "status": status, "headers": list(headers)}
        )

    async def write(self, data: bytes) -> None:
        """Send a part of the body; waits while the client's socket is full."""
        await self._send_body({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """Send the last part of the body."""
        self.has_ended = True
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a complete response."""
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.end(body)

    def abandon(self) -> None:
        """Drop the connection of a client that does not read."""
        abort = self._scope.get("candor.abort")
        if abort is not None:
            abort()


class Exchange(Response):
    """A response made by a coroutine that is cancelled when the client goes away."""

    def __init__(self, work: Callable[[Outlet], Awaitable[None]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the work against this client. A client that leaves is a normal end."""
        outlet = Outlet(scope, send)
        task = asyncio.current_task()
        assert task is not None
        is_gone = False

        def gone(watch: asyncio.Task[None]) -> None:
            nonlocal is_gone
            if not watch.cancelled() and not outlet.has_ended:
                is_gone = True
                task.cancel()

        watch = asyncio.create_task(_disconnect(receive), name="client watch")
        watch.add_done_callback(gone)
        try:
            await self._work(outlet)
        except asyncio.CancelledError:
            if not is_gone:
                raise
            task.uncancel()
        finally:
            watch.remove_done_callback(gone)
            watch.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
