"""Sorted lines of waiting requests: the part of the queue that only knows how to keep order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from scheduler.core.ledger import Account
from scheduler.core.record import Record
from scheduler.core.types import Feature

_COMPACT_AFTER = 64


class Line:
    """A sorted list with a moving start: push at the end and pop at the front are O(1), the rest one bisect.

    Items are (*record.key, record); a shorter tuple sorts before its extensions, so that the key finds its
    item. The key must not change while the record is here.
    """

    __slots__ = ("_items", "_start")

    def __init__(self) -> None:
        self._items: list[tuple[int, float, int, Record]] = []
        self._start = 0

    def __len__(self) -> int:
        return len(self._items) - self._start

    def __iter__(self) -> Iterator[Record]:
        return self.first(len(self))

    def first(self, count: int) -> Iterator[Record]:
        """The first so many."""
        return iter([item[3] for item in self._items[self._start : self._start + count]])

    def head(self) -> Record:
        """The first one."""
        return self._items[self._start][3]

    def push(self, record: Record) -> None:
        """Put in its place."""
        insort(self._items, (*record.key, record), lo=self._start)

    def remove(self, record: Record) -> None:
        """Take out."""
        index = bisect_left(self._items, record.key, lo=self._start)
        assert self._items[index][3] is record
        if index != self._start:
            del self._items[index]
            return
        # What lies before the start is dead weight until the next compaction.
        self._start += 1
        if self._start > _COMPACT_AFTER and self._start * 2 > len(self._items):
            del self._items[: self._start]
            self._start = 0

    def num_before(self, key: tuple[int, float, int]) -> int:
        """How many come before that place."""
        return bisect_left(self._items, key, lo=self._start) - self._start


class TenantLines:
    """What one tenant has waiting on one level: a line per set of needed features."""

    __slots__ = ("account", "lines", "num")

    def __init__(self, account: Account) -> None:
        self.account = account
        self.lines: dict[frozenset[Feature], Line] = {}
        self.num = 0

    def push(self, record: Record) -> None:
        """Put in its place."""
        self.lines.setdefault(record.needs, Line()).push(record)
        self.num += 1

    def remove(self, record: Record) -> None:
        """Take out."""
        line = self.lines[record.needs]
        line.remove(record)
        if not len(line):
            del self.lines[record.needs]
        self.num -= 1

    def num_before(self, key: tuple[int, float, int]) -> int:
        """How many of them come before that place."""
        return sum(line.num_before(key) for line in self.lines.values())
