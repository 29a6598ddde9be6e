"""Takes requests in: all the checks of admission in their order, with what each has to know.

Changes nothing but the count of arrivals; the machine enters what comes out of here into its books.
"""

from __future__ import annotations

import math
from itertools import count, islice

from scheduler.core import admission
from scheduler.core.estimates import Estimates
from scheduler.core.ledger import Ledgers
from scheduler.core.placer import MAX_CANDIDATES, Placer
from scheduler.core.pool import Pool
from scheduler.core.queue import RequestQueue
from scheduler.core.quotas import Quotas
from scheduler.core.record import Choice, Record
from scheduler.core.types import Feature, Limits, Request


class Intake:
    """The door of the core."""

    def __init__(
        self,
        limits: Limits,
        pool: Pool,
        queue: RequestQueue,
        placer: Placer,
        quotas: Quotas,
        estimates: Estimates,
        ledgers: Ledgers,
    ) -> None:
        self._limits = limits
        self._pool = pool
        self._queue = queue
        self._placer = placer
        self._quotas = quotas
        self._estimates = estimates
        self._ledgers = ledgers
        self._arrivals = count()

    def admit(self, now: float, request: Request) -> Record:
        """The record of a request that may wait, or the error that says why it may not."""
        known = admission.check_model(self._pool, request.model, request.kind)
        admission.check_prompt(self._pool, known, request)
        model = known.name
        needs = admission.check_features(self._pool.serving(model).workers, request)
        seat_s = self._estimates.seat_s(model)
        self._quotas.check(now, request.tenant, request.num_prompt_tokens, seat_s)
        record = self._record(now, model, request, needs)
        # The line always moves as far as it can: whoever has room now has it for nobody who waits.
        must_wait = not self._pool.masks(model, [needs])
        position = self._queue.position(record) if must_wait else 0
        eta = self._estimates.eta_s(model, position) if must_wait else 0.0
        first_s = self._prefill_s(record)
        if must_wait:
            first_s = max(first_s, self._estimates.start_s(model))
        admission.check_time(now, request, eta, first_s)
        if must_wait:
            retry_after_s = self._estimates.retry_after_s(model, self._queue.num_requests)
            admission.check_bounds(self._queue, self._limits, request, retry_after_s)
        return record

    def _prefill_s(self, record: Record) -> float:
        """Least time from its placement to its first token; 0 while no rate was measured."""
        if record.due_at == math.inf:
            return 0.0
        workers = islice(self._pool.serving(record.model).workers, MAX_CANDIDATES)
        return min((self._placer.prefill_s(record, worker) for worker in workers), default=0.0)

    def _record(
        self, now: float, model: str, request: Request, needs: frozenset[Feature]
    ) -> Record:
        due = (at for at in (request.first_token_by, request.deadline_at) if at is not None)
        return Record(
            request=request,
            model=model,
            arrival=next(self._arrivals),
            account=self._ledgers.of(model).account(request.tenant),
            needs=needs,
            level=(request.priority, 1),
            due_at=min(due, default=math.inf),
            is_due_ordered=self._queue.is_fair,
            choices={
                resumed.index: Choice(
                    list(resumed.token_ids), resumed.is_finished, resumed.cumulative_logprob
                )
                for resumed in request.resumed
            },
            submitted_at=now,
            queued_at=now,
            notify_at=now + self._limits.notify_after_s,
            age_at=now + self._limits.age_s,
        )
