"""One run: a trace through the core over modelled cards, event by event under a virtual clock.

Does what the service's shell does (carries out actions, relays tokens, passes reports on) and keeps what a
client would have seen.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from candor import errors
from scheduler.core import ORDERS, POLICIES, Record, Scheduler, Worker
from scheduler.core.ledger import INPUT_WEIGHT, OUTPUT_WEIGHT
from scheduler.core.types import (
    Action,
    CancelOnWorker,
    Dispatch,
    Fail,
    Limits,
    Load,
    Model,
    NotifyQueued,
    Report,
    Request,
    TenantLimits,
    WorkerSpec,
    WorkerState,
)
from scheduler.simulate.cards import Card, CardModel, CardSequence, StepPlan
from scheduler.simulate.traces import TraceRequest

MODEL = Model("m", max_model_len=10_000_000, vocab_size=1)
_REPORT_EVERY_S = 1.0
_MAX_DIGESTS = 512


@dataclass(slots=True, eq=False)
class Outcome:
    """What one request's client saw. Instants are seconds of the virtual clock."""

    request: TraceRequest
    refused: str = ""
    """Reason of the refusal, or of the failure."""
    placed_at: float | None = None
    worker: str = ""
    first_token_at: float | None = None
    ended_at: float | None = None
    num_tokens: int = 0
    cached_tokens: int = 0
    promised_at: float | None = None
    """When it was first told an estimate, and how long that was."""
    promised_s: float = 0.0

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return None if self.first_token_at is None else self.first_token_at - self.request.at_s

    @property
    def work(self) -> float:
        """Tokens computed for it, in the ledger's currency."""
        if self.first_token_at is None:
            return 0.0
        computed = self.request.prompt_tokens - self.cached_tokens
        return INPUT_WEIGHT * computed + OUTPUT_WEIGHT * self.num_tokens


@dataclass(slots=True)
class Result:
    """What came out of a run."""

    outcomes: list[Outcome]
    cards: list[Card]
    duration_s: float
    gaps: Counter[float]
    """Seconds between tokens of a sequence (to 0.1 ms) → how often."""


@dataclass(slots=True, eq=False)
class _Seat:
    """A worker of the core and the card behind it."""

    worker: Worker
    card: Card
    plan: StepPlan | None = None


@dataclass(eq=False)
class Twin:
    """The core, its cards and the clock. `run` can be called once."""

    cards: Sequence[CardModel]
    policy: str = "expected_wait"
    order: str = "deficit_prefix"
    limits: Limits = field(
        default_factory=lambda: Limits(max_queued_requests=10**6, max_queued_tokens=10**12)
    )
    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)
    tells_budgets: bool = False
    """Whether the scheduler is told the requests' budgets, so that it can refuse and shed."""
    seed: int = 1
    stop_at_s: float | None = None
    """End the run then, with whatever is still in flight."""

    def __post_init__(self) -> None:
        self.core = Scheduler(
            self.limits,
            POLICIES[self.policy].make(),
            random.Random(self.seed),
            order=ORDERS[self.order],
            tenants=self.tenants,
        )
        self.now = 0.0
        self._gaps: Counter[float] = Counter()
        self._events: list[tuple[float, int, _Seat | Outcome | None]] = []
        self._count = count()
        self._seats: dict[str, _Seat] = {}
        for n, model in enumerate(self.cards):
            spec = WorkerSpec(f"w{n:04}", "i", MODEL, model.slots, payload=n)
            worker, _ = self.core.worker_registered(0.0, spec)
            self._seats[spec.worker_id] = seat = _Seat(worker, Card(model))
            self.core.worker_linked(0.0, worker)
            self._report(seat)

    def run(self, trace: Sequence[TraceRequest]) -> Result:
        """All of the trace, until everything has ended (or until `stop_at_s`)."""
        outcomes = [Outcome(request) for request in trace]
        for outcome in outcomes:
            self._at(outcome.request.at_s, outcome)
        self._at(_REPORT_EVERY_S, None)
        num_left = len(outcomes)
        while self._events and (num_left or self.core.num_in_flight):
            self._tick_until(self._events[0][0])
            self.now, _, what = heapq.heappop(self._events)
            if self.stop_at_s is not None and self.now > self.stop_at_s:
                break
            if isinstance(what, Outcome):
                num_left -= 1
                self._submit(what)
            elif what is None:
                for seat in self._seats.values():
                    self._report(seat)
                self._at(self.now + _REPORT_EVERY_S, None)
            else:
                self._finish_step(what)
        return Result(outcomes, [s.card for s in self._seats.values()], self.now, self._gaps)

    def _at(self, at: float, what: _Seat | Outcome | None) -> None:
        heapq.heappush(self._events, (at, next(self._count), what))

    def _tick_until(self, at: float) -> None:
        while (due := self.core.next_at()) is not None and due <= at:
            self.now = max(self.now, due)
            self._carry_out(self.core.tick(self.now))

    def _submit(self, outcome: Outcome) -> None:
        wanted = outcome.request
        budget = wanted.ttft_budget_s if self.tells_budgets else None
        request = Request(
            request_id=f"r{next(self._count)}",
            model=MODEL.name,
            num_prompt_tokens=wanted.prompt_tokens,
            context_tokens=wanted.prompt_tokens + 1,
            priority=wanted.priority,
            tenant=wanted.tenant,
            session_id=wanted.session,
            prefix_digests=wanted.digests(),
            first_token_by=None if budget is None else self.now + budget,
            payload=outcome,
        )
        try:
            self._carry_out(self.core.submit(self.now, request))
        except errors.CandorError as error:
            outcome.refused, outcome.ended_at = error.reason, self.now

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Dispatch(record, worker, handle):
                    self._dispatch(record, worker, handle)
                case CancelOnWorker(_, worker, handle):
                    self._seats[worker.worker_id].card.cancel(handle)
                case Fail(record, error):
                    outcome = _outcome(record)
                    outcome.refused, outcome.ended_at = error.reason, self.now
                case NotifyQueued(record, _, eta_s):
                    outcome = _outcome(record)
                    if outcome.promised_at is None and eta_s is not None:
                        outcome.promised_at, outcome.promised_s = self.now, eta_s

    def _dispatch(self, record: Record, worker: Worker, handle: int) -> None:
        outcome = _outcome(record)
        outcome.placed_at, outcome.worker = self.now, worker.worker_id
        seat, wanted = self._seats[worker.worker_id], outcome.request
        digests = record.request.prefix_digests
        seat.card.waiting.append(
            CardSequence(handle, wanted.prompt_tokens, wanted.output_tokens, digests)
        )
        if seat.plan is None:
            self._begin_step(seat)

    def _begin_step(self, seat: _Seat) -> None:
        if seat.card.has_work:
            seat.plan = seat.card.plan()
            self._at(self.now + seat.plan.duration_s, seat)

    def _finish_step(self, seat: _Seat) -> None:
        plan, seat.plan = seat.plan, None
        assert plan is not None
        core, worker = self.core, seat.worker
        grown = seat.card.finish(plan)
        self._gaps[round(plan.duration_s, 4)] += len(plan.decoding)
        core.worker_stepped(self.now, worker, seat.card.num_steps, _load(seat.card))
        actions: list[Action] = []
        for sequence in grown:
            record = worker.assigned.get(sequence.handle)
            if record is None:
                continue
            outcome = _outcome(record)
            if not sequence.was_seen:
                sequence.was_seen = True
                core.request_started(record, sequence.cached_tokens)
                outcome.cached_tokens = sequence.cached_tokens
                outcome.first_token_at = self.now
            is_new = record.relay(0, outcome.num_tokens, (0,))
            assert is_new
            outcome.num_tokens += 1
            if record.pending_tokens:
                core.request_showed_token(self.now, record)
            if not sequence.output_left:
                outcome.ended_at = self.now
                actions += core.request_finished(self.now, record)
        self._carry_out(actions)
        if seat.plan is None:
            self._begin_step(seat)

    def _report(self, seat: _Seat) -> None:
        card = seat.card
        report = Report(
            WorkerState.READY,
            card.num_steps,
            not card.has_work,
            _load(card),
            card.digests(_MAX_DIGESTS),
        )
        self._carry_out(self.core.worker_reported(self.now, seat.worker, report))


def _load(card: Card) -> Load:
    return Load(card.kv_used, card.model.kv_tokens, card.prefill_rate)


def _outcome(record: Record) -> Outcome:
    outcome = record.request.payload
    assert isinstance(outcome, Outcome)
    return outcome
