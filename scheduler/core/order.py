"""Whose turn it is among tenants that wait: order policies as plug-ins, one row each in `ORDERS`.

A policy sees one level of one model's queue: tenants with their lines, all of the same priority. It reads the
ledger and never a worker's state; which lines may move and what is cached for them comes with the question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from scheduler.core.ledger import Account, LeastFirst, Ledger
from scheduler.core.line import Line, TenantLines
from scheduler.core.prefixes import PrefixIndex
from scheduler.core.record import Record
from scheduler.core.types import Feature

MAX_TENANTS_SEEN = 4
"""Tenants within their deficit that one decision compares."""
LOOKAHEAD = 48
"""Waiting requests whose cached prefix one decision looks up, over all those tenants."""
AGED_EVERY = 4
"""Of so many picks, one is for the sake of age alone: nobody starves, and a queue in which everybody is old
still profits from its cached prefixes."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The question: who of these is next?"""

    now: float
    able: Mapping[frozenset[Feature], int]
    """Needs that a worker with room can serve, with those workers as a mask. What is not here cannot move."""
    prefixes: PrefixIndex

    def lines(self, tenant: TenantLines) -> list[tuple[Line, int]]:
        """The tenant's lines that can move."""
        able = self.able
        return [(line, able[needs]) for needs, line in tenant.lines.items() if needs in able]

    def head(self, tenant: TenantLines) -> Record | None:
        """The tenant's first request that can be served."""
        lines = self.lines(tenant)
        if not lines:
            return None
        return min((line.head() for line, _ in lines), key=lambda record: record.key)


class Picker(Protocol):
    """The order of one level. `groups` says what it keeps apart: tenants, or nothing."""

    def add(self, account: Account) -> None:
        """The tenant has something waiting here now."""
        ...

    def remove(self, account: Account) -> None:
        """It has nothing any more."""
        ...

    def pick(self, tenants: Mapping[str, TenantLines], turn: Turn) -> Record | None:
        """The next one; None when no line can move."""
        ...


class Fcfs:
    """First come first served: tenants and due times are not looked at."""

    def __init__(self, ledger: Ledger) -> None:
        pass

    def add(self, account: Account) -> None:
        """See `Picker`."""

    def remove(self, account: Account) -> None:
        """See `Picker`."""

    def pick(self, tenants: Mapping[str, TenantLines], turn: Turn) -> Record | None:
        """See `Picker`. All wait in one tenant's lines."""
        heads = (head for lines in tenants.values() if (head := turn.head(lines)) is not None)
        return min(heads, key=lambda record: record.key, default=None)


class Vtc:
    """Virtual token counter: the tenant that was served least, its earliest due request first."""

    def __init__(self, ledger: Ledger) -> None:
        self._least = LeastFirst()

    def add(self, account: Account) -> None:
        """See `Picker`."""
        self._least.add(account)

    def remove(self, account: Account) -> None:
        """See `Picker`."""
        self._least.remove(account)

    def pick(self, tenants: Mapping[str, TenantLines], turn: Turn) -> Record | None:
        """See `Picker`."""
        account = self._least.first_where(lambda a: bool(turn.lines(tenants[a.tenant])))
        return None if account is None else turn.head(tenants[account.tenant])


class DeficitPrefix:
    """Tenants within their deficit are equals: among them what is overdue or due soon, then the longest prefix.

    A tenant that has used up its deficit waits for the next round, which begins when nobody that waits has
    any left. Equal prefixes: the tenant with the most left.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._left: dict[str, Account] = {}
        """Tenants that had some deficit when last looked at, the longest not picked first."""
        self._spent: dict[str, Account] = {}
        self._round = ledger.rounds
        self._since_aged = AGED_EVERY

    def add(self, account: Account) -> None:
        """See `Picker`."""
        self._left[account.tenant] = account

    def remove(self, account: Account) -> None:
        """See `Picker`."""
        if account.tenant in self._left:
            del self._left[account.tenant]
        else:
            del self._spent[account.tenant]

    def pick(self, tenants: Mapping[str, TenantLines], turn: Turn) -> Record | None:
        """See `Picker`."""
        eligible = self._eligible(tenants, turn)
        if not eligible:
            return None
        lines = [
            (line, mask, account)
            for account in eligible
            for line, mask in turn.lines(tenants[account.tenant])
        ]
        chosen = self._overdue(turn, lines) or self._longest_prefix(turn, lines)
        # The next decision looks at the others first.
        self._left[chosen.account.tenant] = self._left.pop(chosen.account.tenant)
        return chosen

    def _overdue(self, turn: Turn, lines: Sequence[tuple[Line, int, Account]]) -> Record | None:
        """The oldest of those that have waited too long, if it is their turn; else what is due soon."""
        heads = [line.head() for line, _, _ in lines]
        aged = [head for head in heads if head.is_aged]
        self._since_aged += 1
        if aged and self._since_aged >= AGED_EVERY:
            self._since_aged = 0
            return min(aged, key=lambda record: record.arrival)
        pressing = [head for head in heads if not head.is_aged and head.is_pressing(turn.now)]
        return min(pressing, key=lambda record: record.due_at, default=None)

    def _longest_prefix(self, turn: Turn, lines: Sequence[tuple[Line, int, Account]]) -> Record:
        chosen = lines[0][0].head()
        best: tuple[float, ...] | None = None
        depth = max(1, LOOKAHEAD // len(lines))
        holders = turn.prefixes.masks.get
        for line, mask, account in lines:
            left = -self._ledger.deficit(account)
            found, most = line.head(), 0
            if best is not None:
                most = max(0, int(-best[0]) - 1)
            for record in line.first(depth):
                # One look-up tells whether it beats the best; nearly all are passed over by it.
                digests = record.request.prefix_digests
                if len(digests) > most and holders(digests[most], 0) & mask:
                    found, most = record, turn.prefixes.longest(digests, mask)
            cached = turn.prefixes.longest(found.request.prefix_digests, mask)
            rank = (-cached, left, found.due_at, found.arrival)
            if best is None or rank < best:
                best, chosen = rank, found
        return chosen

    def _eligible(self, tenants: Mapping[str, TenantLines], turn: Turn) -> list[Account]:
        while True:
            if self._round != self._ledger.rounds:
                self._left |= self._spent
                self._spent.clear()
                self._round = self._ledger.rounds
            found = list(islice(self._with_deficit(tenants, turn), MAX_TENANTS_SEEN))
            if found:
                return found
            movable = [a for a in self._spent.values() if turn.lines(tenants[a.tenant])]
            if not movable:
                return []
            # As many rounds at once as it takes until somebody has something left.
            most = max(self._ledger.deficit(account) for account in movable)
            self._ledger.rounds += int(-most // self._ledger.quantum) + 1

    def _with_deficit(self, tenants: Mapping[str, TenantLines], turn: Turn) -> Iterator[Account]:
        for account in list(self._left.values()):
            if self._ledger.deficit(account) <= 0:
                del self._left[account.tenant]
                self._spent[account.tenant] = account
            elif turn.lines(tenants[account.tenant]):
                yield account


@dataclass(frozen=True, slots=True)
class OrderRow:
    """How to make the order of one level, whether it keeps tenants apart, and what it does in a few words."""

    make: Callable[[Ledger], Picker]
    is_fair: bool
    about: str


ORDERS: dict[str, OrderRow] = {
    "deficit_prefix": OrderRow(
        DeficitPrefix, True, "tenants within their deficit, the longest cached prefix first"
    ),
    "vtc": OrderRow(Vtc, True, "the tenant that was served the fewest tokens"),
    "fcfs": OrderRow(Fcfs, False, "first come first served, whoever it is"),
}
"""Order policies by the name a setting uses. The first is the default."""
