"""Who waits, in which order: first come first served within a priority class, bounded by the caller.

Requests wait in lines, one per (model, features needed), so that what only some workers can do does not hold
up what all can; the head of a model is the earliest over its lines. Knows nothing about workers or time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from scheduler.core.record import Record
from scheduler.core.types import Feature

_COMPACT_AFTER = 64


class _Line:
    """A sorted list with a moving start: push at the end and pop at the front are O(1), the rest one bisect.

    Items are (priority, arrival number, record); a shorter tuple sorts before its extensions, so that
    `record.order` finds its item.
    """

    __slots__ = ("_items", "_start")

    def __init__(self) -> None:
        self._items: list[tuple[int, int, Record]] = []
        self._start = 0

    def __len__(self) -> int:
        return len(self._items) - self._start

    def __iter__(self) -> Iterator[Record]:
        return (item[2] for item in self._items[self._start :])

    def head(self) -> Record:
        return self._items[self._start][2]

    def push(self, record: Record) -> None:
        insort(self._items, (*record.order, record), lo=self._start)

    def remove(self, record: Record) -> None:
        index = bisect_left(self._items, record.order, lo=self._start)
        assert self._items[index][2] is record
        if index != self._start:
            del self._items[index]
            return
        # The gap before the start keeps sorting below everything behind it; it must not keep the record alive.
        self._start += 1
        if self._start > _COMPACT_AFTER and self._start * 2 > len(self._items):
            del self._items[: self._start]
            self._start = 0

    def num_before(self, order: tuple[int, int]) -> int:
        return bisect_left(self._items, order, lo=self._start) - self._start


class RequestQueue:
    """Everything that waits. Counts requests and prompt tokens; refusing is the business of admission."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self._lines: dict[str, dict[frozenset[Feature], _Line]] = {}

    def push(self, record: Record) -> None:
        """Put in its place by `record.order`; O(1) for a newcomer of the last priority class."""
        lines = self._lines.setdefault(record.model, {})
        lines.setdefault(record.needs, _Line()).push(record)
        self.num_requests += 1
        self.num_tokens += record.request.num_prompt_tokens

    def remove(self, record: Record) -> None:
        """Take out from any place: one binary search."""
        lines = self._lines[record.model]
        line = lines[record.needs]
        line.remove(record)
        if not len(line):
            del lines[record.needs]
            if not lines:
                del self._lines[record.model]
        self.num_requests -= 1
        self.num_tokens -= record.request.num_prompt_tokens

    def heads(self, model: str) -> list[Record]:
        """The first of each of the model's lines, earliest first."""
        lines = self._lines.get(model)
        if not lines:
            return []
        if len(lines) == 1:
            return [line.head() for line in lines.values()]
        return sorted((line.head() for line in lines.values()), key=lambda record: record.order)

    def position(self, record: Record) -> int:
        """1 is next among those that wait for the same model."""
        return self.num_before(record.model, record.order) + 1

    def num_before(self, model: str, order: tuple[int, int]) -> int:
        """How many of the model's requests come before that place."""
        return sum(line.num_before(order) for line in self._lines.get(model, {}).values())

    def waiting(self, model: str) -> list[Record]:
        """All that wait for the model, in order."""
        lines = self._lines.get(model, {}).values()
        return sorted((record for line in lines for record in line), key=lambda r: r.order)

    def models(self) -> list[str]:
        """Models that somebody waits for."""
        return list(self._lines)
