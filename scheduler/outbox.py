"""What waits to be sent to one client: a bounded list that its stream empties at its own pace.

Knows nothing about where events come from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from candor import errors
from candor.v1 import inference_pb2
from scheduler.core.record import Record


class Outbox:
    """Events of one client's stream. A client that lets more than `limit` pile up is cut off."""

    def __init__(self, limit: int, hang_up: Callable[[errors.CandorError], None]) -> None:
        """`hang_up` ends the stream from outside, whatever its sender is waiting for."""
        self.events: list[inference_pb2.GenerateEvent] = []
        """Appended to by the relay; call `flush` afterwards."""
        self.live: dict[int, Record] = {}
        """Requests of this client that have not ended, by its handle."""
        self.error: errors.CandorError | None = None
        self._limit = limit
        self._wake = asyncio.Event()
        self._is_closed = False
        self.is_cut_off = False
        self._hang_up = hang_up

    def flush(self) -> bool:
        """Wake the sender. False when the client is too far behind."""
        self._wake.set()
        return len(self.events) <= self._limit

    async def take(self) -> list[inference_pb2.GenerateEvent]:
        """All that is there, at least one event; an empty list means the end. Raises what ended it."""
        while not self.events and not self._is_closed:
            self._wake.clear()
            await self._wake.wait()
        if self.is_cut_off:
            # The stream is being ended from outside; a second ending from here would collide with it.
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        events, self.events = self.events, []
        return events

    def close(self, error: errors.CandorError | None = None) -> None:
        """Nothing more will come; with an error, what is still there is dropped."""
        if not self._is_closed:
            self._is_closed = True
            self.error = error
            self._wake.set()

    def cut_off(self, error: errors.CandorError) -> None:
        """End a stream whose client does not read: its sender may hang in the transport."""
        self.is_cut_off = True
        self.close()
        self.events.clear()
        self._hang_up(error)
