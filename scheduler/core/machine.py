"""The scheduler as a state machine: events and the time go in, actions come out.

Decides who is admitted, who is next, where it runs, and what becomes of it when a worker goes away. Every
request that was admitted ends exactly once: by `request_finished`, by `cancel`, or by a `Fail` or `Complete`
action. Knows no sockets, no clock and no text.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass
from itertools import count

from candor import errors
from scheduler.core import admission, deadlines
from scheduler.core.placement import Circumstances, Policy
from scheduler.core.pool import Pool, Worker
from scheduler.core.queue import RequestQueue
from scheduler.core.rates import DrainRate
from scheduler.core.record import Choice, Phase, Record
from scheduler.core.timers import Timers
from scheduler.core.types import (
    Action,
    CancelOnWorker,
    Complete,
    Dispatch,
    DropWorker,
    Fail,
    Feature,
    Limits,
    Load,
    NotifyQueued,
    Report,
    Request,
    TellDrain,
    WorkerSpec,
    WorkerState,
)

MAX_DISPLACEMENTS = 2
"""A request that was on so many workers when they died is suspected of having killed them."""
_REFILL = 0.1
"""Part of the queue that should have drained before a refused client comes back."""
_LONGEST_RETRY_S = 60.0


@dataclass(slots=True)
class Stats:
    """Totals since the start. submitted = finished + failed + cancelled + refused + in flight."""

    submitted: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0


class Scheduler:
    """All requests and workers of one scheduler process."""

    def __init__(self, limits: Limits, policy: Policy, rng: random.Random) -> None:
        self.limits = limits
        self.stats = Stats()
        self.queue = RequestQueue()
        self.pool = Pool(limits.window_slack, limits.lease_s, limits.max_workers)
        self._policy = policy
        self._rng = rng
        self._records: dict[str, Record] = {}
        self._timers: Timers[Record | Worker] = Timers()
        self._drain: dict[str, DrainRate] = {}
        self._sessions: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._arrivals = count()
        self._handles = count(1)

    # --- what clients do ---

    def submit(self, now: float, request: Request) -> list[Action]:
        """Take a request in, or raise the reason why not; a refused one was never here."""
        self.stats.submitted += 1
        try:
            record = self._admit(now, request)
        except errors.CandorError:
            self.stats.refused += 1
            raise
        self._records[request.request_id] = record
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

    def request_started(self, record: Record) -> bool:
        """A worker took it up. False: another one had, and this one continues."""
        is_first = not record.was_started
        record.was_started = True
        return is_first

    def request_showed_token(self, now: float, record: Record) -> None:
        """Its first delta of this attempt: the prompt is computed."""
        assert record.worker is not None
        self.pool.prefilled(record.worker, record)
        if record.first_token_at is None:
            record.first_token_at = now

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
        retry_after_s = self._retry_after_s(record.model)
        error = deadlines.overdue(now, record, self.limits, retry_after_s)
        if error is not None:
            return self._give_up(now, record, error)
        actions: list[Action] = []
        if record.phase is Phase.QUEUED and record.notify_at <= now:
            position = self.queue.position(record)
            if position != record.notified_position:
                record.notified_position = position
                actions.append(NotifyQueued(record, position, self._eta_s(record.model, position)))
            record.notify_at = now + self.limits.notify_every_s
        self._arm(record)
        return actions

    def _arm(self, record: Record) -> None:
        at = deadlines.next_look_at(record, self.limits)
        if at is None:
            self._timers.clear(record)
        else:
            self._timers.set(record, at)

    # --- admission ---

    def _admit(self, now: float, request: Request) -> Record:
        if request.request_id in self._records:
            raise errors.AlreadyExists(
                f"a request with id `{request.request_id}` is in flight", field="request_id"
            )
        model = admission.check_model(self.pool, request.model, request.kind)
        admission.check_prompt(self.pool, model, request)
        needs = admission.check_features(self.pool.serving(model.name).workers, request)
        order = (request.priority, next(self._arrivals))
        # The line always moves as far as it can: whoever has room now has it for nobody who waits.
        must_wait = not any(w.can(needs) for w in self.pool.free(model.name))
        position = self.queue.num_before(model.name, order) + 1
        eta = self._eta_s(model.name, position) if must_wait else 0.0
        admission.check_time(now, request, eta)
        if must_wait:
            admission.check_bounds(
                self.queue, self.limits, request, self._retry_after_s(model.name)
            )
        return Record(
            request=request,
            model=model.name,
            order=order,
            needs=needs,
            choices={
                resumed.index: Choice(
                    list(resumed.token_ids), resumed.is_finished, resumed.cumulative_logprob
                )
                for resumed in request.resumed
            },
            submitted_at=now,
            queued_at=now,
            notify_at=now + self.limits.notify_after_s,
        )

    def _retry_after_s(self, model: str) -> float:
        """Until a part of the queue has drained, so that not all the refused come for one place."""
        rate = self._rate(model).requests_per_s(self.pool.serving(model).num_seats)
        if rate is None:
            return 1.0
        return min(max(1.0, _REFILL * self.queue.num_requests) / rate, _LONGEST_RETRY_S)

    def _eta_s(self, model: str, position: int) -> float | None:
        rate = self._rate(model).requests_per_s(self.pool.serving(model).num_seats)
        return None if rate is None else position / rate

    def _rate(self, model: str) -> DrainRate:
        return self._drain.setdefault(model, DrainRate())

    # --- placement ---

    def _fill(self, now: float, model: str) -> list[Action]:
        """Place whoever is next while somebody has room."""
        actions: list[Action] = []
        while True:
            for record in self.queue.heads(model):
                able = [w for w in self.pool.free(model) if w.can(record.needs)]
                if able:
                    break
            else:
                return actions
            self.queue.remove(record)
            worker = self._choose(record, able)
            record.phase = Phase.RUNNING
            record.handle = next(self._handles)
            record.dispatched_at = now
            record.waited_s += now - record.queued_at
            record.stranded_at = None
            self.pool.assign(now, worker, record)
            self._arm(record)
            actions.append(Dispatch(record, worker, record.handle))

    def _choose(self, record: Record, able: list[Worker]) -> Worker:
        session = record.request.session_id
        if session is None:
            here = Circumstances(self._rng, self._rate(record.model).seat_s)
            return self._policy.choose(able, record, here)
        key = (record.model, session)
        preferred = self.pool.workers.get(self._sessions.get(key, ""))
        here = Circumstances(self._rng, self._rate(record.model).seat_s, preferred)
        worker = self._policy.choose(able, record, here)
        self._sessions[key] = worker.worker_id
        self._sessions.move_to_end(key)
        if len(self._sessions) > self.limits.max_sessions:
            self._sessions.popitem(last=False)
        return worker

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
        del self._records[record.request.request_id]
        return actions

    def _free_seats(self, now: float, record: Record) -> Worker:
        seat_s = record.seats * (now - record.dispatched_at)
        self._rate(record.model).left(seat_s, record.request.num_prompt_tokens)
        return self.pool.release(record)

    def _lose(self, now: float, worker: Worker, why: str) -> list[Action]:
        """Take the worker out and put what it held back in the line, or end it; nobody is placed yet."""
        left_in_order = worker.state is WorkerState.DRAINING and not worker.assigned
        actions: list[Action] = [DropWorker(worker, why)]
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
        if record.displacements >= MAX_DISPLACEMENTS:
            suspect = errors.Internal(
                f"{record.displacements} workers were lost while they ran this request, "
                f"the last after {record.num_relayed} tokens; it is not tried again",
                reason="POISON_GUARD",
            )
            return self._give_up(now, record, error or suspect)
        needs = record.needs
        if record.num_relayed:
            needs |= {Feature.RESUME}
            # The dead worker itself counts: whoever keeps it running brings it back.
            if not any(w.can(needs) for w in [worker, *self.pool.serving(record.model).workers]):
                return self._give_up(
                    now, record, deadlines.lost_error(record, "it cannot be resumed")
                )
        if record.was_started:
            record.moved_from = worker.worker_id
        record.needs = needs
        record.phase = Phase.QUEUED
        record.queued_at = now
        record.notify_at = now + self.limits.notify_after_s
        record.notified_position = None
        self.queue.push(record)
        self._arm(record)
        return []

    def _find_stranded(self, now: float, model: str) -> None:
        """Those that wait for a worker which does not exist wait only so long."""
        serving = self.pool.serving(model).workers
        is_able: dict[frozenset[Feature], bool] = {}
        for record in self.queue.waiting(model):
            if record.needs not in is_able:
                is_able[record.needs] = any(worker.can(record.needs) for worker in serving)
            if is_able[record.needs]:
                record.stranded_at = None
            elif record.stranded_at is None:
                record.stranded_at = now
                self._arm(record)

    def _forget(self, worker: Worker) -> None:
        self._timers.clear(worker)
        self.pool.forget(worker)
        model = worker.spec.model.name
        if self.pool.find_model(model) is None and not self.queue.heads(model):
            self._drain.pop(model, None)
