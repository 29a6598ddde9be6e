"""Places requests: a policy, with everything it wants to know looked up for it.

Keeps which prefixes are cached where and where sessions were last. Knows nothing about the queue.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence

from scheduler.core.placement import Circumstances, Policy
from scheduler.core.pool import Worker
from scheduler.core.prefixes import BLOCK_TOKENS, PrefixIndex
from scheduler.core.record import Record
from scheduler.core.types import Limits

MAX_CANDIDATES = 64
"""Workers with room that one decision compares; of more, so many at random and those with the prefix."""


class Placer:
    """Chooses workers, and remembers what they were given."""

    def __init__(self, policy: Policy, rng: random.Random, limits: Limits) -> None:
        self.prefixes = PrefixIndex(limits.max_cached_blocks)
        self._policy = policy
        self._rng = rng
        self._limits = limits
        self._sessions: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._reported: dict[int, tuple[int, ...]] = {}
        """Digests last reported, by worker number: taken in only when they change."""

    def choose(
        self,
        record: Record,
        able: Sequence[Worker],
        peers: Sequence[Worker],
        seat_s: float | None,
    ) -> Worker:
        """One of the able."""
        here = self.circumstances(record, peers, seat_s)
        worker = self._policy.choose(self._candidates(record, able, here), record, here)
        session = record.request.session_id
        if session is not None:
            key = (record.model, session)
            self._sessions[key] = worker.worker_id
            self._sessions.move_to_end(key)
            if len(self._sessions) > self._limits.max_sessions:
                self._sessions.popitem(last=False)
        return worker

    def circumstances(
        self, record: Record, peers: Sequence[Worker], seat_s: float | None
    ) -> Circumstances:
        """What the policy is told about the request."""
        session, preferred = record.request.session_id, None
        if session is not None:
            home = self._sessions.get((record.model, session))
            preferred = next((w for w in peers if w.worker_id == home), None) if home else None
        return Circumstances(
            self._rng, seat_s, preferred, peers, lambda worker: self.cached_tokens(record, worker)
        )

    def cached_tokens(self, record: Record, worker: Worker) -> int:
        """Prompt tokens that the worker need not compute; the last one is always computed."""
        request = record.request
        blocks = self.prefixes.longest(request.prefix_digests, 1 << worker.number)
        return min(blocks * BLOCK_TOKENS, request.num_prompt_tokens - 1)

    def prefill_s(self, record: Record, worker: Worker) -> float:
        """Until its prompt is computed there, behind what is pending; 0 while nothing was measured."""
        rate = worker.load.prefill_rate
        if not rate:
            return 0.0
        own = record.request.num_prompt_tokens + record.num_relayed
        own -= self.cached_tokens(record, worker)
        return (worker.pending_prefill_tokens + own) / rate

    def placed(self, record: Record, worker: Worker) -> None:
        """The request goes to the worker: its prompt will be cached there."""
        request = record.request
        record.cached_tokens = self.cached_tokens(record, worker)
        self.prefixes.touch(
            worker.number,
            request.prefix_digests,
            is_salted=request.is_salted,
            capacity=worker.load.kv_total_tokens // BLOCK_TOKENS,
        )

    def reported(self, worker: Worker, digests: tuple[int, ...]) -> None:
        """The worker named what it holds. One that never named anything is not taken at its word."""
        if digests == self._reported.get(worker.number, ()):
            return
        self._reported[worker.number] = digests
        running = {d for r in worker.assigned.values() for d in r.request.prefix_digests}
        self.prefixes.correct(worker.number, digests, running)

    def forget(self, worker: Worker) -> None:
        """The worker's memory is gone."""
        self.prefixes.drop(worker.number)
        self._reported.pop(worker.number, None)

    def _candidates(
        self, record: Record, able: Sequence[Worker], here: Circumstances
    ) -> Sequence[Worker]:
        if len(able) <= MAX_CANDIDATES:
            return able
        chosen = self._rng.sample(able, MAX_CANDIDATES)
        digests = record.request.prefix_digests
        depth = self.prefixes.longest(digests, -1)
        if depth:
            holders = self.prefixes.holders(digests, depth)
            with_prefix = (w for w in able if holders >> w.number & 1 and w not in chosen)
            chosen += [w for w, _ in zip(with_prefix, range(MAX_CANDIDATES), strict=False)]
        if here.preferred is not None and here.preferred in able and here.preferred not in chosen:
            chosen.append(here.preferred)
        return chosen
