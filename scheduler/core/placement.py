"""Which of the workers with room gets a request: policies as plug-ins, one row each in `POLICIES`.

A policy sees workers and the request, never the queue; it decides by what was dispatched, not by what was
last reported, because reports are late.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from scheduler.core.pool import Worker
from scheduler.core.record import Record

DEFAULT_PREFILL_RATE = 1000.0
"""Tokens per second assumed of a worker while nobody of its model has been measured."""
MEMORY_WEIGHT_S = 0.15
"""Weight of the fullness term, in seconds: what sharing a half-full card costs."""
_FULLEST = 0.95
_TIE = 0.01
"""Costs closer than this part of the best one, plus a millisecond, count as equal."""


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What a policy may look at besides workers and request."""

    rng: random.Random
    seat_s: float | None = None
    """Mean seconds a request of this model keeps a seat; None while not measured."""
    preferred: Worker | None = None
    """Where the session's last request went; taken when it costs nothing."""

    def among(self, equals: Sequence[Worker]) -> Worker:
        """One of several equally good ones."""
        if self.preferred is not None and self.preferred in equals:
            return self.preferred
        return self.rng.choice(equals)


class Policy(Protocol):
    """Chooses one of at least one worker."""

    def choose(self, workers: Sequence[Worker], record: Record, here: Circumstances) -> Worker:
        """Called with workers that have room and every feature the request needs."""
        ...


def prefill_rate(worker: Worker, peers: Iterable[Worker]) -> float:
    """Tokens per second: its own measured rate, else the mean of its peers, else a guess."""
    if worker.load.prefill_rate:
        return worker.load.prefill_rate
    rates = [peer.load.prefill_rate for peer in peers if peer.load.prefill_rate]
    return sum(rates) / len(rates) if rates else DEFAULT_PREFILL_RATE


def expected_wait(
    worker: Worker, peers: Sequence[Worker], record: Record, seat_s: float | None
) -> float:
    """Seconds until the first token there, in the sense of an ordering rather than a promise."""
    tokens = worker.pending_prefill_tokens + record.request.num_prompt_tokens + record.num_relayed
    prefill = tokens / prefill_rate(worker, peers)
    fullness = max(worker.kv_share, worker.seats_used / (worker.window + 1))
    fullness = min(fullness, _FULLEST)
    overflow = worker.seats_used + record.seats - worker.spec.slots
    slot_wait = max(0, overflow) * (seat_s or 0.0) / worker.spec.slots
    return prefill + MEMORY_WEIGHT_S * fullness / (1 - fullness) + slot_wait


class ExpectedWait:
    """The least expected wait; ties at random."""

    def choose(self, workers: Sequence[Worker], record: Record, here: Circumstances) -> Worker:
        """See `Policy`."""
        if len(workers) == 1:
            return workers[0]
        costs = [expected_wait(worker, workers, record, here.seat_s) for worker in workers]
        limit = min(costs) * (1 + _TIE) + 0.001
        return here.among([w for w, cost in zip(workers, costs, strict=True) if cost <= limit])


class LeastRequests:
    """The fewest seats in use, as a part of its slots; ties at random."""

    def choose(self, workers: Sequence[Worker], record: Record, here: Circumstances) -> Worker:
        """See `Policy`."""
        least = min(w.seats_used / w.spec.slots for w in workers)
        return here.among([w for w in workers if w.seats_used / w.spec.slots == least])


class RoundRobin:
    """One after the other by worker id, whatever they are doing."""

    def __init__(self) -> None:
        self._last: dict[str, str] = {}

    def choose(self, workers: Sequence[Worker], record: Record, here: Circumstances) -> Worker:
        """See `Policy`."""
        last = self._last.get(record.model, "")
        ordered = sorted(workers, key=lambda w: w.worker_id)
        chosen = next((w for w in ordered if w.worker_id > last), ordered[0])
        self._last[record.model] = chosen.worker_id
        return chosen


class TwoChoices:
    """Two at random, of which the one with the lower expected wait."""

    def choose(self, workers: Sequence[Worker], record: Record, here: Circumstances) -> Worker:
        """See `Policy`."""
        pair = here.rng.sample(list(workers), min(2, len(workers)))
        return min(pair, key=lambda w: expected_wait(w, workers, record, here.seat_s))


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """How to make a policy, and what it does in a few words."""

    make: Callable[[], Policy]
    about: str


POLICIES: dict[str, PolicyRow] = {
    "expected_wait": PolicyRow(ExpectedWait, "least expected seconds to the first token"),
    "least_requests": PolicyRow(LeastRequests, "fewest requests per slot"),
    "round_robin": PolicyRow(RoundRobin, "one after the other"),
    "two_choices": PolicyRow(TwoChoices, "the better of two at random"),
}
"""Placement policies by the name a setting uses. The first is the default."""
