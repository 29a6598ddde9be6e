"""When to look again: one instant per owner, soonest first. Knows no clock."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Timers(Generic[K]):
    """A heap with lazy deletion, rebuilt when most of it is stale: it stays as small as its owners."""

    def __init__(self) -> None:
        self._at: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._count = 0

    def set(self, owner: K, at: float) -> None:
        """Wake `owner` at that instant, instead of any earlier arrangement."""
        self._count += 1
        self._at[owner] = (at, self._count)
        heapq.heappush(self._heap, (at, self._count, owner))
        if len(self._heap) > 2 * len(self._at) + 64:
            self._heap = [(at, n, owner) for owner, (at, n) in self._at.items()]
            heapq.heapify(self._heap)

    def clear(self, owner: K) -> None:
        """Never wake it."""
        self._at.pop(owner, None)

    def next_at(self) -> float | None:
        """The soonest instant."""
        while self._heap:
            at, count, owner = self._heap[0]
            if self._at.get(owner) == (at, count):
                return at
            heapq.heappop(self._heap)
        return None

    def pop_due(self, now: float) -> list[K]:
        """Owners whose instant has come; each must be set again to be woken again."""
        due = []
        while (at := self.next_at()) is not None and at <= now:
            owner = heapq.heappop(self._heap)[2]
            del self._at[owner]
            due.append(owner)
        return due
