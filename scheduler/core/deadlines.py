"""When a request is too late, and for what; the words of the errors that end it for that.

Pure functions of a record and the time.
"""

from __future__ import annotations

from candor import errors
from scheduler.core.record import Phase, Record
from scheduler.core.types import Limits


def overdue(
    now: float, record: Record, limits: Limits, retry_after_s: float
) -> errors.CandorError | None:
    """The error that ends a request now, if its time is over."""
    request = record.request
    waited = f"{now - record.submitted_at:.1f} s after it was submitted"
    if request.deadline_at is not None and request.deadline_at <= now:
        return errors.DeadlineExceeded(
            f"the request's deadline passed {waited}, with {record.num_relayed} tokens generated",
            field="deadline_unix_ms",
        )
    must_show = request.first_token_by if record.first_token_at is None else None
    if must_show is not None and must_show <= now:
        return errors.DeadlineExceeded(
            f"no token was there {waited}", reason="TTFT_BUDGET", field="ttft_budget_ms"
        )
    if record.phase is not Phase.QUEUED:
        return None
    if record.stranded_at is not None and record.stranded_at + limits.worker_wait_s <= now:
        return lost_error(record, f"no other took over in {now - record.stranded_at:.1f} s")
    if record.queued_at + limits.max_wait_s <= now:
        return errors.ResourceExhausted(
            f"the request waited {now - record.queued_at:.0f} s for a worker",
            reason="QUEUE_TTL",
            retry_after_s=retry_after_s,
        )
    return None


def hopeless(
    now: float, record: Record, first_at: float, retry_after_s: float
) -> errors.CandorError | None:
    """The error that ends a request now because its first token, due at `first_at`, would come too late."""
    request = record.request
    for field, by in (
        ("ttft_budget_ms", request.first_token_by),
        ("deadline_unix_ms", request.deadline_at),
    ):
        if by is not None and first_at > by:
            return errors.ResourceExhausted(
                f"after {now - record.submitted_at:.1f} s in the queue the first token would be there "
                f"in {1000 * (first_at - now):.0f} ms, {field} leaves {1000 * (by - now):.0f} ms",
                reason="DEADLINE_INFEASIBLE",
                field=field,
                retry_after_s=retry_after_s,
            )
    return None


def next_look_at(record: Record, limits: Limits) -> float | None:
    """When the record has to be looked at again; None while only events matter to it."""
    request = record.request
    instants = [request.deadline_at]
    if record.first_token_at is None:
        instants.append(request.first_token_by)
    if record.phase is Phase.QUEUED:
        instants += [record.notify_at, record.age_at, record.queued_at + limits.max_wait_s]
        if record.stranded_at is not None:
            instants.append(record.stranded_at + limits.worker_wait_s)
    return min((at for at in instants if at is not None), default=None)


def lost_error(record: Record, because: str) -> errors.CandorError:
    """Its worker is gone and nobody goes on."""
    if not record.lost_with:
        return errors.Unavailable(
            f"every worker of `{record.model}` went away; {because}", reason="NO_CAPACITY"
        )
    return errors.Unavailable(
        f"{record.lost_with} after {record.num_relayed} tokens; {because}", reason="WORKER_LOST"
    )
