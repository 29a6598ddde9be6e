"""Which of the workers with room gets a request: policies as plug-ins, one row each in `POLICIES`.

A policy sees workers and the request, never the queue; it decides by what was dispatched, not by what was
last reported, because reports are late.
"""

from __future__ import annotations

import hashlib
import math
import random
from bisect import bisect_right
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
BOUND = 1.25
"""Times the mean load that a worker may have before hashed prefixes go past it."""
HASHED_BLOCKS = 4
"""Leading blocks that name a prefix: 256 tokens."""
_POINTS = 64
"""Of each worker on the ring."""


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What a policy may look at besides workers and request."""

    rng: random.Random
    seat_s: float | None = None
    """Mean seconds a request of this model keeps a seat; None while not measured."""
    preferred: Worker | None = None
    """Where the session's last request went; taken when it costs nothing."""
    peers: Sequence[Worker] = ()
    """All that serve the model, with room or without."""
    cached_tokens: Callable[[Worker], int] = lambda worker: 0
    """Prompt tokens that the worker need not compute."""

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


@dataclass(frozen=True, slots=True)
class Cost:
    """The terms of an expected wait, in seconds."""

    prefill_s: float
    memory_s: float
    slot_s: float

    @property
    def total_s(self) -> float:
        """Until the first token."""
        return self.prefill_s + self.memory_s + self.slot_s


def mean_prefill_rate(workers: Iterable[Worker]) -> float:
    """Tokens per second of those that were measured, else a guess."""
    rates = [w.load.prefill_rate for w in workers if w.load.prefill_rate]
    return sum(rates) / len(rates) if rates else DEFAULT_PREFILL_RATE


def expected_wait(worker: Worker, record: Record, here: Circumstances, mean_rate: float) -> Cost:
    """Seconds until the first token there, in the sense of an ordering rather than a promise."""
    own = record.request.num_prompt_tokens + record.num_relayed - here.cached_tokens(worker)
    rate = worker.load.prefill_rate or mean_rate
    seats = worker.seats_used
    fullness = min(max(worker.kv_share, seats / (worker.window + 1)), _FULLEST)
    overflow = max(0, seats + record.seats - worker.spec.slots)
    return Cost(
        (worker.pending_prefill_tokens + own) / rate,
        MEMORY_WEIGHT_S * fullness / (1 - fullness),
        overflow * (here.seat_s or 0.0) / worker.spec.slots,
    )


class ExpectedWait:
    """The least expected wait; ties at random."""

    def choose(self, workers: Sequence[Worker], record: Record, here: Circumstances) -> Worker:
        """See `Policy`."""
        if len(workers) == 1:
            return workers[0]
        rate = mean_prefill_rate(workers)
        costs = [expected_wait(worker, record, here, rate).total_s for worker in workers]
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
        rate = mean_prefill_rate(pair)
        return min(pair, key=lambda w: expected_wait(w, record, here, rate).total_s)


class BoundedHash:
    """Consistent hashing of the prompt's first blocks, past workers with more than their share of the load.

    Needs no memory of what was sent where: several schedulers agree without talking. A prompt shorter than a
    block goes by its session, else by its own id.
    """

    def __init__(self) -> None:
        self._ring: list[tuple[int, str]] = []
        self._ids: frozenset[str] = frozenset()

    def choose(self, workers: Sequence[Worker], record: Record, here: Circumstances) -> Worker:
        """See `Policy`."""
        peers = here.peers or workers
        self._build(frozenset(w.worker_id for w in peers))
        able = {w.worker_id: w for w in workers}
        cap = math.ceil(BOUND * (sum(w.seats_used for w in peers) + record.seats) / len(peers))
        start = bisect_right(self._ring, (_key(record), ""))
        passed: Worker | None = None
        for at in range(len(self._ring)):
            worker = able.get(self._ring[(start + at) % len(self._ring)][1])
            if worker is None:
                continue
            if worker.seats_used + record.seats <= cap:
                return worker
            passed = passed or worker
        return passed or workers[0]

    def _build(self, ids: frozenset[str]) -> None:
        if ids != self._ids:
            self._ids = ids
            self._ring = sorted((_hash(f"{i}/{n}"), i) for i in ids for n in range(_POINTS))


def _key(record: Record) -> int:
    digests = record.request.prefix_digests
    if digests:
        return digests[min(HASHED_BLOCKS, len(digests)) - 1]
    return _hash(record.request.session_id or record.request.request_id)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


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
    "bounded_hash": PolicyRow(
        BoundedHash, "by the prompt's first 256 tokens, at most 1.25 times the mean load"
    ),
}
"""Placement policies by the name a setting uses. The first is the default."""
