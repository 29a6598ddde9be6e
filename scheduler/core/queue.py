"""Who waits, and who of them is next: priority levels outside, an order policy inside each.

Requests wait in lines, one per (model, level, tenant, features needed), so that what only some workers can do
does not hold up what all can. Knows nothing about workers or bounds; time comes with the question.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from itertools import islice

from scheduler.core.ledger import Ledger
from scheduler.core.line import TenantLines
from scheduler.core.order import OrderRow, Turn
from scheduler.core.record import Record
from scheduler.core.types import Feature

_TENANTS_COUNTED = 64
"""Tenants looked at for an estimate of a position; the rest is taken to be like them."""


class _Level:
    """All of one urgency."""

    def __init__(self, row: OrderRow, ledger: Ledger) -> None:
        self.picker = row.make(ledger)
        self.tenants: dict[str, TenantLines] = {}
        self.num = 0


class _ModelQueue:
    """All that wait for one model."""

    def __init__(self, row: OrderRow, ledger: Ledger) -> None:
        self.row = row
        self.ledger = ledger
        self.levels: dict[tuple[int, int], _Level] = {}
        self.urgency: list[tuple[int, int]] = []
        """Keys of the levels, the most urgent first."""
        self.needs: dict[frozenset[Feature], int] = {}
        """How many wait with these needs."""

    def group(self, record: Record) -> str:
        return record.account.tenant if self.row.is_fair else ""

    def push(self, record: Record) -> None:
        level = self.levels.get(record.level)
        if level is None:
            level = self.levels[record.level] = _Level(self.row, self.ledger)
            insort(self.urgency, record.level)
        group = self.group(record)
        tenant = level.tenants.get(group)
        self.ledger.queued(record.account)
        if tenant is None:
            tenant = level.tenants[group] = TenantLines(record.account)
            level.picker.add(record.account)
        tenant.push(record)
        level.num += 1
        self.needs[record.needs] = self.needs.get(record.needs, 0) + 1

    def remove(self, record: Record) -> None:
        level = self.levels[record.level]
        tenant = level.tenants[self.group(record)]
        tenant.remove(record)
        level.num -= 1
        if not tenant.num:
            del level.tenants[self.group(record)]
            level.picker.remove(tenant.account)
        if not level.num:
            del self.levels[record.level]
            del self.urgency[bisect_left(self.urgency, record.level)]
        self.ledger.unqueued(record.account)
        left = self.needs[record.needs] - 1
        if left:
            self.needs[record.needs] = left
        else:
            del self.needs[record.needs]

    def __iter__(self) -> Iterator[Record]:
        for level in self.levels.values():
            for tenant in level.tenants.values():
                for line in tenant.lines.values():
                    yield from line


class RequestQueue:
    """Everything that waits. Counts requests and prompt tokens; refusing is the business of admission."""

    def __init__(self, row: OrderRow, ledger_of: Callable[[str], Ledger]) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self._row = row
        self._ledger_of = ledger_of
        self._models: dict[str, _ModelQueue] = {}

    @property
    def is_fair(self) -> bool:
        """Whether tenants are kept apart, and due times looked at."""
        return self._row.is_fair

    def push(self, record: Record) -> None:
        """Put in its place: its level, its tenant's lines, its key."""
        queue = self._models.get(record.model)
        if queue is None:
            ledger = self._ledger_of(record.model)
            queue = self._models[record.model] = _ModelQueue(self._row, ledger)
        queue.push(record)
        self.num_requests += 1
        self.num_tokens += record.request.num_prompt_tokens

    def remove(self, record: Record) -> None:
        """Take out from any place: a few look-ups and one binary search."""
        queue = self._models[record.model]
        queue.remove(record)
        if not queue.levels:
            del self._models[record.model]
        self.num_requests -= 1
        self.num_tokens -= record.request.num_prompt_tokens

    def promote(self, record: Record) -> None:
        """It has waited long: before all younger ones of its tenant, and one level up if there is one."""
        self.remove(record)
        queue = self._models.get(record.model)
        if queue is not None:
            above = queue.urgency[: bisect_left(queue.urgency, record.level)]
            record.level = next((key for key in reversed(above) if key[1]), record.level)
        record.is_aged = True
        self.push(record)

    def needs(self, model: str) -> Mapping[frozenset[Feature], int]:
        """The sets of features that those who wait need, with how many need each."""
        queue = self._models.get(model)
        return {} if queue is None else queue.needs

    def pick(self, model: str, turn: Turn) -> Record | None:
        """The next one that can be served; it stays until it is removed."""
        queue = self._models[model]
        for key in queue.urgency:
            level = queue.levels[key]
            record = level.picker.pick(level.tenants, turn)
            if record is not None:
                return record
        return None

    def position(self, record: Record) -> int:
        """1 is next among those that wait for the same model; an estimate where tenants take turns.

        Works for a record that is not here yet, too.
        """
        queue = self._models.get(record.model)
        if queue is None:
            return 1
        above = bisect_left(queue.urgency, record.level)
        ahead = sum(queue.levels[key].num for key in queue.urgency[:above])
        level = queue.levels.get(record.level)
        if level is None:
            return ahead + 1
        mine = level.tenants.get(queue.group(record))
        own = mine.num_before(record.key) if mine is not None else 0
        others = 0
        seen = 0
        for tenant in islice(level.tenants.values(), _TENANTS_COUNTED):
            if tenant is not mine:
                # Taking turns, each of them is served about as often as this one until it is its turn.
                others += min(tenant.num, own + 1)
                seen += 1
        unseen = len(level.tenants) - seen - (mine is not None)
        if seen and unseen > 0:
            others += others * unseen // seen
        return ahead + own + others + 1

    def waiting(self, model: str) -> list[Record]:
        """All that wait for the model, in the order of arrival within their priority."""
        queue = self._models.get(model)
        return [] if queue is None else sorted(queue, key=lambda record: record.order)

    def models(self) -> list[str]:
        """Models that somebody waits for."""
        return list(self._models)
