"""Whether a request that lost its worker goes on elsewhere, and as what it goes back to the queue.

Decisions about records alone; the books of queue and pool are the machine's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from candor import errors
from scheduler.core import deadlines
from scheduler.core.pool import Worker
from scheduler.core.record import Phase, Record
from scheduler.core.types import Feature, Limits

MAX_DISPLACEMENTS = 2
"""A request that was on so many workers when they died is suspected of having killed them."""


def needs_now(record: Record) -> frozenset[Feature]:
    """What it needs from here on: one with tokens can only go on where that is exact."""
    return record.needs | {Feature.RESUME} if record.num_relayed else record.needs


def why_not(
    record: Record, workers: Iterable[Worker], error: errors.CandorError | None
) -> errors.CandorError | None:
    """The error that ends it, if it cannot go on. `error`: what its worker said, if it said something."""
    if record.displacements >= MAX_DISPLACEMENTS:
        return error or errors.Internal(
            f"{record.displacements} workers were lost while they ran this request, "
            f"the last after {record.num_relayed} tokens; it is not tried again",
            reason="POISON_GUARD",
        )
    if record.num_relayed and not any(worker.can(needs_now(record)) for worker in workers):
        return deadlines.lost_error(record, "it cannot be resumed")
    return None


def stranded(now: float, waiting: Iterable[Record], serving: Sequence[Worker]) -> list[Record]:
    """Notes who waits for a worker that does not exist; returns those of whom that is news."""
    is_able: dict[frozenset[Feature], bool] = {}
    found = []
    for record in waiting:
        if record.needs not in is_able:
            is_able[record.needs] = any(worker.can(record.needs) for worker in serving)
        if is_able[record.needs]:
            record.stranded_at = None
        elif record.stranded_at is None:
            record.stranded_at = now
            found.append(record)
    return found


def requeue(now: float, record: Record, worker: Worker, limits: Limits) -> None:
    """It waits again, before all of its priority that have not begun."""
    if record.was_started:
        record.moved_from = worker.worker_id
    record.needs = needs_now(record)
    record.level = (record.request.priority, 0)
    record.phase = Phase.QUEUED
    record.cached_tokens = 0
    record.queued_at = now
    record.age_at = now + limits.age_s
    record.notify_at = now + limits.notify_after_s
    record.notified_position = None
