"""The core under random events: whatever happens in whatever order, these hold."""

from __future__ import annotations

import random
from collections import Counter

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from candor import errors
from scheduler.core import ORDERS, POLICIES, Record, Scheduler, Worker
from scheduler.core.record import Phase
from scheduler.core.types import (
    Action,
    CancelOnWorker,
    Complete,
    Dispatch,
    DropWorker,
    Fail,
    Feature,
    Limits,
    Model,
    Report,
    Request,
    WorkerSpec,
    WorkerState,
)

SLACK = 1
LIMITS = Limits(
    max_queued_requests=6,
    max_queued_tokens=60,
    max_wait_s=40.0,
    window_slack=SLACK,
    lease_s=5.0,
    worker_wait_s=3.0,
    lost_memory_s=8.0,
    max_sessions=2,
    age_s=4.0,
    quantum=20,
    max_tenants=1,
)
FEATURES = st.sampled_from([frozenset[Feature](), frozenset({Feature.RESUME, Feature.SEED})])
SEED_NEEDED = frozenset({(Feature.SEED, "seed")})


class Traffic(RuleBasedStateMachine):
    """Clients and workers that do anything they may do; the books are kept a second time, outside."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        order=st.sampled_from(sorted(ORDERS)),
        seed=st.integers(0, 9),
        features=FEATURES,
    )
    def begin(self, policy: str, order: str, seed: int, features: frozenset[Feature]) -> None:
        self.now = 0.0
        self.order = order
        self.core = Scheduler(
            LIMITS, POLICIES[policy].make(), random.Random(seed), order=ORDERS[order]
        )
        self.number = 0
        self.admitted: dict[str, Record] = {}
        self.endings: Counter[str] = Counter()
        self.refused = 0
        self.tokens: dict[str, list[int]] = {}
        self.live_handles: dict[int, tuple[Record, Worker]] = {}
        for worker_id, its_features in (("w1", features), ("w2", frozenset[Feature]())):
            self.register(worker_id, 2, "m", its_features, True)

    # --- carrying out ---

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Dispatch(record, worker, handle):
                    assert record.handle == handle
                    assert worker.state is WorkerState.READY
                    assert record.needs <= worker.spec.features
                    assert record.handle not in self.live_handles
                    self.live_handles[record.handle] = (record, worker)
                    self.check_first_come(record)
                case CancelOnWorker(record, worker, handle):
                    assert self.live_handles.pop(handle) == (record, worker)
                case Fail(record, _) | Complete(record):
                    self.end(record)
                case DropWorker(worker, _):
                    self.live_handles = {
                        h: pair for h, pair in self.live_handles.items() if pair[1] is not worker
                    }

    def check_first_come(self, placed: Record) -> None:
        """Nobody of its line with an earlier place still waits, but for the sake of a cached prefix."""
        if self.order == "deficit_prefix" and placed.request.prefix_digests:
            return
        for other in self.admitted.values():
            if (other.phase, other.model, other.needs, other.level) != (
                Phase.QUEUED,
                placed.model,
                placed.needs,
                placed.level,
            ):
                continue
            if other.account is placed.account or not self.core.queue.is_fair:
                assert placed.key < other.key

    def end(self, record: Record) -> None:
        request_id = record.request.request_id
        self.endings[request_id] += 1
        assert self.endings[request_id] == 1 and record.phase is Phase.ENDED

    def running(self) -> list[Record]:
        return [r for r in self.admitted.values() if r.phase is Phase.RUNNING]

    def workers(self) -> list[Worker]:
        return [w for w in self.core.pool.workers.values() if w.lost_at is None]

    # --- clients ---

    @rule(
        count=st.integers(1, 4),
        tokens=st.integers(1, 20),
        priority=st.integers(-1, 1),
        n=st.integers(1, 3),
        model=st.sampled_from(["m", "m", "m", "n"]),
        needs_seed=st.sampled_from([False, False, True]),
        session=st.sampled_from([None, "s", "t", "u"]),
        deadline=st.none() | st.none() | st.integers(-1, 20),
        tenant=st.sampled_from(["", "a", "b"]),
        prefix=st.sampled_from([(), (1,), (1, 2), (3,)]),
    )
    def submit(
        self,
        count: int,
        tokens: int,
        priority: int,
        n: int,
        model: str,
        needs_seed: bool,
        session: str | None,
        deadline: int | None,
        tenant: str,
        prefix: tuple[int, ...],
    ) -> None:
        for _ in range(count):
            self.number += 1
            request = Request(
                f"r{self.number}",
                model,
                tokens,
                tokens + 1,
                num_sequences=n,
                priority=priority,
                needs=SEED_NEEDED if needs_seed else frozenset(),
                session_id=session,
                deadline_at=None if deadline is None else self.now + deadline,
                tenant=tenant,
                prefix_digests=prefix,
            )
            try:
                actions = self.core.submit(self.now, request)
            except errors.CandorError:
                self.refused += 1
                continue
            record = self.core.find(request.request_id)
            assert record is not None
            self.admitted[request.request_id] = record
            self.tokens[request.request_id] = []
            self.carry_out(actions)

    @precondition(lambda self: self.core.num_in_flight)
    @rule(pick=st.data())
    def cancel(self, pick: st.DataObject) -> None:
        live = [r for r in self.admitted.values() if r.phase is not Phase.ENDED]
        gone = pick.draw(st.lists(st.sampled_from(live), unique=True, min_size=1, max_size=3))
        before = set(self.live_handles)
        actions = self.core.cancel(self.now, *gone)
        for record in gone:
            self.end(record)
        self.carry_out(actions)
        placed = {
            self.live_handles[h][0].request.request_id for h in set(self.live_handles) - before
        }
        assert not placed & {r.request.request_id for r in gone}

    # --- workers ---

    @rule(
        worker_id=st.sampled_from(["w1", "w2", "w3"]),
        slots=st.integers(1, 3),
        model=st.sampled_from(["m", "m", "n"]),
        features=FEATURES,
        is_ready=st.sampled_from([True, True, True, False]),
    )
    def register(
        self, worker_id: str, slots: int, model: str, features: frozenset[Feature], is_ready: bool
    ) -> None:
        self.number += 1
        spec = WorkerSpec(
            worker_id,
            f"i{self.number}",
            Model(model, max_model_len=50, vocab_size=100),
            slots,
            features,
        )
        worker, actions = self.core.worker_registered(self.now, spec)
        self.carry_out(actions)
        if is_ready:
            self.say(worker, WorkerState.READY)

    def say(self, worker: Worker, state: WorkerState) -> None:
        self.carry_out(self.core.worker_linked(self.now, worker))
        report = Report(state, worker.last_step_seq + 1, is_idle=not worker.assigned)
        self.carry_out(self.core.worker_reported(self.now, worker, report))

    @precondition(lambda self: self.workers())
    @rule(pick=st.data(), how=st.sampled_from(["lose", "lose", "drain", "leave", "ready", "ready"]))
    def upset(self, pick: st.DataObject, how: str) -> None:
        worker = pick.draw(st.sampled_from(self.workers()))
        if how == "lose":
            self.carry_out(self.core.worker_lost(self.now, worker, "died"))
        elif how == "drain":
            self.carry_out(self.core.drain_worker(self.now, worker.worker_id)[1])
        elif how == "leave":
            self.say(worker, WorkerState.DRAINING)
        else:
            self.say(worker, WorkerState.READY)

    @precondition(lambda self: self.running())
    @rule(pick=st.data(), ends=st.booleans())
    def step(self, pick: st.DataObject, ends: bool) -> None:
        record = pick.draw(st.sampled_from(self.running()))
        worker = record.worker
        assert worker is not None
        self.core.request_started(record)
        for index in range(record.seats):
            known = record.choices.get(index)
            if known is not None and known.is_finished:
                continue
            offset = 0 if known is None else len(known.token_ids)
            assert record.relay(index, offset, [offset])
            if ends:
                record.end_choice(index, None)
        self.core.request_showed_token(self.now, record)
        self.core.worker_stepped(self.now, worker, worker.last_step_seq + 1, None)

    @precondition(lambda self: self.running())
    @rule(pick=st.data())
    def finish(self, pick: st.DataObject) -> None:
        record = pick.draw(st.sampled_from(self.running()))
        self.live_handles.pop(record.handle)
        actions = self.core.request_finished(self.now, record)
        self.end(record)
        self.carry_out(actions)

    @precondition(lambda self: self.running())
    @rule(pick=st.data(), is_bounce=st.booleans())
    def fail(self, pick: st.DataObject, is_bounce: bool) -> None:
        record = pick.draw(st.sampled_from(self.running()))
        self.live_handles.pop(record.handle)
        error = errors.Unavailable("no") if is_bounce else errors.Internal("broken")
        self.carry_out(self.core.request_failed(self.now, record, error))

    # --- time ---

    @rule(
        seconds=st.sampled_from([0.1, 1.0, 1.0, 3.0, 4.0, 50.0]),
        is_healthy=st.sampled_from([True, True, False]),
    )
    def wait(self, seconds: float, is_healthy: bool) -> None:
        self.now += seconds
        for worker in self.workers() if is_healthy else ():
            self.core.worker_stepped(self.now, worker, worker.last_step_seq + 1, None)
        self.carry_out(self.core.tick(self.now))
        soonest = self.core.next_at()
        assert soonest is None or soonest > self.now

    # --- what always holds ---

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        live = {i for i, r in self.admitted.items() if r.phase is not Phase.ENDED}
        assert self.core.num_in_flight == len(live)
        assert {i for i in self.admitted if self.endings[i]} == set(self.admitted) - live
        queued = [r for m in self.core.queue.models() for r in self.core.queue.waiting(m)]
        assert len(queued) == self.core.queue.num_requests
        assert sum(r.request.num_prompt_tokens for r in queued) == self.core.queue.num_tokens
        assigned = [r for w in self.core.pool.workers.values() for r in w.assigned.values()]
        assert len(queued) + len(assigned) == len(live)
        assert {r.handle: r for r, _ in self.live_handles.values()} == {
            r.handle: r for r in assigned
        }

    @invariant()
    def no_worker_is_overfull(self) -> None:
        for worker in self.core.pool.workers.values():
            assert len(worker.assigned) <= worker.spec.slots + SLACK
            assert worker.seats_used == sum(r.seats for r in worker.assigned.values())
            assert worker.pending_prefill_tokens == sum(
                r.pending_tokens for r in worker.assigned.values()
            )

    @invariant()
    def nobody_waits_while_somebody_has_room(self) -> None:
        for model in self.core.queue.models():
            for record in self.core.queue.waiting(model):
                assert not any(w.can(record.needs) for w in self.core.pool.free(model))

    @invariant()
    def accounts_and_prefixes_are_kept_in_both_books(self) -> None:
        live = [r for r in self.admitted.values() if r.phase is not Phase.ENDED]
        for record in live:
            mine = [r for r in live if r.account is record.account]
            assert record.account.num_in_flight == len(mine)
            assert record.account.num_queued == sum(r.phase is Phase.QUEUED for r in mine)
        for model in ("m", "n"):
            tenants = {r.request.tenant for r in live if r.model == model}
            assert self.core.ledgers.of(model).num_accounts <= len(tenants) + LIMITS.max_tenants
        self.core.placer.prefixes.check()

    @invariant()
    def counters_add_up(self) -> None:
        s = self.core.stats
        assert s.refused == self.refused
        assert s.submitted == len(self.admitted) + self.refused
        assert s.finished + s.failed + s.cancelled == sum(self.endings.values())

    def teardown(self) -> None:
        """Given time and no workers, everything ends."""
        if not hasattr(self, "core"):
            return
        for worker in self.workers():
            self.carry_out(self.core.worker_lost(self.now, worker, "the end"))
        while (at := self.core.next_at()) is not None:
            self.now = max(self.now, at)
            self.carry_out(self.core.tick(self.now))
            soonest = self.core.next_at()
            assert soonest is None or soonest > self.now
        assert self.core.num_in_flight == 0 and not self.core.pool.workers
        assert self.core.placer.prefixes.num_blocks == 0
        assert all(self.endings[i] == 1 for i in self.admitted)


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
