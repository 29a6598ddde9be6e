"""What each tenant was served of one model: the one currency that fairness counts in.

Work = input tokens that had to be computed + 2 × output tokens, divided by the tenant's weight. A cache hit is
no work. Knows no queue and no order; the order policies read and lift the numbers kept here.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
"""An output token costs about twice an input token on the cards this was measured for."""


@dataclass(slots=True, eq=False)
class Account:
    """One tenant's account with one model."""

    tenant: str
    weight: float = 1.0
    input_tokens: int = 0
    """Charged: computed, not taken from a cache."""
    output_tokens: int = 0
    """Set by the relay, a plain addition per delta."""
    refund_tokens: int = 0
    """Charged for what a worker then found in its cache; the next charge is that much smaller."""
    lifted: float = 0.0
    granted: float = 0.0
    rounds_seen: int = 0
    num_queued: int = 0
    num_in_flight: int = 0

    @property
    def work(self) -> float:
        """Served so far, in units of its weight."""
        served = INPUT_WEIGHT * self.input_tokens + OUTPUT_WEIGHT * self.output_tokens
        return served / self.weight

    @property
    def counter(self) -> float:
        """Virtual token counter: work, lifted over idle times. Never falls."""
        return self.lifted + self.work

    def charge(self, num_tokens: int) -> None:
        """Input that is going to be computed."""
        refund = min(self.refund_tokens, num_tokens)
        self.refund_tokens -= refund
        self.input_tokens += num_tokens - refund

    def correct(self, num_tokens: int) -> None:
        """So much more (less, if negative) had to be computed than was charged."""
        if num_tokens > 0:
            self.charge(num_tokens)
        else:
            self.refund_tokens -= num_tokens


class LeastFirst:
    """The accounts with the least counter first: a heap that is put right lazily, as counters only rise."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Account]] = []
        self._stamp: dict[str, int] = {}
        self._count = 0

    def add(self, account: Account) -> None:
        """Count it in; once per account until it is removed."""
        self._count += 1
        self._stamp[account.tenant] = self._count
        heapq.heappush(self._heap, (account.counter, self._count, account))

    def remove(self, account: Account) -> None:
        """Count it out."""
        del self._stamp[account.tenant]
        if len(self._heap) > 2 * len(self._stamp) + 16:
            self._heap = [e for e in self._heap if self._stamp.get(e[2].tenant) == e[1]]
            heapq.heapify(self._heap)

    def first(self) -> Account | None:
        """The one with the least counter."""
        heap = self._heap
        while heap:
            counter, stamp, account = heap[0]
            if self._stamp.get(account.tenant) != stamp:
                heapq.heappop(heap)
            elif counter != account.counter:
                heapq.heapreplace(heap, (account.counter, stamp, account))
            else:
                return account
        return None

    def first_where(self, is_wanted: Callable[[Account], bool]) -> Account | None:
        """The one with the least counter of those wanted."""
        passed = []
        while (account := self.first()) is not None and not is_wanted(account):
            passed.append(heapq.heappop(self._heap))
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return account


class Ledger:
    """All accounts of one model. Accounts without requests are forgotten, the longest idle first."""

    def __init__(self, max_idle: int, quantum: float, weight_of: Callable[[str], float]) -> None:
        self._max_idle = max_idle
        self._weight_of = weight_of
        self._accounts: dict[str, Account] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._queued = LeastFirst()
        self._left_at = 0.0
        """Counter of the tenant that was the last to leave the queue."""
        self.quantum = quantum
        """Work that a round grants each waiting tenant, in units of its weight."""
        self.rounds = 0

    def account(self, tenant: str) -> Account:
        """The tenant's account, opened if need be. Without requests it may be gone at the next opening."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = Account(tenant, self._weight_of(tenant))
            account.rounds_seen = self.rounds
            account.granted = self.quantum
            self._rest(account)
        return account

    def find(self, tenant: str) -> Account | None:
        """The tenant's account, if it has one."""
        return self._accounts.get(tenant)

    @property
    def num_accounts(self) -> int:
        """Accounts kept."""
        return len(self._accounts)

    def opened(self, account: Account) -> None:
        """A request of the tenant was admitted."""
        account.num_in_flight += 1
        self._idle.pop(account.tenant, None)

    def closed(self, account: Account) -> None:
        """A request of the tenant has ended."""
        account.num_in_flight -= 1
        if not account.num_in_flight:
            self._rest(account)

    def queued(self, account: Account) -> None:
        """A request of the tenant waits. One that comes from idleness brings neither credit nor old debt."""
        account.num_queued += 1
        if account.num_queued > 1:
            return
        least = self._queued.first()
        floor = self._left_at if least is None else least.counter
        account.lifted += max(0.0, floor - account.counter)
        missed = self.rounds - account.rounds_seen
        account.rounds_seen = self.rounds
        account.granted = min(account.granted + missed * self.quantum, account.work + self.quantum)
        self._queued.add(account)

    def unqueued(self, account: Account) -> None:
        """A request of the tenant waits no more."""
        account.num_queued -= 1
        if not account.num_queued:
            self._settle(account)
            self._queued.remove(account)
            self._left_at = account.counter

    def deficit(self, account: Account) -> float:
        """What a waiting tenant may still be served in this round; never more than one quantum."""
        self._settle(account)
        return account.granted - account.work

    def _settle(self, account: Account) -> None:
        grants = (self.rounds - account.rounds_seen) * self.quantum
        account.granted = min(account.granted + grants, account.work + self.quantum)
        account.rounds_seen = self.rounds

    def _rest(self, account: Account) -> None:
        self._idle[account.tenant] = None
        if len(self._idle) > self._max_idle:
            # Not the newest: its opener is about to use it.
            del self._accounts[self._idle.popitem(last=False)[0]]


class Ledgers:
    """One ledger per model, opened when somebody asks for it."""

    def __init__(self, max_idle: int, quantum: float, weight_of: Callable[[str], float]) -> None:
        self._max_idle = max_idle
        self._quantum = quantum
        self._weight_of = weight_of
        self._ledgers: dict[str, Ledger] = {}

    def of(self, model: str) -> Ledger:
        """What the tenants were served of the model."""
        ledger = self._ledgers.get(model)
        if ledger is None:
            ledger = Ledger(self._max_idle, self._quantum, self._weight_of)
            self._ledgers[model] = ledger
        return ledger

    def forget(self, model: str) -> None:
        """Nobody serves the model or waits for it."""
        self._ledgers.pop(model, None)
