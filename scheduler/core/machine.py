"""The scheduler as a state machine: events and the time go in, actions come out.

Decides who is admitted, who is next, where it runs, and what becomes of it when a worker goes away. Every
request that was admitted ends exactly once: by `request_finished`, by `cancel`, or by a `Fail` or `Complete`
action. Knows no sockets, no clock and no text.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import count

from candor import errors
from scheduler.core import deadlines, recovery
from scheduler.core.estimates import Estimates
from scheduler.core.intake import Intake
from scheduler.core.ledger import Ledgers
from scheduler.core.order import ORDERS, OrderRow, Turn
from scheduler.core.placement import Policy
from scheduler.core.placer import Placer
from scheduler.core.pool import Pool, Worker
from scheduler.core.queue import RequestQueue
from scheduler.core.quotas import Quotas
from scheduler.core.record import Phase, Record
from scheduler.core.timers import Timers
from scheduler.core.types import (
    Action,
    CancelOnWorker,
    Complete,
    Dispatch,
    DropWorker,
    Fail,
    Limits,
    Load,
    NotifyQueued,
    Report,
    Request,
    Stats,
    TellDrain,
    TenantLimits,
    WorkerSpec,
    WorkerState,
)


class Scheduler:
    """All requests and workers of one scheduler process."""

    def __init__(
        self,
        limits: Limits,
        policy: Policy,
        rng: random.Random,
        *,
        order: OrderRow = ORDERS["deficit_prefix"],
        tenants: Mapping[str, TenantLimits] | None = None,
    ) -> None:
        self.limits = limits
        self.stats = Stats()
        self._quotas = Quotas(tenants or {}, limits.max_tenants)
        self.ledgers = Ledgers(limits.max_tenants, limits.quantum, self._quotas.weight)
        self.queue = RequestQueue(order, self.ledgers.of)
        self.pool = Pool(limits.window_slack, limits.lease_s, limits.max_workers)
        self.placer = Placer(policy, rng, limits)
        self._estimates = Estimates(self.pool)
        self._intake = Intake(
            limits, self.pool, self.queue, self.placer, self._quotas, self._estimates, self.ledgers
        )
        self._records: dict[str, Record] = {}
        self._timers: Timers[Record | Worker] = Timers()
        self._handles = count(1)

    # --- what clients do ---

    def submit(self, now: float, request: Request) -> list[Action]:
        """Take a request in, or raise the reason why not; a refused one was never here."""
        self.stats.submitted += 1
        try:
            if request.request_id in self._records:
                raise errors.AlreadyExists(
                    f"a request with id `{request.request_id}` is in flight", field="request_id"
                )
            record = self._intake.admit(now, request)
        except errors.CandorError:
            self.stats.refused += 1
            raise
        self._records[request.request_id] = record
        self.ledgers.of(record.model).opened(record.account)
        self._quotas.admitted(now, request.tenant, request.num_prompt_tokens)
        self.queue.push(record)
        self._arm(record)
        return self._fill(now, record.model)

    def cancel(self, now: float, *records: Record) -> list[Action]:
        """The client does not want them any more. Those that have ended are passed over.

        All leave before the line moves: nothing of a client that went away is placed on its last breath.
        """
        actions: list[Action] = []
        left = [record for record in records if record.phase is not Phase.ENDED]
        for record in left:
            self.stats.cancelled += 1
            actions += self._close(now, record)
        for model in {record.model for record in left}:
            actions += self._fill(now, model)
        return actions

    def close(self, now: float) -> list[Action]:
        """Give up everything that is left."""
        actions: list[Action] = []
        for record in list(self._records.values()):
            actions += self._close(now, record)
            error = errors.Unavailable(
                f"the scheduler shut down after {record.num_relayed} tokens", reason="SHUTTING_DOWN"
            )
            self.stats.failed += 1
            actions.append(Fail(record, error))
        return actions

    # --- what workers do ---

    def worker_registered(self, now: float, spec: WorkerSpec) -> tuple[Worker, list[Action]]:
        """A worker attached; it replaces a former self. Raises when it does not fit to the others."""
        self.pool.check(spec)
        actions: list[Action] = []
        former = self.pool.workers.get(spec.worker_id)
        if former is not None:
            # The former self goes first, but what it held may wait for the new one.
            actions += self.worker_lost(now, former, "a new instance took its place")
            self._forget(former)
        worker = self.pool.add(now, spec)
        self._timers.set(worker, worker.lease_until)
        self._find_stranded(now, spec.model.name)
        return worker, actions

    def worker_linked(self, now: float, worker: Worker) -> list[Action]:
        """The stream to the worker is open: it can be given requests once it says it is ready."""
        worker.is_linked = True
        self.pool.changed(worker)
        return self._fill(now, worker.spec.model.name)

    def worker_reported(self, now: float, worker: Worker, report: Report) -> list[Action]:
        """The worker says how it is."""
        if worker.lost_at is not None:
            return []
        before = worker.state, worker.reported
        self.pool.renew(now, worker, report)
        self.placer.reported(worker, report.cached_prefixes)
        if before == (worker.state, worker.reported):
            return []
        self.pool.changed(worker)
        self._find_stranded(now, worker.spec.model.name)
        return self._fill(now, worker.spec.model.name)

    def worker_stepped(self, now: float, worker: Worker, step_seq: int, load: Load | None) -> None:
        """The worker made a step."""
        self.pool.stepped(now, worker, step_seq, load)

    def worker_lost(self, now: float, worker: Worker, why: str) -> list[Action]:
        """The worker is gone, or given up; `why` is for people. Idempotent."""
        if worker.lost_at is not None:
            return []
        return self._lose(now, worker, why) + self._fill(now, worker.spec.model.name)

    def drain_worker(self, now: float, worker_id: str) -> tuple[int, list[Action]]:
        """Give the worker nothing more and ask it to leave; returns how many requests it still has."""
        worker = self.pool.workers.get(worker_id)
        if worker is None or worker.lost_at is not None:
            raise errors.NotFound(f"no worker `{worker_id}` is attached", field="worker_id")
        worker.is_draining = True
        self.pool.changed(worker)
        self._find_stranded(now, worker.spec.model.name)
        return len(worker.assigned), [TellDrain(worker)]

    # --- what happens to running requests ---

    def request_started(self, record: Record, num_cached_tokens: int | None = None) -> bool:
        """A worker took it up and found so much in its cache. False: another one had, and this one goes on."""
        is_first = not record.was_started
        record.was_started = True
        if is_first and num_cached_tokens is not None:
            record.account.correct(record.cached_tokens - num_cached_tokens)
        return is_first

    def request_showed_token(self, now: float, record: Record) -> None:
        """Its first delta of this attempt: the prompt is computed."""
        assert record.worker is not None
        self.pool.prefilled(record.worker, record)
        if record.first_token_at is None:
            record.first_token_at = now
            if record.was_beyond_slots:
                self._estimates.started(record.model, now - record.dispatched_at)

    def request_finished(self, now: float, record: Record) -> list[Action]:
        """The worker's closing words: the request's one ending."""
        self.stats.finished += 1
        self._close(now, record, tell_worker=False)
        return self._fill(now, record.model)

    def request_failed(self, now: float, record: Record, error: errors.CandorError) -> list[Action]:
        """The worker could not do it. One that lets go of it before the first token is like one that died."""
        if isinstance(error, errors.Unavailable) and not record.num_relayed:
            worker = self._free_seats(now, record)
            actions = self._displace(now, record, worker, "it refused the request", error)
            return actions + self._fill(now, record.model)
        self.stats.failed += 1
        self._close(now, record, tell_worker=False)
        return [Fail(record, error), *self._fill(now, record.model)]

    def request_garbled(self, now: float, record: Record, what: str) -> list[Action]:
        """The worker broke the contract: better an error than a wrong answer."""
        error = errors.Internal(f"the worker's answer was broken: {what}", reason="BROKEN_ANSWER")
        return self._fail(now, record, error)

    # --- time and numbers ---

    @property
    def num_in_flight(self) -> int:
        """Admitted and not ended."""
        return len(self._records)

    def find(self, request_id: str) -> Record | None:
        """The request in flight with that id."""
        return self._records.get(request_id)

    def next_at(self) -> float | None:
        """When `tick` has something to do, at the latest."""
        return self._timers.next_at()

    def tick(self, now: float) -> list[Action]:
        """Do what the time brings: deadlines, leases, news for those that wait.

        Whoever is too late goes before anybody is placed, workers first: nothing is sent to one that is
        given up in the same moment.
        """
        actions: list[Action] = []
        due = self._timers.pop_due(now)
        workers = [owner for owner in due if isinstance(owner, Worker)]
        records = [owner for owner in due if isinstance(owner, Record)]
        for worker in workers:
            actions += self._worker_due(now, worker)
        for record in records:
            if record.phase is not Phase.ENDED:
                actions += self._record_due(now, record)
        for model in {w.spec.model.name for w in workers} | {r.model for r in records}:
            actions += self._fill(now, model)
        return actions

    def _worker_due(self, now: float, worker: Worker) -> list[Action]:
        if worker.lost_at is not None:
            self._forget(worker)
        elif worker.lease_until <= now:
            return self._lose(now, worker, "it made no progress within its lease")
        else:
            self._timers.set(worker, worker.lease_until)
        return []

    def _record_due(self, now: float, record: Record) -> list[Action]:
        error = deadlines.overdue(now, record, self.limits, self._retry_after_s(record.model))
        if error is not None:
            return self._give_up(now, record, error)
        actions: list[Action] = []
        if record.phase is Phase.QUEUED and record.age_at <= now:
            record.age_at = now + self.limits.age_s
            self.queue.promote(record)
        if record.phase is Phase.QUEUED and record.notify_at <= now:
            position = self.queue.position(record)
            if position != record.notified_position:
                record.notified_position = position
                actions.append(
                    NotifyQueued(record, position, self._estimates.eta_s(record.model, position))
                )
            record.notify_at = now + self.limits.notify_every_s
        self._arm(record)
        return actions

    def _arm(self, record: Record) -> None:
        at = deadlines.next_look_at(record, self.limits)
        if at is None:
            self._timers.clear(record)
        else:
            self._timers.set(record, at)

    # --- placement ---

    def _fill(self, now: float, model: str) -> list[Action]:
        """Place whoever is next while somebody has room."""
        actions: list[Action] = []
        while able := self.pool.masks(model, self.queue.needs(model)):
            turn = Turn(now, able, self.placer.prefixes)
            record = self.queue.pick(model, turn)
            if record is None:
                break
            workers = [w for w in self.pool.free(model) if w.can(record.needs)]
            peers, seat_s = self.pool.serving(model).workers, self._estimates.seat_s(model)
            worker = self.placer.choose(record, workers, peers, seat_s)
            error = self._hopeless(now, record, worker)
            if error is not None:
                actions += self._give_up(now, record, error)
                continue
            self._charge(record, worker)
            self.queue.remove(record)
            self._place(now, record, worker)
            actions.append(Dispatch(record, worker, record.handle))
        return actions

    def _charge(self, record: Record, worker: Worker) -> None:
        self.placer.placed(record, worker)
        if not record.is_charged:
            # Once: what a lost worker takes with it is not the tenant's doing.
            record.is_charged = True
            record.account.charge(record.request.num_prompt_tokens - record.cached_tokens)

    def _place(self, now: float, record: Record, worker: Worker) -> None:
        record.phase = Phase.RUNNING
        record.handle = next(self._handles)
        record.dispatched_at = now
        record.waited_s += now - record.queued_at
        record.stranded_at = None
        record.was_beyond_slots = worker.seats_used >= worker.spec.slots
        self.pool.assign(now, worker, record)
        self._arm(record)

    def _hopeless(self, now: float, record: Record, worker: Worker) -> errors.CandorError | None:
        """Why a seat would be wasted on it: its first token cannot be there in time any more."""
        if not self.limits.shed or record.first_token_at is not None:
            return None
        first_s = self.placer.prefill_s(record, worker)
        if worker.seats_used >= worker.spec.slots:
            first_s = max(first_s, self._estimates.start_s(record.model))
        first_at = now + first_s
        return deadlines.hopeless(now, record, first_at, self._retry_after_s(record.model))

    def _retry_after_s(self, model: str) -> float:
        return self._estimates.retry_after_s(model, self.queue.num_requests)

    # --- endings and detours ---

    def _fail(self, now: float, record: Record, error: errors.CandorError) -> list[Action]:
        return [*self._give_up(now, record, error), *self._fill(now, record.model)]

    def _give_up(self, now: float, record: Record, error: errors.CandorError) -> list[Action]:
        self.stats.failed += 1
        return [Fail(record, error), *self._close(now, record)]

    def _close(self, now: float, record: Record, *, tell_worker: bool = True) -> list[Action]:
        """Take it out of every book. Its seats are free; nobody has them yet."""
        actions: list[Action] = []
        if record.phase is Phase.QUEUED:
            self.queue.remove(record)
        elif record.worker is not None:
            worker = self._free_seats(now, record)
            if tell_worker:
                actions.append(CancelOnWorker(record, worker, record.handle))
        record.phase = Phase.ENDED
        self._timers.clear(record)
        self.ledgers.of(record.model).closed(record.account)
        self._quotas.ended(now, record.request.tenant, record.num_generated)
        del self._records[record.request.request_id]
        return actions

    def _free_seats(self, now: float, record: Record) -> Worker:
        seat_s = record.seats * (now - record.dispatched_at)
        self._estimates.left(record.model, seat_s, record.request.num_prompt_tokens)
        return self.pool.release(record)

    def _lose(self, now: float, worker: Worker, why: str) -> list[Action]:
        """Take the worker out and put what it held back in the line, or end it; nobody is placed yet."""
        left_in_order = worker.state is WorkerState.DRAINING and not worker.assigned
        actions: list[Action] = [DropWorker(worker, why)]
        self.placer.forget(worker)
        for record in self.pool.lose(now, worker):
            actions += self._displace(now, record, worker, why)
        if left_in_order:
            self._forget(worker)
        else:
            self._timers.set(worker, now + self.limits.lost_memory_s)
        self._find_stranded(now, worker.spec.model.name)
        return actions

    def _displace(
        self,
        now: float,
        record: Record,
        worker: Worker,
        why: str,
        error: errors.CandorError | None = None,
    ) -> list[Action]:
        """Its worker is gone, its seats are free: it goes on elsewhere if that can be exact, or ends.

        Nobody is placed here: first all that lost the worker are back in the line, then it moves.
        """
        record.displacements += 1
        record.lost_with = f"worker {worker.worker_id} was lost ({why})"
        if record.all_choices_ended:
            self.stats.finished += 1
            self._close(now, record)
            return [Complete(record)]
        # The dead worker itself counts: whoever keeps it running brings it back.
        workers = [worker, *self.pool.serving(record.model).workers]
        fatal = recovery.why_not(record, workers, error)
        if fatal is not None:
            return self._give_up(now, record, fatal)
        recovery.requeue(now, record, worker, self.limits)
        self.queue.push(record)
        self._arm(record)
        return []

    def _find_stranded(self, now: float, model: str) -> None:
        """Those that wait for a worker which does not exist wait only so long."""
        serving = self.pool.serving(model).workers
        for record in recovery.stranded(now, self.queue.waiting(model), serving):
            self._arm(record)

    def _forget(self, worker: Worker) -> None:
        self._timers.clear(worker)
        self.pool.forget(worker)
        model = worker.spec.model.name
        if self.pool.find_model(model) is None and not self.queue.needs(model):
            self._estimates.forget(model)
            self.ledgers.forget(model)
